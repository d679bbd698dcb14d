"""Wan (``WanPipeline``), whose images are videos of one frame: arithmetic as in diffusers' pipeline, step by step."""

from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, DiffusionModel


class Wan(DiffusionModel):
    """Adapter of ``diffusers.WanPipeline`` with ``num_frames=1``. Latents are ``(channels, 1, rows, columns)``.

    Wan 2.1, and the one of 2.2 with a single transformer, TI2V-5B, which takes the noise level of every token.
    """

    default_lora_targets = tuple(
        f"{attention}.{layer}" for attention in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )
    longest_prompt = 512
    scheduler_spaces_levels = True
    text_width = "text_dim"
    masks_prompts = False  # its prompts are padded to one length with zeros that count

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipe.vae_scale_factor_spatial
        return self._channels, 1, height // factor, width // factor

    @property
    def _multiple(self) -> int:
        return self.pipe.vae_scale_factor_spatial * self.transformer.config.patch_size[1]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        # In videos the first frame may be given, with noise level 0; in an image all tokens have the same.
        if self.pipe.config.expand_timesteps:
            tokens = (cond.height // self._multiple) * (cond.width // self._multiple)
            timesteps = timesteps[:, None].expand(-1, tokens)
        return {
            "hidden_states": latents.to(dtype),
            "timestep": timesteps,
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
        }

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return self._decode_one_frame(latents)

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        return self._encode_one_frame(pixels)
