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
from torch import Tensor

from flowgrpo_rc.actor.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.agreement import on_any_process
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy
from flowgrpo_rc.gap.advice import Advice, StepGap, advise, judge_all
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.clipping import SampledSteps, what_is_left_out
from flowgrpo_rc.gap.drift import Drift, DriftMeter
from flowgrpo_rc.gap.intervals import CONFIDENCE, looks, mean_interval, share_interval
from flowgrpo_rc.gap.law import redrawn
from flowgrpo_rc.gap.limits import GAP_QUANTILE
from flowgrpo_rc.gap.probe_images import ProbeBatch, ProbedRun, sample_and_rescore, timed
from flowgrpo_rc.gap.units import GapSample
from flowgrpo_rc.gap.verdict import decisive
from flowgrpo_rc.loss.objectives import OBJECTIVES


@dataclass(frozen=True)
class ProbeResult:
    """The whole measurement, and what follows from it."""

    setting: dict[str, Any]
    """The settings that shape the gap, for the table's heading."""
    steps: tuple[StepGap, ...]
    overall: StepGap
    drift: Drift | None
    """What an update would learn from the gap alone; None where the objective's limit is not centred at the engine's
    log-probs, which leaves nothing of the kind."""
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

    Of several processes every one measures the same images, so that all call the transformer alike.

    Args:
        run: a run before its first step; resumed, if a checkpoint is to be probed.
        images: at every place, to start with; at least 2.
        max_images: the same to end with. While it is not shown on which side of their limits the shares lie, the
            number of images is doubled, up to this one; None: no more than ``images``.

    Raises:
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    first = sample_and_rescore(run, images)
    measured = _measure_until_settled(run, first, images, max_images or images)
    seconds = dict(first.seconds)
    failure = measured.failure
    try:
        if not failure:
            _, seconds["update"] = timed(run.device, lambda: _update(run, first, measured))
    except NonFiniteUpdateError as error:
        failure = _in_words(error)
    advice = advise(
        run.mode,
        measured.overall,
        measured.sample.engine,
        measured.sample.dimensions,
        measured.steps,
        failure,
        drift=measured.drift,
        adapter_lag=run.rollout.adapter_lag,
        ahead=run.rollout.ahead,
        images=measured.images,
        confidence=measured.confidence,
    )
    return ProbeResult(
        setting=_setting(run, measured),
        steps=measured.steps,
        overall=measured.overall,
        drift=measured.drift,
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


def step_gap(
    steps: SampledSteps,
    timestep: float | None,
    confidence: float = CONFIDENCE,
    expected: SampledSteps | None = None,
) -> StepGap:
    """The statistics of these steps' gaps, with what becomes of the samples.

    Args:
        steps: flat.
        timestep: that of all of them; None of several together.
        confidence: the intervals'.
        expected: the same images' steps as they could have come out, of which the shares are taken; None: ``steps``.
    """
    shares = steps if expected is None else expected
    size = steps.gap.abs()
    nats = steps.nats.abs()
    used = shares.keep & ~shares.zeroed
    zeroed = shares.keep & shares.zeroed
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
        clipped=float((shares.beyond & used).sum() / used.sum().clamp(min=1)),
        rejected=1 - float(shares.keep.double().mean()),
        zeroed=float(zeroed.double().mean()),
        nats=float(nats.mean()),
        kl_nats=float(steps.kl_nats.mean()),
        images=len(steps.image.unique()),
        clipped_interval=share_interval(shares.beyond, used, shares.image, confidence),
        rejected_interval=share_interval(~shares.keep, every, shares.image, confidence),
        zeroed_interval=share_interval(zeroed, every, shares.image, confidence),
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
    drift: Drift | None
    limits: dict[str, Tensor]
    """``clip_widths`` and ``rollout_rs_bounds`` of each image, where they are calibrated."""
    failure: str = ""
    """Why there is no gradient to measure."""


def _measure_until_settled(run: ProbedRun, first: ProbeBatch, start: int, most: int) -> _Measured:
    """What the images say at the look at which they say enough, or are ``most``; ``first`` holds ``start``."""
    meter = _meter(run)
    samples = [first.sample]
    unmeasured = [first]
    images = start
    measured = None
    # Bands, quantiles and intervals are of all images so far, so every look measures them anew; gradients are added up.
    for count, confidence in looks(start, most):
        while images < count:
            missing = min(start, count - images)
            unmeasured.append(sample_and_rescore(run, missing, images))
            samples.append(unmeasured[-1].sample)
            images += missing
        sample = GapSample.concatenate(samples)
        limits = _calibrated_limits(run.mode, sample)
        drift = None
        if meter is not None:
            try:
                _add_gradients(run, meter, unmeasured, limits)
            except NonFiniteUpdateError as error:
                return replace(_measure(run, sample, limits, None, images, confidence), failure=_in_words(error))
            drift = meter.result(confidence)
        if meter is not None and limits:
            # More images make other bands, under which the gradients of these are others, too: they come again.
            meter = _meter(run)
        else:
            unmeasured = []
        measured = _measure(run, sample, limits, drift, images, confidence)
        judged = judge_all(run.mode, measured.overall, sample.dimensions, drift)
        worst = decisive(list(judged.values()))
        # Together, as a process that measured on would sample alone.
        if on_any_process(worst.settled):
            break
    assert measured is not None
    return measured


def _meter(run: ProbedRun) -> DriftMeter | None:
    """A meter without images; None where there is no drift."""
    return DriftMeter(run.mode, run.rollout.algo.sde_type, run.seed) if run.mode.limits_the_gap else None


def _in_words(error: NonFiniteUpdateError) -> str:
    return f"an optimizer step on these samples fails: {str(error).partition(';')[0]}"


def _add_gradients(run: ProbedRun, meter: DriftMeter, batches: list[ProbeBatch], limits: dict[str, Tensor]) -> None:
    """Gives the meter these images, with their calibrated limits."""
    start = 0
    for batch in batches:
        trajectories = batch.trajectories
        own = slice(start, start + len(trajectories))
        for name, values in limits.items():
            trajectories[name] = values[own]
        meter.add(run.actor, trajectories, batch.scored, batch.conditioning)
        start = own.stop


def _calibrated_limits(mode: ModeInForce, sample: GapSample) -> dict[str, Tensor]:
    """By its name in a batch, each limit that ``auto`` makes of this gap."""
    # Bands of a checkpoint hold staleness and the gaps of other engines, so calibrated ones are made anew.
    clip_bands = ClipBands.configured(mode.diffusion_loss)
    rejection_bands = RejectionBands.configured(mode.rollout_correction)
    for bands in filter(None, (clip_bands, rejection_bands)):
        bands.observe(sample.timesteps, sample.engine)
    limits = {}
    if clip_bands is not None:
        limits[Key.CLIP_WIDTHS] = clip_bands.widths(sample.timesteps)
    if rejection_bands is not None:
        limits[Key.ROLLOUT_RS_BOUNDS] = rejection_bands.bounds(sample.timesteps)
    return limits


def _measure(
    run: ProbedRun, sample: GapSample, limits: dict[str, Tensor], drift: Drift | None, images: int, confidence: float
) -> _Measured:
    steps = _left_out(run.mode, sample, limits)
    possible = redrawn(sample, run.seed)
    draws = len(possible.engine) // len(sample.engine)
    repeated = {name: values.repeat(draws, *[1] * (values.dim() - 1)) for name, values in limits.items()}
    expected = _left_out(run.mode, possible, repeated)
    # All draws of an image are one image to the intervals.
    expected = replace(expected, image=expected.image % len(sample.engine))
    found = [
        step_gap(
            steps.part(sample.timesteps == timestep),
            timestep,
            confidence,
            expected.part(possible.timesteps == timestep),
        )
        for timestep in sorted(set(sample.timesteps.flatten().tolist()), reverse=True)
    ]
    overall = step_gap(
        steps.part(torch.ones_like(steps.keep)), None, confidence, expected.part(torch.ones_like(expected.keep))
    )
    return _Measured(sample, images, confidence, tuple(found), overall, drift, limits)


def _left_out(mode: ModeInForce, sample: GapSample, limits: dict[str, Tensor]) -> SampledSteps:
    """What becomes of the sample's steps under the configured limits and these calibrated ones."""
    widths = limits.get(Key.CLIP_WIDTHS)
    return what_is_left_out(
        mode, sample, None if widths is None else widths.double(), limits.get(Key.ROLLOUT_RS_BOUNDS)
    )


def _update(run: ProbedRun, first: ProbeBatch, measured: _Measured) -> None:
    """One optimizer step on the first images with made-up advantages, for its time."""
    batch = first.trajectories
    # Even signs, so that what the objective leaves out on one side only shows as in training.
    signs = torch.ones(len(batch))
    signs[::2] = -1
    batch[Key.ADVANTAGES] = signs
    ones = torch.ones_like(batch[Key.ROLLOUT_LOG_PROBS])
    old = replace(OldPolicy.of_rollout(batch), weights=ones, keep=ones.bool())
    for name, values in measured.limits.items():
        batch[name] = values[: len(batch)]
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
        "clip_band": run.mode.objective.limit.ends(loss, measured.limits.get(Key.CLIP_WIDTHS)),
        "clip_sides": loss.has_sides,
        "latent_dimensions": measured.sample.dimensions,
        "images": len(measured.sample.engine),
    }
