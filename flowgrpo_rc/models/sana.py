"""Sana (``SanaPipeline``): arithmetic as in diffusers' pipeline, one step at a time."""

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import SpatialLatents
from flowgrpo_rc.prompt import Prompt, as_prompt, is_negative, texts


class Sana(SpatialLatents):
    """Adapter of ``diffusers.SanaPipeline``. Latents are ``(channels, H / 32, W / 32)``.

    Prompts stand behind the pipeline's instruction to its language model, negative ones alone.
    """

    default_lora_targets = tuple(
        f"{attention}.{layer}" for attention in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )
    longest_prompt = 512
    masks_prompts = True
    instructs_prompts = True
    scheduler_spaces_levels = True
    shifts_latents = False
    text_width = "caption_channels"

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        call = inspect.signature(type(pipe).__call__)
        self._instruction: list[str] = call.parameters["complex_human_instruction"].default

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        rows = []
        # The instruction applies to a whole call, so that consecutive prompts of one kind share one.
        for negative, group in groupby(map(as_prompt, prompts), key=is_negative):
            embeds, masks, _, _ = self.pipe.encode_prompt(
                texts(group),
                do_classifier_free_guidance=False,
                device=self.pipe.text_encoder.device,
                max_sequence_length=max_sequence_length,
                complex_human_instruction=None if negative else self._instruction,
            )
            lengths = masks.sum(1).tolist()
            rows += [EncodedPrompt(row[:length].cpu()) for row, length in zip(embeds, lengths, strict=True)]
        return rows

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """A first token, and the last one of the instruction, are kept with those of the prompt."""
        return [(self.pipe.tokenizer, max_sequence_length - 2)]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        return {
            "hidden_states": latents.to(dtype),
            "timestep": timesteps * self.transformer.config.timestep_scale,
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            "encoder_attention_mask": cond.prompts.mask,
        }
