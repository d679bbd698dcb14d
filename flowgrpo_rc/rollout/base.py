"""The rollout protocol: what a trainer asks of an engine and what it gets back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int, UInt8
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning


class RolloutError(RuntimeError):
    """An engine could not sample, or sampled something unfit for training."""


@dataclass(frozen=True)
class RolloutRequest:
    """Images to sample: row ``i`` draws ``prompts`` row ``prompt_index[i]`` with its own random stream."""

    conditioning: Conditioning
    """Embeddings of the distinct prompts, guidance and size."""
    prompt_index: Int[Tensor, " B"]
    num_inference_steps: int
    generators: Sequence[torch.Generator]
    """One an image: starting noise first, then one draw per stochastic step."""
    window_starts: Int[Tensor, " B"] | None
    """First stochastic step of each image; ``None`` samples the deterministic ODE and records nothing."""
    window_size: int = 0
    noise_level: float = 0.0
    sde_type: str = "sde"
    record_means: bool = False
    """Also return ``rollout_means``, the mean of each recorded step."""


@dataclass(frozen=True)
class Trajectories:
    """What an engine returns."""

    images: UInt8[Tensor, "B H W 3"]
    batch: TensorDict | None
    """``latents``, ``next_latents``, ``timesteps``, ``sigmas``, ``next_sigmas``, ``rollout_log_probs``,
    ``prompt_index`` and on request ``rollout_means``, all on the host, floats in float32; ``None`` for a deterministic
    request."""
    adapter_version: int
    """The version of the adapter that drew them."""


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine holds a model and an adapter of a known version, and samples with them."""

    adapter_version: int

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample; the order of images is the request's."""
        ...

    def sync(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take over the actor's adapter weights; every tensor must bind."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...
