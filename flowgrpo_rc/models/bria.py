"""Bria 3 (``BriaPipeline``): arithmetic as in diffusers' pipeline, one step at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
from flowgrpo_rc.models.chroma import Chroma
from flowgrpo_rc.prompt import Prompt, texts
from flowgrpo_rc.quiet import only_errors


class Bria(Chroma):
    """Adapter of ``diffusers.BriaPipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``.

    Prompts are padded to ``max_sequence_length`` with zeros, which count; the empty prompt is nothing but zeros.
    """

    masks_attention = False

    def __init__(self, pipe: Any) -> None:
        from diffusers import BriaTransformer2DModel

        super().__init__(pipe)
        blocks = ["BriaTransformerBlock", "BriaSingleTransformerBlock"]
        pipe.transformer._repeated_blocks = blocks  # diffusers compiles what is named here
        # The blocks that are divided over processes: of the class, for a transformer is divided as soon as it is read.
        kind: Any = BriaTransformer2DModel
        kind._no_split_modules = blocks
        # A VAE without a shift is not for low precision; the pipeline does this to the one that it is made with.
        if not pipe.vae.config.shift_factor:
            pipe.vae.config.shift_factor = 0
            # It warns of modules to keep in float32, which this one lacks.
            with only_errors("diffusers.models.modeling_utils"):
                pipe.vae.to(torch.float32)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        said = texts(prompts)
        device = self.pipe.text_encoder.device
        embeds = self.pipe._get_t5_prompt_embeds(said, max_sequence_length=max_sequence_length, device=device)
        # The pipeline replaces an empty prompt by zeros instead of encoding it.
        says = torch.tensor([bool(text) for text in said], device=device)
        return [EncodedPrompt(row.cpu()) for row in embeds * says[:, None, None]]

    def blank_prompt(self) -> EncodedPrompt:
        return EncodedPrompt(torch.zeros(1, self.transformer.config.joint_attention_dim))

    @property
    def _multiple(self) -> int:
        """``vae_scale_factor`` counts the packing already."""
        return self.pipe.vae_scale_factor

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        return self._tokens_and_places(dtype, latents, cond) | {"timestep": timesteps}

    def _rounded_timesteps(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """The pipeline passes them in float32, and the transformer rounds them."""
        return timesteps.to(dtype).float()

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        # The pipeline shifts by the image's size with an Euler scheduler alone.
        if config.get("use_dynamic_shifting") and not config.get("use_flow_sigmas"):
            return super()._schedule_arguments(config, num_inference_steps, tokens)
        from diffusers.pipelines.bria.pipeline_bria import get_original_sigmas

        return {"sigmas": get_original_sigmas(config.num_train_timesteps, num_inference_steps)}
