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


class Descent:
    """Steps of an optimizer down a loss, with a one-cycle learning rate and clipped gradients."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, learning_rate: float, steps: int) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
        self._progress = Progress(name, steps)

    def step(self, loss: Float[Tensor, ""]) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._progress.update(loss.item())


class Average:
    """A moving average of a network's weights, which follows it closely at the beginning."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._network = network
        self._decay = decay
        self._kept = deepcopy(network).requires_grad_(False)
        self._seen = 0

    @torch.no_grad()
    def update(self) -> None:
        self._seen += 1
        decay = min(self._decay, self._seen / (self._seen + 9))
        for kept, new in zip(self._kept.parameters(), self._network.parameters(), strict=True):
            kept.lerp_(new, 1 - decay)

    def put_in(self) -> None:
        """Give the network the average, rounded to float16, and end its training."""
        self._network.load_state_dict(self._kept.state_dict())
        self._network.eval().requires_grad_(False)
        round_to_half(self._network)


def autoencoding_loss(
    decoded: Float[Tensor, "B 3 H W"], images: Float[Tensor, "B 3 H W"], posterior: DiagonalGaussianDistribution
) -> Float[Tensor, ""]:
    """Squared and absolute reconstruction error with a little KL."""
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    return F.mse_loss(decoded, images) + 0.1 * F.l1_loss(decoded, images) + 1e-3 * kl


def on_the_line(
    data: Float[Tensor, " B *L"], generator: torch.Generator
) -> tuple[Float[Tensor, " B *L"], Float[Tensor, " B"], Float[Tensor, " B *L"]]:
    """Rectified flow: points between data and noise, where they lie, and the velocity `noise - data` to predict."""
    noise = torch.randn(data.shape, generator=generator)
    sigma = torch.sigmoid(1.2 * torch.randn(len(data), generator=generator) + 0.2)
    weight = sigma.view(-1, *[1] * (data.dim() - 1))
    return (1 - weight) * data + weight * noise, sigma, noise - data


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
    """Learn to reconstruct the pictures, then put the latents' mean and std into the config."""
    generator = torch.Generator().manual_seed(seed)
    descent = Descent("vae", torch.optim.Adam(vae.parameters(), lr=learning_rate), learning_rate, steps)
    use_2d_convolutions_for_one_frame(vae)
    vae.train()
    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,), generator=generator)]
        posterior = encode(vae, batch)
        noise = torch.randn(posterior.mean.shape, generator=generator)
        latents = posterior.mean + posterior.std * noise
        decoded = vae.decoder(vae.post_quant_conv(latents))[:, :, 0]
        descent.step(autoencoding_loss(decoded, batch, posterior))
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
    """Learn the rectified flow. The averaged weights are kept."""
    generator = torch.Generator().manual_seed(seed)
    side = math.isqrt(tokens.shape[1])
    shapes = [[(1, side, side)]] * batch_size
    descent = Descent("flow", torch.optim.AdamW(transformer.parameters(), lr=learning_rate), learning_rate, steps)
    average = Average(transformer, ema_decay)
    transformer.train()
    for _ in range(steps):
        index = torch.randint(len(tokens), (batch_size,), generator=generator)
        noisy, sigma, target = on_the_line(tokens[index], generator)
        velocity = transformer(
            hidden_states=noisy,
            timestep=sigma,
            encoder_hidden_states=embeddings[labels[index]],
            encoder_hidden_states_mask=None,
            img_shapes=shapes,
            return_dict=False,
        )[0]
        descent.step(F.mse_loss(velocity, target))
        average.update()
    average.put_in()
