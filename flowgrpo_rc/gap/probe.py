"""Before training: how far apart are rollout engine and actor, and does bypass mode survive that?

Every step that the configuration trains is sampled by the engine, with the window where training would put it, and
rescored by the actor under the very same weights. In bypass mode the clip is centred at the engine's log-probs, so
whatever of that gap lies outside the clip band is clipped before anything has been learned; what is left of the batch
is chosen by the engine's error instead of the reward.

This is the measurement behind the command ``flowgrpo-rc probe``. The few images of every batch that are rescored while
a run trains are ``flowgrpo_rc.gap.rescoring``'s.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.actor.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.gap.advice import Advice, StepGap, advise, judge_all
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.clipping import Clipping, clipping
from flowgrpo_rc.gap.intervals import CONFIDENCE, MOST_IMAGES, looks, mean_interval, share_interval
from flowgrpo_rc.gap.probe_images import ProbeBatch, ProbedRun, RescoredSteps, sample_and_rescore, timed
from flowgrpo_rc.gap.verdict import NOT_SHOWN_SAFE, decisive


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
        """Plain, for JSON."""
        values = asdict(self)
        values["advice"]["safe"] = self.advice.safe
        return values


def check_image_counts(images: int, max_images: int | None = None) -> None:
    """Refuse, before anything is loaded, what cannot be measured.

    Raises:
        ValueError: fewer than 2 images, more than ``MOST_IMAGES``, or more to start with than to end with.
    """
    if not 2 <= images <= MOST_IMAGES:
        raise ValueError(f"--images: got {images}; give 2 to {MOST_IMAGES} images a window place")
    if max_images is not None and not images <= max_images <= MOST_IMAGES:
        raise ValueError(f"--max-images: got {max_images}; give a number from --images, {images}, to {MOST_IMAGES}")


def run_probe(run: ProbedRun, images: int, max_images: int | None = None) -> ProbeResult:
    """Measures at every place of the SDE window. The run is used up: its adapter moves.

    Args:
        run: a run before its first step; resumed, if a checkpoint is to be probed.
        images: at every place, to start with.
        max_images: the same to end with. While it is not shown on which side of their limits the shares lie, the
            number of images is doubled, up to this one; None: no more than ``images``.

    Raises:
        ValueError: see ``check_image_counts``.
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    check_image_counts(images, max_images)
    first = sample_and_rescore(run, images)
    measured = _measure_until_settled(run, first.rescored, max_images or images)
    seconds = dict(first.seconds)
    failure = ""
    try:
        _, seconds["update"] = timed(run.device, lambda: _update(run, first, measured))
    except NonFiniteUpdateError as error:
        failure = f"an optimizer step on these samples fails: {str(error).partition(';')[0]}"
    rescored = measured.rescored
    advice = advise(
        run.mode,
        measured.overall,
        rescored.gap,
        rescored.dimensions,
        measured.steps,
        failure,
        adapter_lag=run.rollout.adapter_lag,
        images=rescored.images,
        confidence=measured.confidence,
    )
    return ProbeResult(
        setting=_setting(run, measured),
        steps=measured.steps,
        overall=measured.overall,
        advice=advice,
        images=rescored.images,
        confidence=measured.confidence,
        seconds=seconds,
        saved=None if failure else saved_by_bypass(seconds, run.scored_share),
    )


def saved_by_bypass(seconds: Mapping[str, float], scored_share: float) -> float:
    """Share of rollout, score and update that bypass mode leaves out, against decoupled mode as it is configured.

    Args:
        seconds: what ``rollout``, ``score`` and ``update`` of the same images took.
        scored_share: share of a batch that decoupled mode gives a scoring pass.
    """
    score = seconds["score"] * scored_share
    return score / (seconds["rollout"] + score + seconds["update"])


@dataclass(frozen=True)
class CorrectionEffect:
    """What the configured correction does to each step, for the gap alone."""

    keep: Bool[Tensor, "..."]
    """Which steps are not rejected."""
    zeroed: Bool[Tensor, "..."]
    """Which steps have an importance weight of 0 in the loss."""

    def part(self, chosen: Tensor) -> "CorrectionEffect":
        """The steps where ``chosen`` is true, flat."""
        return CorrectionEffect(self.keep[chosen], self.zeroed[chosen])


