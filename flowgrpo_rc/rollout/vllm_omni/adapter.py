"""Adapters for vllm-omni: their names there, and the values of its layers.

Imports no vllm, because the trainer and the engine's process share it.
"""

from collections.abc import Callable, Container, Mapping

from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.digest import adapter_digest, as_held, pairs, unpaired

__all__ = ["as_held", "digest_rule", "engine_module", "pairs", "unpaired"]


def digest_rule(config: RolloutConfig, lora: ModelConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """``VllmOmniEngine.digest_of`` of an engine with these settings, without an engine."""
    dtype = torch_dtype(config.dtype)
    return lambda state: adapter_digest(as_held(state, dtype, lora.lora_alpha / lora.lora_rank))


def engine_module(module: str, present: Container[str]) -> str:
    """vllm-omni's name of the actor's module; its model has the modules ``present``."""
    if module in present:
        return module
    # In diffusers, to_out is a list of a linear layer and a dropout, and net is a list of the parts of a feed-forward
    # layer. In vllm-omni they may be the linear layer itself, and parts under other names.
    return module.removesuffix(".0") if module.endswith(".to_out.0") else module.replace(".ffn.net.", ".ffn.net_")
