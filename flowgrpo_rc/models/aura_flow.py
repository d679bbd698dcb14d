"""AuraFlow (``AuraFlowPipeline``): arithmetic as in diffusers' pipeline, step by step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning
from flowgrpo_rc.models.latents import SpatialLatents


class AuraFlow(SpatialLatents):
    """Adapter of ``diffusers.AuraFlowPipeline``. Latents are ``(channels, H / 8, W / 8)``."""

    default_lora_targets = tuple(f"attn.{layer}" for layer in JOINT_ATTENTION)
    longest_prompt = 512
    masks_prompts = False  # its prompts are padded to one length with zeros that count
    shifts_latents = False
    scheduler_spaces_levels = True

    def _most_tokens(self) -> Sequence[int]:
        # The table of positions is a square.
        side = math.isqrt(self.transformer.config.pos_embed_max_size)
        return side, side

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        return {
            "hidden_states": latents.to(dtype),
            "timestep": (timesteps / 1000).to(dtype),
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
        }

    def _rounded_timesteps(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """The pipeline rounds what it has divided; the transformer multiplies it again in float32."""
        return (timesteps / 1000).to(dtype).float() * 1000
