"""Before training: how far apart are rollout engine and actor, and does bypass mode survive that?

Every step that the configuration trains is sampled by the engine, with the window where training would put it, and
rescored by the actor under the very same weights. In bypass mode the clip is centred at the engine's log-probs, so
whatever of that gap lies outside the band is clipped before anything has been learned; what is left of the batch is
chosen by the engine's error instead of the reward.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.loss.diffusion_loss import clip_band
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout import RolloutError, RolloutRequest
from flowgrpo_rc.rollout.seeds import PROBE, seed_for
from flowgrpo_rc.sde import transition_kl
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.gap import to_nats
from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer

CLIPPED_LIMIT = 0.25
"""Share of samples outside the band before any learning above which bypass mode is called not safe;"""
CLIPPED_MUCH = 0.1
"""and above which it is said to cost."""
BROKEN_GAP = 0.05
"""Mean |log ratio| of one step, in nats per latent dimension, above which the engine computes something else."""
WIDEST_CLIP = 1e-2
"""A recommended band is not wider: beyond it PPO's clip no longer limits the policy's own movement."""


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
    clipped: float
    """Share of the samples that rejection keeps whose ``exp(l)`` lies outside the clip band."""
    rejected: float
    """Share of samples that the configured rejection removes for the gap alone."""
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
    clip_ratio: float | None
    """Three times the gap's 90 % quantile, at least the narrower side of the configured band; None where the objective
    does not clip the ratio that the probe measures. For both sides: ``clip_ratio_low`` and ``_high`` are to be null."""
    rejection_band: str
    """For ``rollout_rs=seq_mean_k1``: holds 99 % of the images for the gap alone, within ``rollout_rs_auto_min`` and
    ``rollout_rs_auto_max``."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Preflight:
    """The whole measurement."""

    setting: dict[str, Any]
    steps: tuple[StepGap, ...]
    overall: StepGap
    advice: Advice
    seconds: dict[str, float]
    """Of the probe's own images: ``rollout``, ``score``, ``update``."""
    saved: float
    """Share of rollout, score and update that bypass mode leaves out, against scoring everything."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def check_preflight(config: FlowGRPOConfig, images: int) -> None:
    """Refuse, before anything is loaded, what cannot be measured.

    Raises:
        ValueError: fewer than 2 images, or a clip that follows the gap (``clip_ratio=auto``).
    """
    if images < 2:
        raise ValueError(f"images: got {images}; give at least 2 a window place")
    if config.actor_rollout_ref.actor.diffusion_loss.clip_ratio == "auto":
        raise ValueError(
            "actor_rollout_ref.actor.diffusion_loss.clip_ratio: got auto, which measures the gap by itself; probe with "
            "a number, e.g. that of auto_clip_min"
        )


def run_preflight(trainer: FlowGRPOTrainer, images: int) -> Preflight:
    """Measures with ``images`` at every place of the SDE window. The trainer is used up: its adapter moves.

    Raises:
        ValueError: see ``check_preflight``.
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    check_preflight(trainer.config, images)
    config, seconds = trainer.config, {}
    batch, conditioning, seconds["rollout"] = _sample(trainer, images)
    actor = trainer.run.actor
    scored, seconds["score"] = _timed(trainer, lambda: actor.rescore(batch, conditioning))
    if not torch.isfinite(scored["log_probs"]).all():
        bad = int((~torch.isfinite(scored["log_probs"])).sum())
        raise RolloutError(
            f"the actor gives {bad} of {scored['log_probs'].numel()} steps that the engine sampled a NaN or infinite "
            "log-prob; check actor_rollout_ref.model.dtype and the model's weights"
        )
    gap = scored["log_probs"].double() - batch["rollout_log_probs"].double()
    dimensions, sde_type = batch["latents"].shape[2:].numel(), config.actor_rollout_ref.rollout.algo.sde_type
    nats = gap * to_nats(scored["transition_stds"], dimensions, sde_type)
    kl = _kl_nats(batch, scored)
    band, keep = clip_band(config.actor_rollout_ref.actor.diffusion_loss), _kept(trainer, batch, gap)
    steps = []
    for timestep in sorted(set(batch["timesteps"].flatten().tolist()), reverse=True):
        here = batch["timesteps"] == timestep
        steps.append(step_gap(gap[here], nats[here], kl[here], keep[here], band, timestep))
    overall = step_gap(gap.flatten(), nats.flatten(), kl.flatten(), keep.flatten(), band, None)
    _, seconds["update"] = _timed(trainer, lambda: _update(trainer, batch, conditioning))
    return Preflight(
        setting=_setting(config, batch),
        steps=tuple(steps),
        overall=overall,
        advice=advise(config, overall, gap, dimensions),
        seconds=seconds,
        saved=seconds["score"] / sum(seconds.values()),
    )


