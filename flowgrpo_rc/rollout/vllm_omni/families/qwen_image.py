"""Qwen-Image and Qwen-Image-Edit in vllm-omni."""

from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit import QwenImageEditPipeline
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit_plus import QwenImageEditPlusPipeline

from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.models.qwen_image import QwenImage
from flowgrpo_rc.models.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout


class VllmQwenImage(QwenImage):
    """Qwen-Image; vllm-omni's transformer also takes the lengths of prompts."""

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        inputs = super()._inputs(dtype, latents, timesteps, cond)
        return {**inputs, "txt_seq_lens": [cond.prompts.embeds.shape[1]] * len(latents)}


class QwenImageRollout(Rollout, QwenImagePipeline):
    """Sampling for ``QwenImagePipeline``."""

    family = VllmQwenImage
    text_encoders = ("Qwen2_5_VLForConditionalGeneration",)


class VllmQwenImageEdit(VllmQwenImage, QwenImageEdit):
    """Qwen-Image-Edit likewise."""


class QwenImageEditRollout(Rollout, QwenImageEditPipeline):
    """Sampling for ``QwenImageEditPipeline``."""

    family = VllmQwenImageEdit
    text_encoders = ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLProcessor")


class VllmQwenImageEditPlus(VllmQwenImage, QwenImageEditPlus):
    """Qwen-Image-Edit-Plus likewise."""


class QwenImageEditPlusRollout(Rollout, QwenImageEditPlusPipeline):
    """Sampling for ``QwenImageEditPlusPipeline``."""

    family = VllmQwenImageEditPlus
    text_encoders = ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLProcessor")
