"""What families have in common whose latents are the feature maps of an ``AutoencoderKL``, unpacked."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel, EncodedPrompt


class SpatialLatents(DiffusionModel):
    """A family whose latents are ``(channels, H / 8, W / 8)``, with one text encoder.

    A family, which is a subclass, names the width of its prompts and calls its transformer.
    """

    shifts_latents = True
    """Whether the pipeline adds the VAE's ``shift_factor`` before it decodes."""
    text_width: str
    """The entry of the transformer's configuration that is the width of a prompt's embeddings."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipe.vae_scale_factor
        return self._channels, height // factor, width // factor

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Tensor:
        return torch.randn(self.latent_shape(height, width), generator=generator)

    def blank_prompt(self) -> EncodedPrompt:
        return EncodedPrompt(torch.zeros(1, self.transformer.config[self.text_width]))

    def _sizes(self) -> list[tuple[str, int, int]]:
        parts = self.pipe
        latents = parts.vae.config.latent_channels
        sizes = [("the transformer's in_channels and the vae's latent_channels", self._channels, latents)]
        if parts.text_encoder is not None:
            width = parts.text_encoder.get_input_embeddings().weight.shape[1]
            name = f"the transformer's {self.text_width} and the text_encoder's width"
            sizes.append((name, self.transformer.config[self.text_width], width))
        return sizes

    def _factors(self) -> dict[str, list[Any]]:
        scale = self.pipe.vae.config.scaling_factor
        factors: dict[str, list[Any]] = {"1 / the vae's scaling_factor": [1 / scale if scale else None]}
        if self.shifts_latents:
            factors["the vae's shift_factor"] = [self.pipe.vae.config.shift_factor]
        return factors

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        vae = self.pipe.vae
        latents = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor
        if self.shifts_latents:
            latents = latents + vae.config.shift_factor
        return vae.decode(latents, return_dict=False)[0]

    def _check_positions(self, height: int, width: int, section: str, most: Sequence[int]) -> None:
        """Refuse a size of more rows or columns of tokens than there are positions: ``most`` of each."""
        rows, columns = (number * self._multiple for number in most)
        if height > rows or width > columns:
            raise ValueError(
                f"actor_rollout_ref.rollout.{section}.height={height}, width={width}: this model has positions for at "
                f"most {rows}x{columns} pixels"
            )
