"""The engine that a configuration names."""

from typing import Any

import torch

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.base import RolloutEngine
from flowgrpo_rc.rollout.config import RolloutConfig


def build_engine(config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any) -> RolloutEngine:
    """The engine ``config.name`` around ``model``, before the actor attaches its adapter.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        model: the trainer's.
        lora: the section ``actor_rollout_ref.model``.
        device: the trainer's.

    Raises:
        ImportError, ValueError, RolloutError: see ``VllmOmniEngine``.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.name == "vllm_omni":
        from flowgrpo_rc.rollout.vllm_omni import VllmOmniEngine

        return VllmOmniEngine(
            model,
            lora,
            dtype=dtype,
            micro_batch_size=config.micro_batch_size,
            device=device,
            timeouts=config.vllm_omni,
        )
    from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine

    return DiffusersEngine(
        model,
        lora,
        dtype=dtype,
        micro_batch_size=config.micro_batch_size,
        device=device,
        quantization=config.quantization,
    )
