"""Stable Diffusion 3 and 3.5 in vllm-omni."""

from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from flowgrpo_rc.models.stable_diffusion_3 import StableDiffusion3
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout, VllmFamily


class VllmStableDiffusion3(VllmFamily, StableDiffusion3):
    """Stable Diffusion 3 around vllm-omni's pipeline."""


class StableDiffusion3Rollout(Rollout, StableDiffusion3Pipeline):
    """Sampling for ``StableDiffusion3Pipeline``."""

    family = VllmStableDiffusion3
    text_encoders = ("CLIPTextModelWithProjection", "T5EncoderModel")
