"""The verdict of the probe before training: is this configuration safe, and what would be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.trainer.clipping import limit_words
from flowgrpo_rc.trainer.config import FlowGRPOConfig

CLIPPED_LIMIT = 0.25
"""Share of samples outside the band before any learning above which bypass mode is called not safe;"""
CLIPPED_MUCH = 0.1
"""and above which it is said to cost."""
BROKEN_GAP = 0.05
"""Mean |log ratio| of one step, in nats per latent dimension, above which the engine computes something else."""
WIDEST = 1e-2
"""A recommended limit is not wider: beyond it clipping no longer limits the policy's own movement."""


@dataclass(frozen=True)
class StepGap:
    """The gap ``l = log pi_actor - log pi_engine`` at one timestep, same weights; or over all of them."""

    timestep: float | None
    """None: all steps together."""
    count: int
    mean: float
    abs_mean: float
    abs_median: float
    abs_q90: float
    abs_q99: float
    abs_max: float
    clip_q90: float
    """90 % quantile of what the objective holds against its limit: ``abs_q90``, or with ``grpo_guard`` that of its own
    log ratio, with ``flow_dppo`` of the KL per latent dimension."""
    clipped: float
    """Share of the samples in use that lie beyond the objective's limit."""
    rejected: float
    """Share of samples that the configured rejection removes for the gap alone;"""
    zeroed: float
    """and that it keeps, with an importance weight of 0 in the loss."""
    nats: float
    """Mean ``|l|`` of the whole step, in nats."""
    kl_nats: float
    """Closed-form KL of the step's Gaussian, engine to actor, in nats."""


@dataclass(frozen=True)
class Advice:
    """What the gap means for this configuration."""

    safe: bool
    mode: str
    """``bypass`` or ``decoupled``."""
    clip_ratio: float | str | None
    """Three times the 90 % quantile of what is clipped, at least the narrower side of the configured band; ``auto``
    where that is configured; None where the objective has no such band. For both sides: ``clip_ratio_low`` and
    ``_high`` are to be null."""
    kl_mask_threshold: float | None
    """The same of ``flow_dppo``."""
    rejection_band: str
    """For ``rollout_rs=seq_mean_k1``: holds 99 % of the images for the gap alone, within ``rollout_rs_auto_min`` and
    ``rollout_rs_auto_max``."""
    reasons: tuple[str, ...]


def advise(
    config: FlowGRPOConfig,
    overall: StepGap,
    gap: Float[Tensor, "B W"],
    dimensions: int,
    steps: Sequence[StepGap] = (),
    failure: str = "",
) -> Advice:
    """The verdict on this configuration, with its reasons in words.

    Args:
        config: what is judged.
        overall, steps: the gap over all timesteps, and at each.
        gap: ``l`` of every step.
        dimensions: of a latent.
        failure: why the actor could not take an optimizer step; that is never safe.
    """
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    broken = overall.nats / dimensions > BROKEN_GAP
    clips, dppo = rc.loss_type == "ppo_clip", loss.loss_mode == "flow_dppo"
    emptied = rc.bypass_mode and clips and overall.clipped > CLIPPED_LIMIT
    much_removed = max(overall.rejected, overall.zeroed) > float(rc.guard_rejected_fraction)
    needed, narrow = _round_up(3 * overall.clip_q90), _narrowest(config)
    fits = not broken and (needed <= WIDEST or (rc.bypass_mode and not clips))
    mode = "bypass" if fits else "decoupled"
    wanted = max(narrow, needed) if fits else narrow
    auto = loss.clip_ratio == "auto" and fits and not emptied
    reasons = [failure] if failure else []
    if broken:
        reasons.append(
            f"the mean |log ratio| is {overall.nats / dimensions:.2g} per latent dimension: the engine computes "
            "something else than the actor (schedule, guidance, adapter or latents), which no correction repairs"
        )
    reasons.append(_of_the_clip(config, overall, emptied=emptied))
    if rc.bypass_mode and clips and not emptied:
        reasons += [_of_a_timestep(config, step) for step in steps if step.clipped > CLIPPED_LIMIT]
    reasons += _of_the_lag(config, mode) + _of_what_is_removed(config, overall)
    if emptied and fits:
        knob = "kl_mask_threshold" if dppo else "clip_ratio"
        reasons.append(f"{knob}={wanted:g} holds the gap; decoupled mode does without")
    return Advice(
        safe=not (failure or broken or emptied or much_removed),
        mode=mode,
        clip_ratio=None if not clips or dppo else ("auto" if auto else wanted),
        kl_mask_threshold=wanted if clips and dppo else None,
        rejection_band=_rejection_band(config, gap),
        reasons=tuple(reasons),
    )


