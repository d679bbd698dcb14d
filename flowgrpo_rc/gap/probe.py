"""Before training: how far apart are rollout engine and actor, and does bypass mode survive that?

Every step that the configuration trains is sampled by the engine, with the window where training would put it, and
rescored by the actor under the very same weights. In bypass mode the clip is centred at the engine's log-probs, so
whatever of that gap lies outside the clip band is clipped before anything has been learned; what is left of the batch
is chosen by the engine's error instead of the reward.

This is the measurement behind the command ``flowgrpo-rc probe``; ``flowgrpo_rc.gap.rescoring`` measures while a run
trains.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.actor.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy
from flowgrpo_rc.gap.advice import Advice, StepGap, advise, judge_all
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.clipping import SampledSteps, what_is_left_out
from flowgrpo_rc.gap.intervals import CONFIDENCE, looks, mean_interval, share_interval
from flowgrpo_rc.gap.limits import GAP_QUANTILE
from flowgrpo_rc.gap.probe_images import ProbeBatch, ProbedRun, sample_and_rescore, timed
from flowgrpo_rc.gap.units import GapSample
from flowgrpo_rc.gap.verdict import NOT_SHOWN_SAFE, decisive
from flowgrpo_rc.loss.objectives import OBJECTIVES


@dataclass(frozen=True)
class ProbeResult:
    """The whole measurement, and what follows from it."""

    setting: dict[str, Any]
    """The settings that shape the gap, for the table's heading."""
    steps: tuple[StepGap, ...]
    overall: StepGap
    advice: Advice
    images: int
    """Images measured at every place of the SDE window."""
    confidence: float
    """Confidence of every interval in ``steps`` and ``overall``: that of the look which ended the measurement, so that
    all looks together have ``intervals.CONFIDENCE``."""
    seconds: dict[str, float]
    """What ``rollout``, ``score`` and ``update`` took, of the images of the first look."""
    saved: float | None
    """Share of rollout, score and update that bypass mode leaves out, against decoupled mode; None where the update
    failed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON: also with the recommended limit under its own key, and null under those of other limits."""
        values = asdict(self)
        values["advice"]["safe"] = self.advice.safe
        for key in {objective.limit.key for objective in OBJECTIVES.values()}:
            values["advice"][key] = self.advice.limit if key == self.advice.limit_key else None
        return values


