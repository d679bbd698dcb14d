"""Qwen-Image in vllm-omni."""

from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from flowgrpo_rc.models.base import Conditioning, Prompts
from flowgrpo_rc.models.qwen_image import QwenImage
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout, VllmFamily


class VllmQwenImage(VllmFamily, QwenImage):
    """Qwen-Image around vllm-omni's pipeline."""

    def _inputs(
        self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> dict[str, Any]:
        inputs = super()._inputs(dtype, latents, timesteps, prompts, conditioning)
        return {**inputs, "txt_seq_lens": [prompts.embeds.shape[1]] * len(latents)}


class QwenImageRollout(Rollout, QwenImagePipeline):
    """Sampling for ``QwenImagePipeline``."""

    family = VllmQwenImage
    text_encoders = ("Qwen2_5_VLForConditionalGeneration",)
