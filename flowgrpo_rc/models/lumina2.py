"""Lumina-Image 2.0 (``Lumina2Pipeline``): arithmetic as in diffusers' pipeline, step by step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import SpatialLatents
from flowgrpo_rc.prompt import Prompt, as_prompt, is_negative
from flowgrpo_rc.transfers import onto

BEFORE_PROMPT = " <Prompt Start> "
"""Text of the pipeline between its system prompt and a prompt."""


class Lumina2(SpatialLatents):
    """Adapter of ``diffusers.Lumina2Pipeline``. Latents are ``(channels, H / 8, W / 8)``.

    The pipeline's ``cfg_normalization`` and ``cfg_trunc_ratio`` are as by default: on, and at the end of the schedule.
    Its system prompt stands before prompts, and not before negative ones.
    """

    default_lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    masks_prompts = True
    keeps_conditional_norm = True
    instructs_prompts = True
    text_width = "cap_feat_dim"

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        # The image has the position behind its caption.
        self.longest_prompt = int(pipe.transformer.config.axes_lens[0]) - 1

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        before = self.pipe.system_prompt + BEFORE_PROMPT
        # The pipeline adds its system prompt to positive prompts only.
        said = [prompt.text if is_negative(prompt) else before + prompt.text for prompt in map(as_prompt, prompts)]
        embeds, mask = self.pipe._get_gemma_prompt_embeds(said, self.pipe.text_encoder.device, max_sequence_length)
        lengths = mask.sum(1).tolist()
        return [EncodedPrompt(row[:length].cpu()) for row, length in zip(embeds, lengths, strict=True)]

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The system prompt's tokens count."""
        tokenizer = self.pipe.tokenizer
        before = len(tokenizer(self.pipe.system_prompt + BEFORE_PROMPT).input_ids)
        return [(tokenizer, max_sequence_length - before)]

    def _most_tokens(self) -> Sequence[int]:
        return self.transformer.config.axes_lens[1:]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        return {
            "hidden_states": latents.to(dtype),
            "timestep": 1 - timesteps / 1000,
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            "encoder_attention_mask": cond.prompts._real(),
        }

    def _forward(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, cond: Conditioning, half: str = "positive"
    ) -> Tensor:
        """Without a host sync. In every forward the embedder of positions reads the lengths of captions from its mask,
        which is therefore on the host here, and copies its tables to the device, where they are put once."""
        embedder = transformer.rope_embedder
        embedder.freqs_cis = [onto(table, latents.device) for table in embedder.freqs_cis]
        count, longest = cond.prompts.embeds.shape[:2]
        lengths = torch.tensor(cond.prompts.lengths or [longest] * count)
        real = torch.arange(longest) < lengths[:, None]
        hook = embedder.register_forward_pre_hook(lambda _, given: (given[0], real))
        try:
            return super()._forward(transformer, latents, timesteps, cond, half)
        finally:
            hook.remove()

    def _velocity_of(self, output: Tensor, latents: Tensor) -> Tensor:
        """The transformer's time runs from noise to image, and so does what it answers."""
        return -output

    def _shift(self, config: Any, num_inference_steps: int, tokens: int) -> float:
        """The pipeline computes the shift from the number of channels where others take that of tokens."""
        return self._dynamic_shift(config, self._channels, 1.15)