def step_gap(
    gap: Float[Tensor, " n"],
    nats: Float[Tensor, " n"],
    kl_nats: Float[Tensor, " n"],
    keep: Bool[Tensor, " n"],
    band: tuple[float, float],
    timestep: float | None,
) -> StepGap:
    """The statistics of one step's gaps; ``band`` holds the clip's half widths below and above."""
    size, (clip_low, clip_high) = gap.abs(), band
    median, q90, q99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=size.dtype)).tolist()
    ratio = gap.exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return StepGap(
        timestep=timestep,
        count=len(gap),
        mean=float(gap.mean()),
        abs_mean=float(size.mean()),
        abs_median=median,
        abs_q90=q90,
        abs_q99=q99,
        abs_max=float(size.max()),
        clipped=float((outside & keep).sum() / keep.sum().clamp(min=1)),
        rejected=1 - float(keep.double().mean()),
        nats=float(nats.abs().mean()),
        kl_nats=float(kl_nats.mean()),
    )


def advise(config: FlowGRPOConfig, overall: StepGap, gap: Float[Tensor, "B W"], dimensions: int) -> Advice:
    """The verdict on this configuration, with its reasons in words; ``dimensions`` of a latent."""
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    broken = overall.nats / dimensions > BROKEN_GAP
    clips = rc.loss_type == "ppo_clip" and not loss.needs_old_means
    emptied = rc.bypass_mode and clips and overall.clipped > CLIPPED_LIMIT
    much_rejected = overall.rejected > float(rc.guard_rejected_fraction)
    needed = _round_up(3 * overall.abs_q90)
    fits = not broken and (needed <= WIDEST_CLIP or (rc.bypass_mode and not clips))
    mode, narrow = "bypass" if fits else "decoupled", float(min(clip_band(loss)))
    wanted = max(narrow, needed) if mode == "bypass" else narrow
    reasons = [_of_the_clip(config, overall, emptied=emptied)]
    if broken:
        reasons.insert(
            0,
            f"the mean |log ratio| is {overall.nats / dimensions:.2g} per latent dimension: the engine computes "
            "something else than the actor (schedule, guidance, adapter or latents), which no correction repairs",
        )
    if rc.bypass_mode and clips and config.actor_rollout_ref.rollout.adapter_lag:
        reasons.append(
            f"adapter_lag={config.actor_rollout_ref.rollout.adapter_lag} adds the policy's own movement to this gap, "
            "most in the first batches, which cannot be measured before training; clip_ratio=auto follows it, "
            "guard=fallback watches it"
        )
    if overall.rejected:
        knob = "rollout_rs_auto_max" if rc.rollout_rs_threshold == "auto" else "rollout_rs_threshold"
        limit = f" (limit {float(rc.guard_rejected_fraction):.0%}): widen {knob}" if much_rejected else ""
        reasons.append(f"rejection removes {overall.rejected:.0%} of the samples for the gap alone{limit}")
    if emptied and mode == "bypass":
        reasons.append(f"clip_ratio={wanted:g} holds the gap; decoupled mode does without")
    half = float(torch.quantile(gap.mean(1).abs(), 0.99))
    half = min(max(half, float(rc.rollout_rs_auto_min)), float(rc.rollout_rs_auto_max))
    digits = 6 if half >= 1e-4 else 12
    edges = f"{math.exp(-half):.{digits}g}_{math.exp(half):.{digits}g}"
    return Advice(not (broken or emptied or much_rejected), mode, wanted if clips else None, edges, tuple(reasons))


def _of_the_clip(config: FlowGRPOConfig, overall: StepGap, *, emptied: bool) -> str:
    """What the gap does to the configured objective's clip."""
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    if not rc.bypass_mode:
        return "decoupled mode centres the clip on the actor's own log-probs, so the gap is not clipped"
    if rc.loss_type != "ppo_clip":
        return "reinforce does not clip, so the gap cannot empty the band"
    if loss.needs_old_means:
        return (
            f"loss_mode={loss.loss_mode} does not clip the ratio that is measured here, so its share outside the band "
            "says nothing about it; watch actor/pg_clipfrac_inert in the first steps"
        )
    band = _clip_words(*clip_band(loss))
    text = f"{overall.clipped:.0%} of the samples lie outside {band} before anything is learned"
    if emptied:
        return (
            f"bypass mode clips around the engine's log-probs, and {text} (limit {CLIPPED_LIMIT:.0%}); what is left is "
            "chosen by the engine's error"
        )
    costs = overall.clipped > CLIPPED_MUCH
    return f"{text}: runs like that learned, but less than with a wider band" if costs else text


