"""Base of the families whose latents are the unpacked feature maps of an ``AutoencoderKL``."""

from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel


class SpatialLatents(DiffusionModel):
    """A family whose latents are ``(channels, H / 8, W / 8)``, and whose transformer cuts them into patches itself."""

    shifts_latents = True
    """The pipeline adds the VAE's ``shift_factor`` before it decodes."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        # Compiling one block and reusing it takes seconds; a whole transformer takes minutes.
        if not pipe.transformer._repeated_blocks:  # diffusers compiles what is named here
            kinds = pipe.transformer._no_split_modules
            pipe.transformer._repeated_blocks = [kind for kind in kinds if kind.endswith("Block")]

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipe.vae_scale_factor
        return self._channels, height // factor, width // factor

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Tensor:
        return torch.randn(self.latent_shape(height, width), generator=generator)

    @property
    def _multiple(self) -> int:
        return self.pipe.vae_scale_factor * self.transformer.config.get("patch_size", 2)

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        if self.shifts_latents:
            return self._decode_scaled_and_shifted(latents)
        vae = self.pipe.vae
        return vae.decode(latents.to(vae.device, vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
