"""Images that the engine samples and the actor rescores under the very same weights: what the probe measures on.

They are drawn in batches, so that the probe can go on until it is sure; every image has noise of its own, and each
batch goes on in the training prompts where the one before it ended.
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
from flowgrpo_rc.gap.units import GapSample
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout import RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.seeds import PROBE, seed_for
from flowgrpo_rc.sde import SDEWindow, progressive_places

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ProbedRun:
    """What the probe uses of a run before its first step; resumed, if a checkpoint is probed."""

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
    """Samples, and raises ``RolloutError`` unless the engine did what it was asked for."""
    device: torch.device
    seed: int
    scored_share: float
    """Share of a batch that decoupled mode, as it is configured, gives a scoring pass."""


@dataclass(frozen=True)
class ProbeBatch:
    """A batch of rescored images with what an update needs."""

    trajectories: TensorDict
    scored: dict[str, Tensor]
    """The actor's ``rescore`` of them."""
    conditioning: Conditioning
    sample: GapSample
    seconds: dict[str, float]
    """What ``rollout`` and ``score`` took."""


def sample_and_rescore(run: ProbedRun, images: int, before: int = 0) -> ProbeBatch:
    """``images`` at every place of the window, of those that follow the first ``before``.

    Raises:
        RolloutError: the engine sampled something else than it was asked for, or what the actor cannot score.
    """
    request = _request(run, images, before)
    trajectories, rollout_seconds = timed(run.device, lambda: run.generate(request))
    batch = trajectories.batch
    assert batch is not None
    scored, score_seconds = timed(run.device, lambda: run.actor.rescore(batch, request.conditioning))
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
    """What the call returns, and the seconds that it took the device."""
    start = _time_when_idle(device)
    result = call()
    return result, _time_when_idle(device) - start


def _time_when_idle(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()  # or the time would be that of queueing the work
    return time.perf_counter()


def _request(run: ProbedRun, images: int, before: int) -> RolloutRequest:
    """``images`` of the training prompts at every place that the window may take."""
    rollout = run.rollout
    window = run.window
    slides = rollout.algo.sample_strategy == "progressive"
    taken = progressive_places(window) if slides else list(range(window.first, window.stop - window.size + 1))
    places = torch.tensor(taken).repeat_interleave(images)
    # Where there are fewer prompts than images, prompts come again; every image has noise of its own all the same.
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
