"""Before training: how far apart are rollout engine and actor, and does bypass mode survive that?

Every step that the configuration trains is sampled by the engine, with the window where training would put it, and
rescored by the actor under the very same weights. In bypass mode the clip is centred at the engine's log-probs, so
whatever of that gap lies outside the band is clipped before anything has been learned; what is left of the batch is
chosen by the engine's error instead of the reward.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.config import DiffusionLossConfig
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.loss.diffusion_loss import clip_band
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout import RolloutError, RolloutRequest
from flowgrpo_rc.rollout.seeds import PROBE, seed_for
from flowgrpo_rc.sde import progressive_places, transition_kl
from flowgrpo_rc.trainer.advice import Advice, StepGap, advise
from flowgrpo_rc.trainer.clipping import Clipping, clipping
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.gap import to_nats
from flowgrpo_rc.trainer.setup import clip_bands, rejection_bands
from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer


@dataclass(frozen=True)
class Preflight:
    """The whole measurement."""

    setting: dict[str, Any]
    steps: tuple[StepGap, ...]
    overall: StepGap
    advice: Advice
    seconds: dict[str, float]
    """Of the probe's own images: ``rollout``, ``score``, ``update``."""
    saved: float | None
    """Share of rollout, score and update that bypass mode leaves out, against decoupled mode; None where the update
    failed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def check_preflight(images: int) -> None:
    """Refuse, before anything is loaded, what cannot be measured.

    Raises:
        ValueError: fewer than 2 images.
    """
    if images < 2:
        raise ValueError(f"images: got {images}; give at least 2 a window place")


def run_preflight(trainer: FlowGRPOTrainer, images: int) -> Preflight:
    """Measures with ``images`` at every place of the SDE window. The trainer is used up: its adapter moves.

    Raises:
        ValueError: see ``check_preflight``.
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    check_preflight(images)
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
    kl, fate = _kl_nats(batch, scored), _fate(config, batch, gap)
    widths = _clip_widths(config, batch, gap)
    loss = config.actor_rollout_ref.actor.diffusion_loss
    clip = clipping(loss, gap, kl / dimensions, scored["transition_stds"], widths)
    steps = []
    for timestep in sorted(set(batch["timesteps"].flatten().tolist()), reverse=True):
        here = batch["timesteps"] == timestep
        steps.append(step_gap(gap[here], nats[here], kl[here], fate.part(here), clip.part(here), timestep))
    all_of_it = torch.ones_like(gap, dtype=torch.bool)
    overall = step_gap(gap.flatten(), nats.flatten(), kl.flatten(), fate.part(all_of_it), clip.part(all_of_it), None)
    failure = ""
    try:
        _, seconds["update"] = _timed(trainer, lambda: _update(trainer, batch, conditioning))
    except NonFiniteUpdateError as error:
        failure = f"an optimizer step on these samples fails: {str(error).partition(';')[0]}"
    return Preflight(
        setting=_setting(config, batch, widths),
        steps=tuple(steps),
        overall=overall,
        advice=advise(config, overall, gap, dimensions, steps, failure),
        seconds=seconds,
        saved=None if failure else saved_by_bypass(config, seconds),
    )


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
) -> StepGap:
    """The statistics of one step's gaps, with what becomes of the samples."""
    size, used = gap.abs(), fate.keep & ~fate.zeroed
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
        clipped=float((clip.outside & used).sum() / used.sum().clamp(min=1)),
        rejected=1 - float(fate.keep.double().mean()),
        zeroed=float((fate.keep & fate.zeroed).double().mean()),
        nats=float(nats.abs().mean()),
        kl_nats=float(kl_nats.mean()),
    )


def _sample(trainer: FlowGRPOTrainer, images: int) -> tuple[TensorDict, Conditioning, float]:
    """``images`` of the training prompts at every place that the window may take."""
    rollout, run = trainer.config.actor_rollout_ref.rollout, trainer.run
    window = trainer.window
    slides = rollout.algo.sample_strategy == "progressive"
    taken = progressive_places(window) if slides else list(range(window.first, window.stop - window.size + 1))
    places = torch.tensor(taken).repeat_interleave(images)
    count = min(images, len(run.train_prompts))
    conditioning = trainer.conditioning(run.train_prompts[:count], rollout.pipeline)
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


def _fate(config: FlowGRPOConfig, batch: TensorDict, gap: Float[Tensor, "B W"]) -> Fate:
    """What the configured correction makes of the engine's draws; ``auto`` is calibrated on this very gap."""
    rc, bands, bounds = config.rollout_correction, rejection_bands(config), None
    if bands is not None:
        bands.observe(batch["timesteps"], gap)
        bounds = batch["rollout_rs_bounds"] = bands.bounds(batch["timesteps"])
    weights, mask, _ = compute_rollout_correction(gap, torch.zeros_like(gap), config=rc, rs_bounds=bounds)
    acts = weights is not None and rc.weights_act
    return Fate(mask, weights == 0 if acts else torch.zeros_like(mask))


def _clip_widths(config: FlowGRPOConfig, batch: TensorDict, gap: Float[Tensor, "B W"]) -> Tensor | None:
    """Of ``clip_ratio=auto``, calibrated on this very gap; the update reads them too."""
    bands = clip_bands(config)
    if bands is None:
        return None
    bands.observe(batch["timesteps"], gap)
    batch["clip_widths"] = bands.widths(batch["timesteps"])
    return batch["clip_widths"].double()


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


def _setting(config: FlowGRPOConfig, batch: TensorDict, widths: Tensor | None) -> dict[str, Any]:
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
        "latent_dimensions": batch["latents"].shape[2:].numel(),
        "images": len(batch),
    }


def _band(loss: DiffusionLossConfig, widths: Tensor | None) -> list[float]:
    """Half widths below and above 1; of ``auto`` the narrowest and the widest; of ``flow_dppo`` its threshold."""
    if loss.loss_mode == "flow_dppo":
        return [loss.kl_mask_threshold]
    return list(clip_band(loss)) if widths is None else [float(widths.min()), float(widths.max())]
