"""Wan in vllm-omni, as images of one frame."""

from types import SimpleNamespace
from typing import Any

import diffusers
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline

from flowgrpo_rc.models.wan import Wan
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout


class WanRollout(Rollout, Wan22Pipeline):
    """Sampling for ``WanPipeline``."""

    family = Wan
    text_encoders = ("UMT5EncoderModel",)

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        check_head_width(od_config.tf_model_config.attention_head_dim)
        self.config = SimpleNamespace(expand_timesteps=self.expand_timesteps)
        # vllm-omni ignores the model's configuration and builds one with a fixed shift.
        settings: Any = diffusers.FlowMatchEulerDiscreteScheduler.load_config(od_config.model, subfolder="scheduler")
        self.scheduler = getattr(diffusers, settings["_class_name"]).from_config(settings)


def check_head_width(width: int) -> None:
    """Raise ``ValueError`` for a head width at which vllm-omni's positions differ from diffusers'."""
    # Both give rows and columns an even part of the width and time the rest, but vllm-omni then cuts at thirds.
    if 2 * (width // 6) != width // 3:
        raise ValueError(
            f"transformer/config.json: attention_head_dim={width}, which vllm-omni divides among time, rows and "
            "columns unlike diffusers; use actor_rollout_ref.rollout.name=diffusers"
        )
