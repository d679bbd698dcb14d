"""Bases of the families by the form of their latents: packed 2x2 patches, or unpacked feature maps."""

import math
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.prompt import ReferenceImage


class PackedLatents(DiffusionModel):
    """A family whose latents are ``(tokens, channels)``, one token for each 2x2 patch of a VAE's feature map."""

    noise_takes_image = False
    """The pipeline's ``prepare_latents`` begins with the image to edit."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (height // self._multiple) * (width // self._multiple), self._channels

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Tensor:
        # Editors encode references elsewhere, once per prompt, so that no image is given here.
        image = (None,) if self.noise_takes_image else ()
        # On the CPU whatever the engine runs on, so that a seed gives one image everywhere.
        device = torch.device("cpu")
        prepared = self.pipe.prepare_latents(
            *image, 1, self._channels // 4, height, width, torch.float32, device, generator
        )
        # Most pipelines return the positions too.
        latents = prepared[0] if isinstance(prepared, tuple) else prepared
        return latents[0]

    def _pack(self, latents: Tensor) -> Tensor:
        """Tokens of feature maps ``(B, C, h, w)`` or ``(B, C, 1, h, w)``."""
        return self.pipe._pack_latents(latents, *latents.shape[:2], *latents.shape[-2:])

    def _rounded_timesteps(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """The pipeline divides in its own precision, and the transformer multiplies again."""
        return (timesteps.to(dtype) / 1000 * 1000).float()


class SpatialLatents(DiffusionModel):
    """A family whose latents are ``(channels, H / 8, W / 8)``, and whose transformer cuts them into patches itself."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        # Compiling one block and reusing it takes seconds; a whole transformer takes minutes.
        if not pipe.transformer._repeated_blocks:  # diffusers compiles what is named here
            kinds = pipe.transformer._no_split_modules
            pipe.transformer._repeated_blocks = [kind for kind in kinds if kind.endswith("Block")]

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipe.vae_scale_factor
        return self._channels, height // factor, width // factor

    @property
    def _multiple(self) -> int:
        return self.pipe.vae_scale_factor * self.transformer.config.get("patch_size", 2)

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return self._decode_scaled_and_shifted(latents)

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        return self._encode_scaled_and_shifted(pixels)


def scaled_size(image: ReferenceImage, area: int, multiple: int) -> tuple[int, int]:
    """Width and height of about ``area`` pixels with the image's aspect ratio, in multiples of ``multiple``. Raises
    ``ValueError`` if the image is so narrow that a side would have no pixels left."""
    ratio = image.width / image.height
    width = math.sqrt(area * ratio)
    height = width / ratio
    size = round(width / multiple) * multiple, round(height / multiple) * multiple
    # A side rounded to 0 would fail inside the VAE.
    if not all(size):
        raise ValueError(
            f"{image.source}: a reference image of {image.width} x {image.height} pixels, scaled to {area:,} in "
            f"multiples of {multiple} a side, has no pixels left; crop it, or raise reference_area"
        )
    return size
