"""Base of the families whose latents are the unpacked feature maps of an ``AutoencoderKL``."""

from collections.abc import Sequence
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

    def _check_positions(self, height: int, width: int, section: str, most: Sequence[int]) -> None:
        """Raise ``ValueError`` for a size of more rows or columns of tokens than there are positions, ``most`` of
        each."""
        rows, columns = (number * self._multiple for number in most)
        if height > rows or width > columns:
            raise ValueError(
                f"actor_rollout_ref.rollout.{section}.height={height}, width={width}: this model has positions for at "
                f"most {rows}x{columns} pixels"
            )
