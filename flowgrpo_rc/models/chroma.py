"""Chroma (``ChromaPipeline``): arithmetic as in diffusers' pipeline, one step at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.base import Conditioning, DiffusionModel, EncodedPrompt
from flowgrpo_rc.models.flux import Flux
from flowgrpo_rc.prompt import Prompt, texts


class Chroma(Flux):
    """Adapter of ``diffusers.ChromaPipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``.

    Prompts are padded to ``max_sequence_length``. The pipeline's mask is 1 for a prompt's tokens and one of padding,
    and 0 for the rest; ``pooled`` holds the number of ones. The pipeline adds its mask to the scores of the attention,
    so that masked embeddings count less, but do count. ``true_cfg_scale`` is what it calls ``guidance_scale``.
    """

    masks_attention = True
    solver_spaces_levels = False

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        if hasattr(pipe.transformer, "time_text_embed"):  # Bria's has none
            embedding = pipe.transformer.time_text_embed
            embedding.guidance_proj = _NoGuidance(embedding.guidance_proj, embedding.mod_proj.device)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        embeds, masks = self.pipe._get_t5_prompt_embeds(
            texts(prompts), max_sequence_length=max_sequence_length, device=self.pipe.text_encoder.device
        )
        # In float32, whatever the encoder computes in: bfloat16 has no whole numbers of three digits.
        ones = masks.float().sum(1, keepdim=True).cpu()
        return [EncodedPrompt(row.cpu(), number) for row, number in zip(embeds, ones, strict=True)]

    def blank_prompt(self) -> EncodedPrompt:
        return EncodedPrompt(torch.zeros(1, self.transformer.config.joint_attention_dim), torch.ones(1))

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        return DiffusionModel.tokenizers(self, max_sequence_length)

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        assert cond.prompts.pooled is not None
        # Built on the device from the number of ones: a host mask would be copied in every forward.
        mask = torch.arange(cond.prompts.embeds.shape[1], device=latents.device) < cond.prompts.pooled
        mask = torch.cat([mask, mask.new_ones(latents.shape[:2])], 1)
        inputs = self._tokens_and_places(dtype, latents, cond)
        return inputs | {"timestep": timesteps.to(dtype) / 1000, "attention_mask": mask.to(dtype)}

    def _call(self, transformer: Any, inputs: dict[str, Any]) -> Any:
        """Blocks of one stream that are recomputed in the backward pass get the mask too: diffusers leaves it out
        there, so that the actor's velocity would not be the one that the engine sampled with."""
        mask = inputs.get("attention_mask")
        if mask is None or not transformer.gradient_checkpointing:
            return super()._call(transformer, inputs)
        of_one_stream = set(transformer.single_transformer_blocks)
        recompute = transformer._gradient_checkpointing_func

        def with_mask(block: Any, *arguments: Any) -> Any:
            return recompute(block, *arguments[:3], mask) if block in of_one_stream else recompute(block, *arguments)

        transformer._gradient_checkpointing_func = with_mask
        try:
            return super()._call(transformer, inputs)
        finally:
            transformer._gradient_checkpointing_func = recompute


class _NoGuidance(nn.Module):
    """Embedding of guidance 0 for every row. diffusers makes it on the host, and would copy it in every forward."""

    row: Tensor

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("row", embedding(torch.zeros(1, device=device)), persistent=False)

    def forward(self, guidance: Tensor) -> Tensor:
        return self.row.expand(len(guidance), -1)