def _narrowest(config: FlowGRPOConfig) -> float:
    """The narrower side of the objective's configured limit."""
    loss = config.actor_rollout_ref.actor.diffusion_loss
    if loss.loss_mode == "flow_dppo":
        return float(loss.kl_mask_threshold)
    width = float(loss.auto_clip_min if loss.clip_ratio == "auto" else loss.clip_ratio)
    return min(width if side is None else float(side) for side in (loss.clip_ratio_low, loss.clip_ratio_high))


def _of_the_clip(config: FlowGRPOConfig, overall: StepGap, *, emptied: bool) -> str:
    """What the gap does to the configured objective's clip."""
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    if not rc.bypass_mode:
        return "decoupled mode centres the clip on the actor's own log-probs, so the gap is not clipped"
    if rc.loss_type != "ppo_clip":
        return "reinforce does not clip, so the gap cannot empty the band"
    where = "beyond" if loss.loss_mode == "flow_dppo" else "outside"
    text = f"{overall.clipped:.0%} of the samples lie {where} {limit_words(loss)} before anything is learned"
    if emptied:
        return (
            f"bypass mode clips around the engine's policy, and {text} (limit {CLIPPED_LIMIT:.0%}); what is left is "
            "chosen by the engine's error"
        )
    costs = overall.clipped > CLIPPED_MUCH
    return f"{text}: runs like that learned, but less than with a wider band" if costs else text


def _of_a_timestep(config: FlowGRPOConfig, step: StepGap) -> str:
    loss = config.actor_rollout_ref.actor.diffusion_loss
    own = ""
    if loss.clip_ratio == "auto":
        own = ", a higher auto_clip_max hold it"
    elif loss.takes_auto:
        own = ", clip_ratio=auto give every timestep a band of its own"
    says = f"at timestep {step.timestep:g} it is {step.clipped:.0%}, and what is learned there chosen by that error"
    return f"{says}; rollout.algo.sde_window_range can leave it out{own}"


def _of_the_lag(config: FlowGRPOConfig, mode: str) -> list[str]:
    """Where the run clips around the engine, or is told to."""
    rc, lag = config.rollout_correction, config.actor_rollout_ref.rollout.adapter_lag
    loss = config.actor_rollout_ref.actor.diffusion_loss
    if not lag or rc.loss_type != "ppo_clip" or not (rc.bypass_mode or mode == "bypass"):
        return []
    follows = "clip_ratio=auto follows it, " if loss.takes_auto else ""
    return [
        f"adapter_lag={lag} adds the policy's own movement to this gap wherever the clip is centred at the engine, "
        f"most in the first batches, which cannot be measured before training; {follows}guard=fallback watches it, "
        "decoupled mode does without"
    ]


def _of_what_is_removed(config: FlowGRPOConfig, overall: StepGap) -> list[str]:
    rc, found = config.rollout_correction, []
    for share, what, knob in (
        (overall.rejected, "rejection removes", rc.rejection_knob),
        (overall.zeroed, "importance weights are 0 for", "rollout_is_threshold"),
    ):
        if share:
            much = share > float(rc.guard_rejected_fraction)
            limit = f" (limit {float(rc.guard_rejected_fraction):.0%}): widen {knob}" if much else ""
            found.append(f"{what} {share:.0%} of the samples for the gap alone{limit}")
    return found


def _rejection_band(config: FlowGRPOConfig, gap: Float[Tensor, "B W"]) -> str:
    rc = config.rollout_correction
    half = float(torch.quantile(gap.mean(1).abs(), 0.99))
    half = min(max(half, float(rc.rollout_rs_auto_min)), float(rc.rollout_rs_auto_max))
    digits = 6 if half >= 1e-4 else 12
    return f"{math.exp(-half):.{digits}g}_{math.exp(half):.{digits}g}"


def _round_up(value: float) -> float:
    """To the next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))
