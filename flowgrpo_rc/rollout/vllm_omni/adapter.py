"""Adapters for vllm-omni: their names there, and the values of its layers.

Imports no vllm, because the trainer and the engine's process share it.
"""

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import ACTOR_ADAPTER, AdapterMismatchError
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.transfers import to_host

_A = f".lora_A.{ACTOR_ADAPTER}.weight"
_B = f".lora_B.{ACTOR_ADAPTER}.weight"


def as_held(state: Mapping[str, Tensor], dtype: torch.dtype, scaling: float) -> dict[str, Tensor]:
    """``state`` as vllm-omni's layers hold it: in their dtype, with ``alpha / rank`` multiplied into the B matrices."""
    # Rounded first and scaled then, as vllm does; the other order differs in the last bit.
    rounded = {name: tensor.to(dtype) for name, tensor in to_host(state).items()}
    return rounded | {name: tensor * scaling for name, tensor in rounded.items() if name.endswith(_B)}


def digest_rule(config: RolloutConfig, lora: ModelConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """``VllmOmniEngine.digest_of`` of an engine with these settings, without an engine."""
    dtype = torch_dtype(config.dtype)
    return lambda state: adapter_digest(as_held(state, dtype, lora.lora_alpha / lora.lora_rank))


def pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """``{module: (A, B)}`` under the actor's names."""
    modules = sorted({name.removesuffix(_A).removesuffix(_B) for name in state})
    # Half a pair would bind silently as a zero matrix.
    absent = [m + ending for m in modules for ending in (_A, _B) if m + ending not in state]
    if absent:
        raise AdapterMismatchError(f"the adapter does not bind: {absent[0]} is missing")
    return {m: (state[m + _A], state[m + _B]) for m in modules}


def unpaired(held: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The inverse of ``pairs``."""
    return {m + ending: t for m, ab in held.items() for ending, t in zip((_A, _B), ab, strict=True)}


def engine_module(module: str, present: Container[str]) -> str:
    """vllm-omni's name of the actor's module; its model has the modules ``present``."""
    if module in present:
        return module
    # In diffusers, to_out is a list of a linear layer and a dropout, and net is a list of the parts of a feed-forward
    # layer. In vllm-omni they may be the linear layer itself, and parts under other names.
    return module.removesuffix(".0") if module.endswith(".to_out.0") else module.replace(".ffn.net.", ".ffn.net_")
