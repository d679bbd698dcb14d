"""What a model family must offer to rollout engines and to the actor."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn


class NonFiniteImageError(RuntimeError):
    """A VAE decoded finite latents to pixels that are NaN or infinite; most often its precision is too low."""


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt out of a model family's text encoders, before prompts of several lengths are padded to one."""

    embeds: Float[Tensor, "T D"]
    pooled: Float[Tensor, " E"] | None = None
    """One vector of the whole prompt, for families that take it besides."""


@dataclass(frozen=True)
class Prompts:
    """Embeddings of ``P`` distinct prompts, padded to one length; images refer to rows by index."""

    embeds: Float[Tensor, "P T D"]
    mask: Bool[Tensor, "P T"] | None
    """Which embeddings are real; ``None`` when all are."""
    pooled: Float[Tensor, "P E"] | None = None
    """A vector for each whole prompt; ``None`` where the family takes none."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Prompts":
        """The same prompts with every tensor changed."""
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def rows(self, index: Tensor, device: torch.device) -> "Prompts":
        """The prompts of some images, on ``device``."""
        return self.map(lambda tensor: tensor[index.to(tensor.device)].to(device))


@dataclass(frozen=True)
class Conditioning:
    """Everything besides latents and noise level that a velocity depends on."""

    prompts: Prompts
    negative: Prompts | None
    """Prompts to steer away from; ``None`` without classifier-free guidance."""
    true_cfg_scale: float
    guidance_scale: float | None
    height: int
    width: int

    def rows(self, index: Tensor, device: torch.device) -> "Conditioning":
        """The conditioning of some images, on ``device``."""
        negative = None if self.negative is None else self.negative.rows(index, device)
        return replace(self, prompts=self.prompts.rows(index, device), negative=negative)


@dataclass(frozen=True)
class Schedule:
    """A sampling schedule of ``N`` steps."""

    timesteps: Float[Tensor, " N"]
    """As the scheduler names them (0 to 1000)."""
    sigmas: Float[Tensor, " N+1"]
    """Noise levels, from at most 1 down to 0."""


@runtime_checkable
class DiffusionModel(Protocol):
    """A loaded pipeline of one family. ``transformer`` arguments are any copy of its transformer."""

    pipe: Any
    default_lora_targets: tuple[str, ...]
    longest_prompt: int
    """The largest ``max_sequence_length`` that ``encode`` takes."""

    @property
    def transformer(self) -> nn.Module:
        """The transformer that the pipeline was loaded with."""
        ...

    @property
    def smallest_image(self) -> int:
        """Pixels to a side of a small image that every network of the family takes."""
        ...

    def check_parts(self) -> None:
        """Raise ``ValueError`` when the pipeline's parts were not made for each other."""
        ...

    def check_request(self, height: int, width: int, guidance_scale: float | None) -> None:
        """Raise ``ValueError`` when the model cannot draw this size, or takes no such guidance embedding."""
        ...

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one image's latents, without the batch dimension."""
        ...

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Float[Tensor, "*L"]:
        """One image's starting latents, the same as the diffusers pipeline draws from this generator."""
        ...

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule:
        """The diffusers pipeline's schedule for this many steps and this size."""
        ...

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The tokenizers, each with how many tokens of a prompt it keeps; the special ones are not counted."""
        ...

    def encode(self, prompts: list[str], max_sequence_length: int) -> list[EncodedPrompt]:
        """Unpadded prompt embeddings, one a prompt, on the host."""
        ...

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, " B *L"],
        timesteps: Float[Tensor, " B"],
        conditioning: Conditioning,
    ) -> Float[Tensor, " B *L"]:
        """The flow's velocity with guidance, float32, computed in the transformer's own precision."""
        ...

    def decode(self, latents: Float[Tensor, " B *L"], height: int, width: int) -> UInt8[Tensor, "B H W 3"]:
        """Images of clean latents, on the host.

        Raises:
            NonFiniteImageError: a pixel is NaN or infinite; names the images and the remedy.
        """
        ...
