"""Training of the two parts that learn: the VAE on pictures, then the transformer on the VAE's latents."""

import math
import time
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowgrpo_rc.models.qwen_image import use_2d_convolutions_for_one_frame

LOG_EVERY = 100


@dataclass(frozen=True)
class Settings:
    """Everything that decides what comes out."""

    seed: int
    threads: int
    images: int
    vae_steps: int
    vae_batch_size: int
    vae_learning_rate: float
    flow_steps: int
    flow_batch_size: int
    flow_learning_rate: float
    flow_ema_decay: float


def round_to_half(module: nn.Module) -> None:
    """Round all weights to what float16 can hold, so that later parts train against the weights that are
    saved."""
    for parameter in module.parameters():
        parameter.data = parameter.data.half().float()


class Progress:
    """Prints a loss averaged over the last `LOG_EVERY` steps."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.losses: list[float] = []
        self.start = time.perf_counter()

    def update(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"{self.name}: the loss is {loss} after {len(self.losses)} steps")
        self.losses.append(loss)
        done = len(self.losses)
        if done % LOG_EVERY == 0 or done == self.steps:
            recent = self.losses[-LOG_EVERY:]
            seconds = time.perf_counter() - self.start
            print(
                f"{self.name} {done}/{self.steps} loss {sum(recent) / len(recent):.4f} {seconds:.0f} s",
                flush=True,
            )


def encode(vae: AutoencoderKLQwenImage, images: Float[Tensor, "N 3 H W"]) -> DiagonalGaussianDistribution:
    """Posterior of single-frame pictures, without the cache that video needs."""
    return DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(images.unsqueeze(2))))


def train_vae(
    vae: AutoencoderKLQwenImage,
    images: Float[Tensor, "N 3 H W"],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Squared and absolute reconstruction error with a little KL, then the latents' mean and std into the
    config."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(vae.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    progress = Progress("vae", steps)
    use_2d_convolutions_for_one_frame(vae)
    vae.train()
    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,), generator=generator)]
        posterior = encode(vae, batch)
        noise = torch.randn(posterior.mean.shape, generator=generator)
        latents = posterior.mean + posterior.std * noise
        decoded = vae.decoder(vae.post_quant_conv(latents))[:, :, 0]
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = F.mse_loss(decoded, batch) + 0.1 * F.l1_loss(decoded, batch) + 1e-3 * kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.update(loss.item())
    vae.eval().requires_grad_(False)
    round_to_half(vae)
    latents = encode_all(vae, images)
    vae.register_to_config(
        latents_mean=latents.mean(dim=(0, 2, 3)).tolist(), latents_std=latents.std(dim=(0, 2, 3)).tolist()
    )


@torch.no_grad()
def encode_all(vae: AutoencoderKLQwenImage, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N C h w"]:
    """The posterior means of all pictures, not normalised."""
    return torch.cat([encode(vae, batch).mode()[:, :, 0] for batch in images.split(256)])


def normalised_tokens(vae: AutoencoderKLQwenImage, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N L D"]:
    """Latents as the transformer sees them: normalised and packed into 2x2 patches."""
    latents = encode_all(vae, images)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)
    return QwenImagePipeline._pack_latents((latents - mean) / std, *latents.shape)


def train_flow(
    transformer: QwenImageTransformer2DModel,
    tokens: Float[Tensor, "N L D"],
    labels: Int[Tensor, " N"],
    embeddings: Float[Tensor, "numbers S E"],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    ema_decay: float,
    seed: int,
) -> None:
    """Rectified flow: predict `noise - data` on the line between them. The averaged weights are kept."""
    generator = torch.Generator().manual_seed(seed)
    side = math.isqrt(tokens.shape[1])
    shapes = [[(1, side, side)]] * batch_size
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    average = deepcopy(transformer).requires_grad_(False)
    progress = Progress("flow", steps)
    transformer.train()
    for step in range(steps):
        index = torch.randint(len(tokens), (batch_size,), generator=generator)
        data = tokens[index]
        noise = torch.randn(data.shape, generator=generator)
        sigma = torch.sigmoid(1.2 * torch.randn(batch_size, generator=generator) + 0.2)
        weight = sigma.view(-1, 1, 1)
        velocity = transformer(
            hidden_states=(1 - weight) * data + weight * noise,
            timestep=sigma,
            encoder_hidden_states=embeddings[labels[index]],
            encoder_hidden_states_mask=None,
            img_shapes=shapes,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - data)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(ema_decay, (step + 1) / (step + 10))
        with torch.no_grad():
            for kept, new in zip(average.parameters(), transformer.parameters(), strict=True):
                kept.lerp_(new, 1 - decay)
        progress.update(loss.item())
    transformer.load_state_dict(average.state_dict())
    transformer.eval().requires_grad_(False)
    round_to_half(transformer)