def step_gap(
    gap: Float[Tensor, " n"],
    nats: Float[Tensor, " n"],
    kl_nats: Float[Tensor, " n"],
    effect: CorrectionEffect,
    clip: Clipping,
    timestep: float | None,
    images: Int[Tensor, " n"] | None = None,
    confidence: float = CONFIDENCE,
) -> StepGap:
    """The statistics of one step's gaps, with what becomes of the samples.

    Args:
        gap, nats, kl_nats, effect, clip: of each sample.
        timestep: of all of them; None for all steps together.
        images: of each sample, the number of its image; None where each has its own.
        confidence: of the intervals.
    """
    size = gap.abs()
    used = effect.keep & ~effect.zeroed
    zeroed = effect.keep & effect.zeroed
    every = torch.ones_like(used)
    images = torch.arange(len(gap)) if images is None else images
    median, q90, q99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=size.dtype)).tolist()
    return StepGap(
        timestep=timestep,
        count=len(gap),
        mean=float(gap.mean()),
        abs_mean=float(size.mean()),
        abs_median=median,
        abs_q90=q90,
        abs_q99=q99,
        abs_max=float(size.max()),
        clip_q90=float(torch.quantile(clip.size, 0.9)),
        clipped=float((clip.beyond & used).sum() / used.sum().clamp(min=1)),
        rejected=1 - float(effect.keep.double().mean()),
        zeroed=float(zeroed.double().mean()),
        nats=float(nats.abs().mean()),
        kl_nats=float(kl_nats.mean()),
        images=len(images.unique()),
        clipped_interval=share_interval(clip.beyond, used, images, confidence),
        rejected_interval=share_interval(~effect.keep, every, images, confidence),
        zeroed_interval=share_interval(zeroed, every, images, confidence),
        nats_interval=mean_interval(nats.abs(), images, confidence),
    )


@dataclass(frozen=True)
class _Measured:
    """What the images say, and the clip and rejection bands that ``auto`` makes of this very gap."""

    rescored: RescoredSteps
    confidence: float
    steps: tuple[StepGap, ...]
    overall: StepGap
    clip_widths: Float[Tensor, "n W"] | None
    rejection_bounds: Float[Tensor, " n"] | None


def _measure_until_settled(run: ProbedRun, rescored: RescoredSteps, most: int) -> _Measured:
    """What the images say at the look at which they say enough, or are ``most``."""
    first = rescored.images
    for count, confidence in looks(first, most):
        while rescored.images < count:
            missing = min(first, count - rescored.images)
            rescored = rescored.followed_by(sample_and_rescore(run, missing, rescored.images).rescored)
        measured = _measure(run.mode, rescored, confidence)
        judged = judge_all(run.mode, measured.overall, rescored.dimensions)
        if count == most or decisive(list(judged.values())).verdict != NOT_SHOWN_SAFE:
            return measured
    raise AssertionError("the last look is at the most images")


def _measure(mode: ModeInForce, rescored: RescoredSteps, confidence: float) -> _Measured:
    gap = rescored.gap
    # Bands of a checkpoint hold staleness and the gaps of other engines, so calibrated ones are made anew.
    clip_bands = ClipBands.configured(mode.diffusion_loss)
    rejection_bands = RejectionBands.configured(mode.rollout_correction)
    for bands in filter(None, (clip_bands, rejection_bands)):
        bands.observe(rescored.timesteps, gap)
    widths = None if clip_bands is None else clip_bands.widths(rescored.timesteps)
    bounds = None if rejection_bands is None else rejection_bands.bounds(rescored.timesteps)
    effect = _correction_effect(mode, gap, bounds)
    own_widths = None if widths is None else widths.double()
    clip = clipping(mode, gap, rescored.kl / rescored.dimensions, rescored.stds, own_widths)

    def part(chosen: Bool[Tensor, "n W"], timestep: float | None) -> StepGap:
        return step_gap(
            gap[chosen],
            rescored.nats[chosen],
            rescored.kl[chosen],
            effect.part(chosen),
            clip.part(chosen),
            timestep,
            rescored.image_numbers[chosen],
            confidence,
        )

    timesteps = sorted(set(rescored.timesteps.flatten().tolist()), reverse=True)
    steps = tuple(part(rescored.timesteps == timestep, timestep) for timestep in timesteps)
    overall = part(torch.ones_like(gap, dtype=torch.bool), None)
    return _Measured(rescored, confidence, steps, overall, widths, bounds)


def _correction_effect(
    mode: ModeInForce, gap: Float[Tensor, "n W"], bounds: Float[Tensor, " n"] | None
) -> CorrectionEffect:
    """What the configured correction makes of the engine's draws."""
    correction = mode.rollout_correction
    weights, mask, _ = compute_rollout_correction(gap, torch.zeros_like(gap), config=correction, rs_bounds=bounds)
    acts = weights is not None and correction.weights_act
    return CorrectionEffect(mask, weights == 0 if acts else torch.zeros_like(mask))


def _update(run: ProbedRun, first: ProbeBatch, measured: _Measured) -> None:
    """One optimizer step on the first images with made-up advantages, for its time."""
    batch = first.trajectories
    signs = torch.ones(len(batch))
    signs[::2] = -1
    batch["advantages"] = signs
    batch["old_log_probs"] = batch["rollout_log_probs"]
    batch["old_transition_means"] = batch["rollout_means"]
    batch["rollout_is_weights"] = torch.ones_like(batch["rollout_log_probs"])
    batch["rollout_keep"] = torch.ones_like(batch["rollout_log_probs"], dtype=torch.bool)
    if measured.clip_widths is not None:
        batch["clip_widths"] = measured.clip_widths[: len(batch)]
    if measured.rejection_bounds is not None:
        batch["rollout_rs_bounds"] = measured.rejection_bounds[: len(batch)]
    run.actor.update(batch, first.conditioning, [torch.arange(len(batch))], mode=run.mode)


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
        "latent_dimensions": measured.rescored.dimensions,
        "images": len(measured.rescored.gap),
    }
