"""Before training: how far apart are rollout engine and actor, and does bypass mode survive that?

Every step that the configuration trains is sampled by the engine, with the window where training would put it, and
rescored by the actor under the very same weights. In bypass mode the clip is centred at the engine's log-probs, so
whatever of that gap lies outside the band is clipped before anything has been learned; what is left of the batch is
chosen by the engine's error instead of the reward.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.actor.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.config import DiffusionLossConfig
from flowgrpo_rc.batch import MiniBatch, OldPolicy
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.gap.advice import Advice, StepGap, advise, judge_all
from flowgrpo_rc.gap.clipping import Clipping, clipping
from flowgrpo_rc.gap.intervals import CONFIDENCE, MOST_IMAGES, looks, mean_interval, share_interval
from flowgrpo_rc.gap.rescored import Batch, Rescored, sample_and_rescore, timed
from flowgrpo_rc.gap.verdict import NOT_SHOWN_SAFE, decisive
from flowgrpo_rc.loss.diffusion import clip_band
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.setup import clip_bands, rejection_bands
from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer


@dataclass(frozen=True)
class Preflight:
    """The whole measurement."""

    setting: dict[str, Any]
    steps: tuple[StepGap, ...]
    overall: StepGap
    advice: Advice
    images: int
    """Measured at every place of the SDE window."""
    confidence: float
    """Of every interval in ``steps`` and ``overall``: that of the look which ended the measurement, so that all looks
    together have ``intervals.CONFIDENCE``."""
    seconds: dict[str, float]
    """Of the images of the first look: ``rollout``, ``score``, ``update``."""
    saved: float | None
    """Share of rollout, score and update that bypass mode leaves out, against decoupled mode; None where the update
    failed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        values = asdict(self)
        values["advice"]["safe"] = self.advice.safe
        return values


def check_preflight(images: int, max_images: int | None = None) -> None:
    """Refuse, before anything is loaded, what cannot be measured.

    Raises:
        ValueError: fewer than 2 images, more than ``MOST_IMAGES``, or more to start with than to end with.
    """
    if not 2 <= images <= MOST_IMAGES:
        raise ValueError(f"--images: got {images}; give 2 to {MOST_IMAGES} images a window place")
    if max_images is not None and not images <= max_images <= MOST_IMAGES:
        raise ValueError(f"--max-images: got {max_images}; give a number from --images, {images}, to {MOST_IMAGES}")


