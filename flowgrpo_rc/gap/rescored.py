"""Images that the engine samples and the actor rescores under the very same weights: what the probe measures on.

They are drawn in batches, so that the probe can go on until it is sure; every image has noise of its own, and each
batch goes on in the training prompts where the one before it ended.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.gap.units import to_nats
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout import RolloutError, RolloutRequest
from flowgrpo_rc.rollout.seeds import PROBE, seed_for
from flowgrpo_rc.sde import progressive_places, transition_kl
from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer


@dataclass(frozen=True)
class Rescored:
    """``n`` images of ``W`` steps as numbers, float64 on the host."""

    timesteps: Float[Tensor, "n W"]
    """As the scheduler names them, float32."""
    gap: Float[Tensor, "n W"]
    """``l = log pi_actor - log pi_engine``, mean-pooled."""
    nats: Float[Tensor, "n W"]
    """The same of the whole step, in nats."""
    kl: Float[Tensor, "n W"]
    """KL of the step's Gaussian, engine to actor, in nats, from the means that both sides computed."""
    stds: Float[Tensor, "n W"]
    """Standard deviation of the step."""
    dimensions: int
    """Of a latent."""
    images: int
    """At every place of the window; ``n`` is that times the places."""

    @property
    def numbers(self) -> Int[Tensor, "n W"]:
        """Of every step, the number of its image."""
        return torch.arange(len(self.gap))[:, None].expand(self.gap.shape)

    def followed_by(self, more: "Rescored") -> "Rescored":
        """Both together."""
        columns = (
            torch.cat([getattr(self, name), getattr(more, name)]) for name in ("timesteps", "gap", "nats", "kl", "stds")
        )
        return Rescored(*columns, dimensions=self.dimensions, images=self.images + more.images)


@dataclass(frozen=True)
class Batch:
    """A batch of them with what an update needs."""

    trajectories: TensorDict
    conditioning: Conditioning
    rescored: Rescored
    seconds: dict[str, float]
    """``rollout`` and ``score``."""


def sample_and_rescore(trainer: FlowGRPOTrainer, images: int, before: int = 0) -> Batch:
    """``images`` at every place of the window, of those that follow the first ``before``.

    Raises:
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    trajectories, conditioning, rollout = _sample(trainer, images, before)
    scored, score = timed(trainer, lambda: trainer.run.actor.rescore(trajectories, conditioning))
    stds, dimensions = scored["transition_stds"].double(), trajectories["latents"].shape[2:].numel()
    gap = scored["log_probs"].double() - trajectories["rollout_log_probs"].double()
    kl = _kl_nats(trajectories, scored)
    _check_finite(scored["log_probs"], "log-prob")
    _check_finite(gap, "log ratio to the engine's")
    _check_finite(kl, "KL from the engine's transition")
    sde_type = trainer.config.actor_rollout_ref.rollout.algo.sde_type
    nats = gap * to_nats(stds, dimensions, sde_type)
    rescored = Rescored(trajectories["timesteps"], gap, nats, kl, stds, dimensions, images)
    return Batch(trajectories, conditioning, rescored, {"rollout": rollout, "score": score})


def timed(trainer: FlowGRPOTrainer, call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns, and the seconds that it took the device."""
    start = _now(trainer)
    result = call()
    return result, _now(trainer) - start


def _now(trainer: FlowGRPOTrainer) -> float:
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _sample(trainer: FlowGRPOTrainer, images: int, before: int) -> tuple[TensorDict, Conditioning, float]:
    """``images`` of the training prompts at every place that the window may take."""
    rollout, run = trainer.config.actor_rollout_ref.rollout, trainer.run
    window = trainer.window
    slides = rollout.algo.sample_strategy == "progressive"
    taken = progressive_places(window) if slides else list(range(window.first, window.stop - window.size + 1))
    places = torch.tensor(taken).repeat_interleave(images)
    known = len(run.train_prompts)
    count = min(images, known)
    prompts = [run.train_prompts[(before + i) % known] for i in range(count)]
    conditioning = trainer.conditioning(prompts, rollout.pipeline)
    earlier = before * len(taken)
    request = RolloutRequest(
        conditioning=conditioning,
        prompt_index=torch.arange(len(places)) % count,
        num_inference_steps=rollout.pipeline.num_inference_steps,
        seeds=[seed_for(trainer.config.trainer.seed, PROBE, 0, earlier + i) for i in range(len(places))],
        window_starts=places,
        window_size=window.size,
        noise_level=rollout.algo.noise_level,
        sde_type=rollout.algo.sde_type,
        record_means=True,
    )
    trajectories, seconds = timed(trainer, lambda: trainer.generate(request))
    assert trajectories.batch is not None
    return trajectories.batch, conditioning, seconds


def _check_finite(values: Float[Tensor, "n W"], what: str) -> None:
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise RolloutError(
            f"the actor gives {bad} of {values.numel()} steps that the engine sampled a NaN or infinite {what}; "
            "check actor_rollout_ref.model.dtype and the model's weights"
        )


def _kl_nats(batch: TensorDict, scored: dict[str, Tensor]) -> Float[Tensor, "B W"]:
    """KL of each step's Gaussian, from the means that both sides computed."""
    mean, std = scored["transition_means"].double(), scored["transition_stds"].double()
    kl = transition_kl(batch["rollout_means"].double().flatten(0, 1), mean.flatten(0, 1), std.flatten())
    return kl.view(std.shape) * mean.shape[2:].numel()
