"""AuraFlow (``AuraFlowPipeline``): arithmetic as in diffusers' pipeline, step by step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, EncodedPrompt, Prompts
from flowgrpo_rc.models.spatial_latents import SpatialLatents
from flowgrpo_rc.prompt import Prompt, texts


class AuraFlow(SpatialLatents):
    """Adapter of ``diffusers.AuraFlowPipeline``. Latents are ``(channels, H / 8, W / 8)``.

    ``true_cfg_scale`` is what the pipeline calls ``guidance_scale``; the transformer embeds no guidance.
    """

    default_lora_targets = tuple(f"attn.{layer}" for layer in JOINT_ATTENTION)
    longest_prompt = 512
    masks_prompts = False  # its prompts are padded to one length with zeros that count
    shifts_latents = False

    def check_request(
        self,
        height: int,
        width: int,
        guidance_scale: float | None,
        true_cfg_scale: float = 1.0,
        section: str = "pipeline",
    ) -> None:
        super().check_request(height, width, guidance_scale, true_cfg_scale, section)
        side = math.isqrt(self.transformer.config.pos_embed_max_size)
        self._check_positions(height, width, section, (side, side))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        embeds, _, _, _ = self.pipe.encode_prompt(
            texts(prompts),
            do_classifier_free_guidance=False,
            device=self.pipe.text_encoder.device,
            max_sequence_length=max_sequence_length,
        )
        return [EncodedPrompt(row.cpu()) for row in embeds]

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        tokenizer = self.pipe.tokenizer
        return [(tokenizer, max_sequence_length - tokenizer.num_special_tokens_to_add())]

    def _inputs(
        self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> dict[str, Any]:
        return {
            "hidden_states": latents.to(dtype),
            "timestep": (timesteps / 1000).to(dtype),
            "encoder_hidden_states": prompts.embeds.to(dtype),
        }

    def _rounded_timesteps(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """The pipeline rounds what it has divided; the transformer multiplies it again in float32."""
        return (timesteps / 1000).to(dtype).float() * 1000

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        return {"num_inference_steps": num_inference_steps}