def run_probe(run: ProbedRun, images: int, max_images: int | None = None) -> ProbeResult:
    """Measures at every place of the SDE window. The run is used up: its adapter moves.

    Args:
        run: a run before its first step; resumed, if a checkpoint is to be probed.
        images: at every place, to start with; at least 2.
        max_images: the same to end with. While it is not shown on which side of their limits the shares lie, the
            number of images is doubled, up to this one; None: no more than ``images``.

    Raises:
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    first = sample_and_rescore(run, images)
    measured = _measure_until_settled(run, first.sample, images, max_images or images)
    seconds = dict(first.seconds)
    failure = ""
    try:
        _, seconds["update"] = timed(run.device, lambda: _update(run, first, measured))
    except NonFiniteUpdateError as error:
        failure = f"an optimizer step on these samples fails: {str(error).partition(';')[0]}"
    advice = advise(
        run.mode,
        measured.overall,
        measured.sample.engine,
        measured.sample.dimensions,
        measured.steps,
        failure,
        adapter_lag=run.rollout.adapter_lag,
        images=measured.images,
        confidence=measured.confidence,
    )
    return ProbeResult(
        setting=_setting(run, measured),
        steps=measured.steps,
        overall=measured.overall,
        advice=advice,
        images=measured.images,
        confidence=measured.confidence,
        seconds=seconds,
        saved=None if failure else saved_by_bypass(seconds, run.scored_share),
    )


def saved_by_bypass(seconds: Mapping[str, float], scored_share: float) -> float:
    """Share of ``rollout``, ``score`` and ``update`` of the same images that bypass mode leaves out, against decoupled
    mode, which gives ``scored_share`` of a batch a scoring pass."""
    score = seconds["score"] * scored_share
    return score / (seconds["rollout"] + score + seconds["update"])


def step_gap(steps: SampledSteps, timestep: float | None, confidence: float = CONFIDENCE) -> StepGap:
    """The statistics of these steps' gaps, with what becomes of the samples.

    The steps are flat and of one ``timestep``, or with None of several together; ``confidence`` is the intervals'.
    """
    size = steps.gap.abs()
    nats = steps.nats.abs()
    used = steps.keep & ~steps.zeroed
    zeroed = steps.keep & steps.zeroed
    every = torch.ones_like(used)
    median, q90, q99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=size.dtype)).tolist()
    return StepGap(
        timestep=timestep,
        count=len(size),
        mean=float(steps.gap.mean()),
        abs_mean=float(size.mean()),
        abs_median=median,
        abs_q90=q90,
        abs_q99=q99,
        abs_max=float(size.max()),
        clip_q90=float(torch.quantile(steps.size, GAP_QUANTILE)),
        clipped=float((steps.beyond & used).sum() / used.sum().clamp(min=1)),
        rejected=1 - float(steps.keep.double().mean()),
        zeroed=float(zeroed.double().mean()),
        nats=float(nats.mean()),
        kl_nats=float(steps.kl_nats.mean()),
        images=len(steps.image.unique()),
        clipped_interval=share_interval(steps.beyond, used, steps.image, confidence),
        rejected_interval=share_interval(~steps.keep, every, steps.image, confidence),
        zeroed_interval=share_interval(zeroed, every, steps.image, confidence),
        nats_interval=mean_interval(nats, steps.image, confidence),
    )


@dataclass(frozen=True)
class _Measured:
    """What the images say, and the limits that ``auto`` makes of this very gap."""

    sample: GapSample
    images: int
    confidence: float
    steps: tuple[StepGap, ...]
    overall: StepGap
    clip_widths: Float[Tensor, "n W"] | None
    rejection_bounds: Float[Tensor, " n"] | None


def _measure_until_settled(run: ProbedRun, sample: GapSample, first: int, most: int) -> _Measured:
    """What the images say at the look at which they say enough, or are ``most``; ``sample`` holds the ``first``."""
    images = first
    measured = None
    # Bands, quantiles and intervals are of all images so far, so every look measures anew.
    for count, confidence in looks(first, most):
        while images < count:
            missing = min(first, count - images)
            sample = GapSample.concatenate([sample, sample_and_rescore(run, missing, images).sample])
            images += missing
        measured = _measure(run.mode, sample, images, confidence)
        judged = judge_all(run.mode, measured.overall, sample.dimensions)
        if decisive(list(judged.values())).verdict != NOT_SHOWN_SAFE:
            break
    assert measured is not None
    return measured


def _measure(mode: ModeInForce, sample: GapSample, images: int, confidence: float) -> _Measured:
    # Bands of a checkpoint hold staleness and the gaps of other engines, so calibrated ones are made anew.
    clip_bands = ClipBands.configured(mode.diffusion_loss)
    rejection_bands = RejectionBands.configured(mode.rollout_correction)
    for bands in filter(None, (clip_bands, rejection_bands)):
        bands.observe(sample.timesteps, sample.engine)
    widths = None if clip_bands is None else clip_bands.widths(sample.timesteps)
    bounds = None if rejection_bands is None else rejection_bands.bounds(sample.timesteps)
    steps = what_is_left_out(mode, sample, None if widths is None else widths.double(), bounds)
    found = [
        step_gap(steps.part(sample.timesteps == timestep), timestep, confidence)
        for timestep in sorted(set(sample.timesteps.flatten().tolist()), reverse=True)
    ]
    overall = step_gap(steps.part(torch.ones_like(steps.keep)), None, confidence)
    return _Measured(sample, images, confidence, tuple(found), overall, widths, bounds)


def _update(run: ProbedRun, first: ProbeBatch, measured: _Measured) -> None:
    """One optimizer step on the first images with made-up advantages, for its time."""
    batch = first.trajectories
    # Even signs, so that what the objective leaves out on one side only shows as in training.
    signs = torch.ones(len(batch))
    signs[::2] = -1
    batch[Key.ADVANTAGES] = signs
    ones = torch.ones_like(batch[Key.ROLLOUT_LOG_PROBS])
    old = replace(OldPolicy.of_rollout(batch), weights=ones, keep=ones.bool())
    if measured.clip_widths is not None:
        batch[Key.CLIP_WIDTHS] = measured.clip_widths[: len(batch)]
    if measured.rejection_bounds is not None:
        batch[Key.ROLLOUT_RS_BOUNDS] = measured.rejection_bounds[: len(batch)]
    run.actor.update(batch, first.conditioning, [MiniBatch(torch.arange(len(batch)), old)], run.mode)


def _setting(run: ProbedRun, measured: _Measured) -> dict[str, Any]:
    correction = run.mode.rollout_correction
    loss = run.mode.diffusion_loss
    return {
        "model": run.model.path,
        "engine": run.rollout.name,
        "rollout_dtype": run.rollout.dtype,
        "quantization": run.rollout.quantization,
        "actor_dtype": run.model.dtype,
        "sde_type": run.rollout.algo.sde_type,
        "bypass_mode": correction.bypass_mode,
        "loss_type": correction.loss_type,
        "loss_mode": loss.loss_mode,
        "clip_ratio": loss.clip_ratio,
        "clip_band": run.mode.objective.limit.ends(loss, measured.clip_widths),
        "clip_sides": loss.has_sides,
        "latent_dimensions": measured.sample.dimensions,
        "images": len(measured.sample.engine),
    }