def _clip_words(low: float, high: float) -> str:
    """The band as the configuration writes it."""
    return f"clip_ratio={low:g}" if low == high else f"clip_ratio_low={low:g} and clip_ratio_high={high:g}"


def _round_up(value: float) -> float:
    """To the next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))


def _sample(trainer: FlowGRPOTrainer, images: int) -> tuple[TensorDict, Conditioning, float]:
    """``images`` of the training prompts at every place that the window may take."""
    rollout, run = trainer.config.actor_rollout_ref.rollout, trainer.run
    window = trainer.window
    places = torch.arange(window.first, window.stop - window.size + 1).repeat_interleave(images)
    count = min(images, len(run.train_prompts))
    conditioning = trainer.conditioning(run.train_prompts[:count], rollout.pipeline.true_cfg_scale)
    request = RolloutRequest(
        conditioning=conditioning,
        prompt_index=torch.arange(len(places)) % count,
        num_inference_steps=rollout.pipeline.num_inference_steps,
        seeds=[seed_for(trainer.config.trainer.seed, PROBE, 0, i) for i in range(len(places))],
        window_starts=places,
        window_size=window.size,
        noise_level=rollout.algo.noise_level,
        sde_type=rollout.algo.sde_type,
        record_means=True,
    )
    trajectories, seconds = _timed(trainer, lambda: trainer.generate(request))
    assert trajectories.batch is not None
    return trajectories.batch, conditioning, seconds


def _kept(trainer: FlowGRPOTrainer, batch: TensorDict, gap: Float[Tensor, "B W"]) -> Bool[Tensor, "B W"]:
    """What the configured rejection keeps of the engine's draws; ``auto`` is calibrated on this very gap."""
    bands = trainer.run.rejection_bands
    if bands is not None:
        bands.observe(batch["timesteps"], gap)
        batch["rollout_rs_bounds"] = bands.bounds(batch["timesteps"])
    bounds = batch["rollout_rs_bounds"] if bands is not None else None
    return compute_rollout_correction(
        gap, torch.zeros_like(gap), config=trainer.config.rollout_correction, rs_bounds=bounds
    ).mask


def _kl_nats(batch: TensorDict, scored: dict[str, Tensor]) -> Float[Tensor, "B W"]:
    """KL of each step's Gaussian, from the means that both sides computed."""
    mean, std = scored["transition_means"].double(), scored["transition_stds"].double()
    kl = transition_kl(batch["rollout_means"].double().flatten(0, 1), mean.flatten(0, 1), std.flatten())
    return kl.view(std.shape) * mean.shape[2:].numel()


def _update(trainer: FlowGRPOTrainer, batch: TensorDict, conditioning: Conditioning) -> None:
    """One optimizer step on made-up advantages, for its time."""
    signs = torch.ones(len(batch))
    signs[::2] = -1
    batch["advantages"] = signs
    batch["old_log_probs"] = batch["rollout_log_probs"]
    batch["old_transition_means"] = batch["rollout_means"]
    batch["rollout_is_weights"] = torch.ones_like(batch["rollout_log_probs"])
    batch["rollout_keep"] = torch.ones_like(batch["rollout_log_probs"], dtype=torch.bool)
    trainer.run.actor.update(batch, conditioning, [torch.arange(len(batch))])


def _timed(trainer: FlowGRPOTrainer, call: Callable[[], Any]) -> tuple[Any, float]:
    start = _now(trainer)
    result = call()
    return result, _now(trainer) - start


def _now(trainer: FlowGRPOTrainer) -> float:
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _setting(config: FlowGRPOConfig, batch: TensorDict) -> dict[str, Any]:
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
        "clip_ratio": loss.clip_ratio,
        "clip_band": list(clip_band(loss)),
        "clip_sides": loss.clip_ratio_low is not None or loss.clip_ratio_high is not None,
        "latent_dimensions": batch["latents"].shape[2:].numel(),
        "images": len(batch),
    }
