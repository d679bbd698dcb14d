"""FLUX.1, as far as a plan needs it: how diffusers' pipeline calls its transformer and its decoder.

It is no family that trains here (``models.registry.FAMILIES``), so the plan brings this description of its own.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, DiffusionModel, EncodedPrompt, Prompts

PIPELINE = "FluxPipeline"


class Flux(DiffusionModel):
    """``diffusers.FluxPipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``.

    What draws images from prompts raises ``NotImplementedError``.
    """

    default_lora_targets = JOINT_ATTENTION
    longest_prompt = 512
    masks_prompts = False  # its prompts are padded to one length with embeddings that count

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (height // self._multiple) * (width // self._multiple), self._channels

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Tensor:
        _refuse()

    def encode(self, prompts: list[str], max_sequence_length: int) -> list[EncodedPrompt]:
        _refuse()

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        _refuse()

    def _inputs(
        self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> dict[str, Any]:
        assert prompts.pooled is not None
        return {
            "hidden_states": latents.to(dtype),
            "timestep": timesteps.to(dtype) / 1000,
            "guidance": self._embedded_guidance(timesteps, conditioning),
            "pooled_projections": prompts.pooled.to(dtype),
            "encoder_hidden_states": prompts.embeds.to(dtype),
            "txt_ids": torch.zeros(prompts.embeds.shape[1], 3, dtype=dtype),
            "img_ids": torch.zeros(latents.shape[1], 3, dtype=dtype),
        }

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        _refuse()

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        vae = self.pipe.vae
        unpacked = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor).to(vae.dtype)
        return vae.decode(unpacked / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]


def _refuse() -> NoReturn:
    raise NotImplementedError("FLUX.1 can be planned, and not trained")
