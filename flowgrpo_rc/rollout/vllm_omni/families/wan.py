"""Wan in vllm-omni, as images of one frame."""

from types import SimpleNamespace

import diffusers
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline

from flowgrpo_rc.models.wan import Wan
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout, VllmFamily


class VllmWan(VllmFamily, Wan):
    """Wan around vllm-omni's pipeline."""


class WanRollout(Rollout, Wan22Pipeline):
    """Sampling for ``WanPipeline``."""

    family = VllmWan
    text_encoders = ("UMT5EncoderModel",)

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        width = od_config.tf_model_config.attention_head_dim
        if 2 * (width // 6) != width // 3:
            raise ValueError(
                f"transformer/config.json: attention_head_dim={width}; vllm-omni divides its positions unlike diffusers "
                "there, use actor_rollout_ref.rollout.name=diffusers"
            )
        self.config = SimpleNamespace(expand_timesteps=self.expand_timesteps)
        # vllm-omni builds one with a shift of its own, whatever the model's configuration says.
        settings = diffusers.FlowMatchEulerDiscreteScheduler.load_config(od_config.model, subfolder="scheduler")
        self.scheduler = getattr(diffusers, settings["_class_name"]).from_config(settings)
