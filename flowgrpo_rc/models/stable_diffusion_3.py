"""Stable Diffusion 3 and 3.5 (``StableDiffusion3Pipeline``): arithmetic as in diffusers' pipeline, step by step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import SpatialLatents
from flowgrpo_rc.prompt import Prompt, texts


class StableDiffusion3(SpatialLatents):
    """Adapter of ``diffusers.StableDiffusion3Pipeline``. Latents are ``(channels, H / 8, W / 8)``."""

    default_lora_targets = tuple(f"attn.{layer}" for layer in JOINT_ATTENTION)
    """The joint attention, as Flow-GRPO trains it; ``attn2``, the second attention of 3.5-medium, is left alone."""
    longest_prompt = 512
    masks_prompts = False  # its prompts are padded to one length with embeddings that count

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        # Negative prompts are encoded like any other, so that guidance is left to ``velocity``.
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            texts(prompts),
            None,
            None,
            device=self.pipe.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return [EncodedPrompt(row.cpu(), vector.cpu()) for row, vector in zip(embeds, pooled, strict=True)]

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """Each CLIP adds a token before the prompt and one after it, the T5 one after it."""
        pipe = self.pipe
        clip = int(pipe.tokenizer_max_length) - 2
        found = [(pipe.tokenizer, clip), (pipe.tokenizer_2, clip)]
        return found if pipe.tokenizer_3 is None else [*found, (pipe.tokenizer_3, max_sequence_length - 1)]

    def prompt_tokens(self, max_sequence_length: int) -> int:
        """Those of both CLIPs stand side by side, those of the T5 behind them."""
        return int(self.pipe.tokenizer_max_length) + max_sequence_length

    def _most_tokens(self) -> Sequence[int]:
        # The table of positions is a square, from which the middle is cut.
        side = int(self.transformer.config.pos_embed_max_size)
        return side, side

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        assert cond.prompts.pooled is not None
        return {
            "hidden_states": latents.to(dtype),
            "timestep": timesteps,
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            "pooled_projections": cond.prompts.pooled.to(dtype),
        }

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        # The scheduler takes a ``mu`` only with dynamic shifting.
        mu = {"mu": self._dynamic_shift(config, tokens, 1.16)} if config.get("use_dynamic_shifting") else {}
        return {"num_inference_steps": num_inference_steps, **mu}