def run_preflight(trainer: FlowGRPOTrainer, images: int, max_images: int | None = None) -> Preflight:
    """Measures at every place of the SDE window. The trainer is used up: its adapter moves.

    Args:
        trainer: a run before its first step; resumed, if a checkpoint is to be probed.
        images: at every place, to start with.
        max_images: the same to end with. While it is not shown on which side of their limits the shares lie, the
            number of images is doubled, up to this one; None: no more than ``images``.

    Raises:
        ValueError: see ``check_preflight``.
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    check_preflight(images, max_images)
    config = trainer.config
    first = sample_and_rescore(trainer, images)
    rescored, measured, confidence = _until_it_is_settled(trainer, first.rescored, max_images or images)
    seconds, failure = dict(first.seconds), ""
    try:
        _, seconds["update"] = timed(trainer, lambda: _update(trainer, first, measured))
    except NonFiniteUpdateError as error:
        failure = f"an optimizer step on these samples fails: {str(error).partition(';')[0]}"
    advice = advise(
        config,
        measured.overall,
        rescored.gap,
        rescored.dimensions,
        measured.steps,
        failure,
        images=rescored.images,
        confidence=confidence,
    )
    return Preflight(
        setting=_setting(config, rescored, measured.widths),
        steps=measured.steps,
        overall=measured.overall,
        advice=advice,
        images=rescored.images,
        confidence=confidence,
        seconds=seconds,
        saved=None if failure else saved_by_bypass(config, seconds),
    )


def _until_it_is_settled(trainer: FlowGRPOTrainer, first: Rescored, most: int) -> "tuple[Rescored, _Measured, float]":
    """The images, what they say, and the confidence of the look at which they said enough, or were ``most``."""
    config, rescored = trainer.config, first
    for count, confidence in looks(first.images, most):
        while rescored.images < count:
            missing = min(first.images, count - rescored.images)
            rescored = rescored.followed_by(sample_and_rescore(trainer, missing, rescored.images).rescored)
        measured = _measure(config, rescored, confidence)
        judged = judge_all(config, measured.overall, rescored.dimensions)
        if count == most or decisive(list(judged.values())).verdict != NOT_SHOWN_SAFE:
            return rescored, measured, confidence
    raise AssertionError("the last look is at the most images")


def saved_by_bypass(config: FlowGRPOConfig, seconds: Mapping[str, float]) -> float:
    """Share of rollout, score and update that bypass mode leaves out, against decoupled mode as it is configured.

    With ``actor.score=auto`` that mode scores all but the first mini-batch.
    """
    free = config.actor_rollout_ref.actor.ppo_mini_batch_size / config.data.train_batch_size
    score = seconds["score"] * (1 - free if config.first_mini_batch_is_free else 1)
    return score / (seconds["rollout"] + score + seconds["update"])


@dataclass(frozen=True)
class Fate:
    """What the configured correction does to each step, for the gap alone."""

    keep: Bool[Tensor, "..."]
    """Not rejected."""
    zeroed: Bool[Tensor, "..."]
    """With an importance weight of 0 in the loss."""

    def part(self, chosen: Tensor) -> "Fate":
        """The steps where ``chosen`` is true, flat."""
        return Fate(self.keep[chosen], self.zeroed[chosen])


def step_gap(
    gap: Float[Tensor, " n"],
    nats: Float[Tensor, " n"],
    kl_nats: Float[Tensor, " n"],
    fate: Fate,
    clip: Clipping,
    timestep: float | None,
    images: Int[Tensor, " n"] | None = None,
    confidence: float = CONFIDENCE,
) -> StepGap:
    """The statistics of one step's gaps, with what becomes of the samples.

    Args:
        gap, nats, kl_nats, fate, clip: of each sample.
        timestep: of all of them; None for all steps together.
        images: of each sample, the number of its image; None where each has its own.
        confidence: of the intervals.
    """
    size, used = gap.abs(), fate.keep & ~fate.zeroed
    images = torch.arange(len(gap)) if images is None else images
    median, q90, q99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=size.dtype)).tolist()
    every, zeroed = torch.ones_like(used), fate.keep & fate.zeroed
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
        clipped=float((clip.outside & used).sum() / used.sum().clamp(min=1)),
        rejected=1 - float(fate.keep.double().mean()),
        zeroed=float(zeroed.double().mean()),
        nats=float(nats.abs().mean()),
        kl_nats=float(kl_nats.mean()),
        images=len(images.unique()),
        clipped_interval=share_interval(clip.outside, used, images, confidence),
        rejected_interval=share_interval(~fate.keep, every, images, confidence),
        zeroed_interval=share_interval(zeroed, every, images, confidence),
        nats_interval=mean_interval(nats.abs(), images, confidence),
    )


@dataclass(frozen=True)
class _Measured:
    """What the images say, and the bands that ``auto`` makes of them."""

    steps: tuple[StepGap, ...]
    overall: StepGap
    widths: Float[Tensor, "n W"] | None
    bounds: Float[Tensor, " n"] | None


def _measure(config: FlowGRPOConfig, rescored: Rescored, confidence: float) -> _Measured:
    loss, gap = config.actor_rollout_ref.actor.diffusion_loss, rescored.gap
    bounds, widths = _rejection_bounds(config, rescored), _clip_widths(config, rescored)
    fate = _fate(config, gap, bounds)
    clip = clipping(loss, gap, rescored.kl / rescored.dimensions, rescored.stds, _double(widths))

    def part(chosen: Bool[Tensor, "n W"], timestep: float | None) -> StepGap:
        return step_gap(
            gap[chosen],
            rescored.nats[chosen],
            rescored.kl[chosen],
            fate.part(chosen),
            clip.part(chosen),
            timestep,
            rescored.numbers[chosen],
            confidence,
        )

    timesteps = sorted(set(rescored.timesteps.flatten().tolist()), reverse=True)
    steps = tuple(part(rescored.timesteps == timestep, timestep) for timestep in timesteps)
    return _Measured(steps, part(torch.ones_like(gap, dtype=torch.bool), None), widths, bounds)


def _fate(config: FlowGRPOConfig, gap: Float[Tensor, "n W"], bounds: Float[Tensor, " n"] | None) -> Fate:
    """What the configured correction makes of the engine's draws."""
    rc = config.rollout_correction
    weights, mask, _ = compute_rollout_correction(gap, torch.zeros_like(gap), config=rc, rs_bounds=bounds)
    acts = weights is not None and rc.weights_act
    return Fate(mask, weights == 0 if acts else torch.zeros_like(mask))


