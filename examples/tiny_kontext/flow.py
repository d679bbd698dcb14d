"""Training of the transformer: a rectified flow from noise to a picture, beside the tokens of another picture."""

import math

import torch
import torch.nn.functional as F
from diffusers import FluxKontextPipeline
from edit_images import edit_prompt
from image_vae import normalised_latents
from jaxtyping import Float, Int
from number_images import NUMBERS
from torch import Tensor
from training import Average, Descent, on_the_line

Tokens = Float[Tensor, "2 N L D"]


def pair_tokens(pipeline: FluxKontextPipeline, pairs: Float[Tensor, "2 N 3 H W"]) -> Tokens:
    """Both pictures of each pair as the transformer sees them: normalised latents, packed into 2x2 patches."""
    latents = normalised_latents(pipeline.vae, pairs.flatten(0, 1))
    return pipeline._pack_latents(latents, *latents.shape).unflatten(0, pairs.shape[:2])


def train_flow(
    pipeline: FluxKontextPipeline,
    tokens: Tokens,
    labels: Int[Tensor, "2 N"],
    *,
    text_tokens: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    ema_decay: float,
    seed: int,
) -> None:
    """Learn to turn either picture of a pair into the other. The averaged weights are kept."""
    with torch.no_grad():
        prompts = [edit_prompt(number) for number in NUMBERS]
        embeddings, pooled, text_ids = pipeline.encode_prompt(prompts, None, max_sequence_length=text_tokens)
    side = math.isqrt(tokens.shape[2])
    own_ids = pipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    reference_ids = own_ids.clone()
    reference_ids[:, 0] = 1
    transformer = pipeline.transformer
    generator = torch.Generator().manual_seed(seed)
    descent = Descent("flow", torch.optim.AdamW(transformer.parameters(), lr=learning_rate), learning_rate, steps)
    average = Average(transformer, ema_decay)
    transformer.train()
    for _ in range(steps):
        pair = torch.randint(tokens.shape[1], (batch_size,), generator=generator)
        drawn = torch.randint(2, (batch_size,), generator=generator)
        noisy, sigma, target = on_the_line(tokens[drawn, pair], generator)
        number = labels[drawn, pair]
        velocity = transformer(
            hidden_states=torch.cat([noisy, tokens[1 - drawn, pair]], dim=1),
            timestep=sigma,
            guidance=None,
            pooled_projections=pooled[number],
            encoder_hidden_states=embeddings[number],
            txt_ids=text_ids,
            img_ids=torch.cat([own_ids, reference_ids]),
            return_dict=False,
        )[0]
        descent.step(F.mse_loss(velocity[:, : noisy.shape[1]], target))
        average.update()
    average.put_in()
