"""A small `AutoencoderKL`, and its training."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from jaxtyping import Float
from torch import Tensor
from training import Descent, autoencoding_loss, round_to_half


def make_vae(latent_channels: int, widths: tuple[int, int, int], groups: int) -> AutoencoderKL:
    """Untrained: 32x32 pixels to 8x8 latents. Few groups of channels that are normalised together leave it the colour
    of an even ground, which normalisation takes from a channel that is a group of its own."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=groups,
        latent_channels=latent_channels,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def train_vae(
    vae: AutoencoderKL,
    images: Float[Tensor, "N 3 H W"],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    ground_weight: float = 0.0,
) -> None:
    """Learn to reconstruct the pictures, then put the latents' mean and deviation into the configuration.

    With `ground_weight` the mean colours of squares of 8 pixels count besides, which are else learned last.
    """
    generator = torch.Generator().manual_seed(seed)
    descent = Descent("vae", torch.optim.Adam(vae.parameters(), lr=learning_rate), learning_rate, steps)
    vae.train()
    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,), generator=generator)]
        posterior = vae.encode(batch).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=generator)
        decoded = vae.decode(latents).sample
        loss = autoencoding_loss(decoded, batch, posterior)
        if ground_weight:
            loss = loss + ground_weight * F.mse_loss(F.avg_pool2d(decoded, 8), F.avg_pool2d(batch, 8))
        descent.step(loss)
    vae.eval().requires_grad_(False)
    round_to_half(vae)
    latents = _encoded(vae, images)
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))


def normalised_latents(vae: AutoencoderKL, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N C h w"]:
    """The posterior means of all pictures, as a transformer sees them."""
    return (_encoded(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor


@torch.no_grad()
def _encoded(vae: AutoencoderKL, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N C h w"]:
    return torch.cat([vae.encode(batch).latent_dist.mean for batch in images.split(256)])