def _rejection_bounds(config: FlowGRPOConfig, rescored: Rescored) -> Float[Tensor, " n"] | None:
    """Of ``rollout_rs_threshold=auto``, calibrated on this very gap; the update reads them too."""
    bands = rejection_bands(config)
    if bands is None:
        return None
    bands.observe(rescored.timesteps, rescored.gap)
    return bands.bounds(rescored.timesteps)


def _clip_widths(config: FlowGRPOConfig, rescored: Rescored) -> Float[Tensor, "n W"] | None:
    """Of ``clip_ratio=auto``, calibrated on this very gap; the update reads them too."""
    bands = clip_bands(config)
    if bands is None:
        return None
    bands.observe(rescored.timesteps, rescored.gap)
    return bands.widths(rescored.timesteps)


def _double(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.double()


def _update(trainer: FlowGRPOTrainer, first: Batch, measured: _Measured) -> None:
    """One optimizer step on the first images with made-up advantages, for its time."""
    batch = first.trajectories
    signs = torch.ones(len(batch))
    signs[::2] = -1
    batch["advantages"] = signs
    ones = torch.ones_like(batch["rollout_log_probs"])
    old = replace(OldPolicy.of_rollout(batch), weights=ones, keep=ones.bool())
    if measured.widths is not None:
        batch["clip_widths"] = measured.widths[: len(batch)]
    if measured.bounds is not None:
        batch["rollout_rs_bounds"] = measured.bounds[: len(batch)]
    trainer.run.actor.update(batch, first.conditioning, [MiniBatch(torch.arange(len(batch)), old)])


def _setting(config: FlowGRPOConfig, rescored: Rescored, widths: Tensor | None) -> dict[str, Any]:
    rollout, rc = config.actor_rollout_ref.rollout, config.rollout_correction
    loss = config.actor_rollout_ref.actor.diffusion_loss
    return {
        "model": config.actor_rollout_ref.model.path,
        "engine": rollout.name,
        "rollout_dtype": rollout.dtype,
        "quantization": rollout.quantization,
        "actor_dtype": config.actor_rollout_ref.model.dtype,
        "sde_type": rollout.algo.sde_type,
        "bypass_mode": rc.bypass_mode,
        "loss_type": rc.loss_type,
        "loss_mode": loss.loss_mode,
        "clip_ratio": loss.clip_ratio,
        "clip_band": _band(loss, widths),
        "clip_sides": loss.has_sides,
        "latent_dimensions": rescored.dimensions,
        "images": len(rescored.gap),
    }


def _band(loss: DiffusionLossConfig, widths: Tensor | None) -> list[float]:
    """Half widths below and above 1; of ``auto`` the narrowest and the widest; of ``flow_dppo`` its threshold."""
    if loss.loss_mode == "flow_dppo":
        return [loss.kl_mask_threshold]
    return list(clip_band(loss)) if widths is None else [float(widths.min()), float(widths.max())]
