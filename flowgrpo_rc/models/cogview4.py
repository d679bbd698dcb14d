"""CogView4 (``CogView4Pipeline``): arithmetic as in diffusers' pipeline, step by step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import SpatialLatents
from flowgrpo_rc.prompt import Prompt, texts
from flowgrpo_rc.quiet import IMPORTS, only_errors
from flowgrpo_rc.transfers import onto


class CogView4(SpatialLatents):
    """Adapter of ``diffusers.CogView4Pipeline``. Latents are ``(channels, H / 8, W / 8)``.

    A prompt is encoded as by a pipeline that is called with it alone: its tokens are padded on the left to a multiple
    of 16, and that padding counts. The padding that a batch of prompts adds does not count.
    """

    default_lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
    longest_prompt = 1024
    masks_prompts = True
    shifts_latents = False
    text_width = "text_embed_dim"

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        # Prompts of several lengths share a batch here, which needs a real mask.
        for block in pipe.transformer.transformer_blocks:
            block.attn1.set_processor(MaskedAttention())

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        device = self.pipe.text_encoder.device
        found: list[EncodedPrompt] = []
        for text in texts(prompts):  # one by one: together they would be padded to the longest
            embeds, _ = self.pipe.encode_prompt(
                [text], do_classifier_free_guidance=False, device=device, max_sequence_length=max_sequence_length
            )
            found.append(EncodedPrompt(embeds[0].cpu()))
        return found

    def prompt_tokens(self, max_sequence_length: int) -> int:
        return -(-max_sequence_length // 16) * 16

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        sides = [latents.new_full((len(latents),), side, dtype=dtype) for side in (cond.height, cond.width)]
        size = torch.stack(sides, 1)
        # diffusers makes this table on the host, and every block would copy it.
        cosines, sines = self.transformer.rope(latents)
        return {
            "hidden_states": latents.to(dtype),
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            "timestep": timesteps,
            "original_size": size,
            "target_size": size,
            "crop_coords": torch.zeros_like(size),
            "attention_mask": cond.prompts.mask,
            "image_rotary_emb": (onto(cosines, latents.device), onto(sines, latents.device)),
        }

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        with only_errors(IMPORTS):
            from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift

        steps = config.num_train_timesteps
        timesteps = np.linspace(steps, 1.0, num_inference_steps).astype(np.int64).astype(np.float32)
        mu = calculate_shift(
            tokens, config.get("base_image_seq_len", 256), config.get("base_shift", 0.25), config.get("max_shift", 0.75)
        )
        return {"timesteps": timesteps, "sigmas": timesteps / steps, "mu": mu}


class MaskedAttention:
    """Attention over a prompt and an image that leaves out the prompt's padding. diffusers' own makes ones and zeros of
    a mask and adds them to the scores, which leaves out nothing."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
        image_rotary_emb: Any,
    ) -> tuple[Tensor, Tensor]:
        """Answers ``(B, tokens, D)`` of the image and the prompt, from ``hidden_states`` ``(B, image tokens, D)`` and
        ``encoder_hidden_states`` ``(B, prompt tokens, D)``. ``attention_mask`` ``(B, prompt tokens)`` is true for real
        embeddings; ``None`` when all are. ``image_rotary_emb`` has cosines and sines of the image's positions."""
        from diffusers.models.embeddings import apply_rotary_emb

        tokens = [encoder_hidden_states.shape[1], hidden_states.shape[1]]
        both = torch.cat([encoder_hidden_states, hidden_states], 1)
        query, key, value = (
            layer(both).unflatten(2, (attn.heads, -1)).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        turned: list[Tensor] = []
        for part, norm in ((query, attn.norm_q), (key, attn.norm_k)):
            prompt, image = norm(part).to(both.dtype).split(tokens, 2)
            rotated: Any = apply_rotary_emb(image, image_rotary_emb, use_real_unbind_dim=-2)
            turned.append(torch.cat([prompt, rotated], 2))
        seen = None
        if attention_mask is not None:
            # As keys alone: a padding token that saw nothing would be NaN.
            seen = F.pad(attention_mask, (0, tokens[1]), value=True)[:, None, None]
        answer = F.scaled_dot_product_attention(turned[0], turned[1], value, attn_mask=seen)
        prompt, image = attn.to_out[0](answer.transpose(1, 2).flatten(2)).split(tokens, 1)
        return image, prompt
