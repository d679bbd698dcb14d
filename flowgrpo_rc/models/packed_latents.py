"""Base of the families whose latents are packed 2x2 patches of a VAE's feature maps."""

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel


class PackedLatents(DiffusionModel):
    """A family whose latents are ``(tokens, channels)``, one token for each 2x2 patch."""

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
