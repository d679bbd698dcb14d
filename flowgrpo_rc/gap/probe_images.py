"""The probe's images: sampled by the engine and rescored by the actor under the same weights.

They come in batches, so that the probe can continue until it is sure. Every image has its own noise, and each batch
continues in the training prompts where the last one ended.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.gap.statistics import GapSample
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout import RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.seeds import PROBE, seed_for
from flowgrpo_rc.sde import SDEWindow, progressive_places

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ProbedRun:
    """The parts of a run that the probe uses, before its first step; resumed, if a checkpoint is probed."""

    model: ModelConfig
    rollout: RolloutConfig
    mode: ModeInForce
    window: SDEWindow
    actor: DiffusionActor
    prompts: Sequence[Any]
    """The training prompts."""
    condition: Callable[[list[Any]], Conditioning]
    """Embeds prompts for the rollout pipeline."""
    generate: Callable[[RolloutRequest], Trajectories]
    """Samples; raises ``RolloutError`` if the engine violates the request."""
    device: torch.device
    seed: int
    scored_share: float
    """Share of a batch that decoupled mode, as configured, scores."""


@dataclass(frozen=True)
class ProbeBatch:
    """A batch of rescored images with the inputs of an update."""

    trajectories: TensorDict
    scored: dict[str, Tensor]
    """The actor's ``rescore`` of them."""
    conditioning: Conditioning
    sample: GapSample
    seconds: dict[str, float]
    """Of ``rollout`` and ``score``."""


def sample_and_rescore(run: ProbedRun, images: int, before: int = 0) -> ProbeBatch:
    """Sample ``images`` at every place of the window, after the first ``before``, and rescore them.

    Raises:
        RolloutError: the engine violated the request, or the actor cannot score its samples.
    """
    request = _request(run, images, before)
    trajectories, rollout_seconds = timed(run.device, lambda: run.generate(request))
    batch = trajectories.batch
    assert batch is not None
    scored, score_seconds = timed(run.device, lambda: run.actor.rescore(batch, request.conditioning))
    # Both rescorings are the same one: before training nothing is stale.
    sample = GapSample.of(batch, scored, scored, run.rollout.algo.sde_type)
    assert sample.kl is not None
    for what, values in (
        ("log-prob", scored["log_probs"]),
        ("log ratio to the engine's", sample.engine),
        ("KL from the engine's transition", sample.kl),
    ):
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise RolloutError(
                f"the actor gives {bad} of {values.numel()} steps that the engine sampled a NaN or infinite {what}; "
                "check actor_rollout_ref.model.dtype and the model's weights"
            )
    return ProbeBatch(batch, scored, request.conditioning, sample, {"rollout": rollout_seconds, "score": score_seconds})


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of the call, and its seconds on the device."""
    start = _time_when_idle(device)
    result = call()
    return result, _time_when_idle(device) - start


def _time_when_idle(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()  # else the time would be that of queueing the work
    return time.perf_counter()


def _request(run: ProbedRun, images: int, before: int) -> RolloutRequest:
    """A request for ``images`` of the training prompts at every place of the window."""
    rollout = run.rollout
    window = run.window
    slides = rollout.algo.sample_strategy == "progressive"
    taken = progressive_places(window) if slides else list(range(window.first, window.stop - window.size + 1))
    # All images of a place together, so that each place has the same prompts.
    places = torch.tensor(taken).repeat_interleave(images)
    # Prompts repeat if there are fewer than images; every image still has its own noise.
    known = len(run.prompts)
    count = min(images, known)
    earlier = before * len(taken)
    return RolloutRequest(
        conditioning=run.condition([run.prompts[(before + i) % known] for i in range(count)]),
        prompt_index=torch.arange(len(places)) % count,
        num_inference_steps=rollout.pipeline.num_inference_steps,
        seeds=[seed_for(run.seed, PROBE, 0, earlier + i) for i in range(len(places))],
        window_starts=places,
        window_size=window.size,
        noise_level=rollout.algo.noise_level,
        sde_type=rollout.algo.sde_type,
        record_means=True,
    )
