"""Stable Diffusion 3 and 3.5 in vllm-omni."""

from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from flowgrpo_rc.models.stable_diffusion_3 import StableDiffusion3
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout


class StableDiffusion3Rollout(Rollout, StableDiffusion3Pipeline):
    """Sampling for ``StableDiffusion3Pipeline``."""

    family = StableDiffusion3
    text_encoders = ("CLIPTextModelWithProjection", "T5EncoderModel")
