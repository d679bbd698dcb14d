"""An adapter on its way to vllm-omni: its names there, what its layers will hold, what the trainer must send.

Imports no vllm: the trainer's side and the engine's process share it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import ACTOR_ADAPTER, AdapterMismatchError, linear_layers, target_layers
from flowgrpo_rc.transfers import to_host

_A = f".lora_A.{ACTOR_ADAPTER}.weight"
_B = f".lora_B.{ACTOR_ADAPTER}.weight"


@dataclass(frozen=True)
class AdapterPush:
    """One adapter as it is sent to the engine's process."""

    state: dict[str, Tensor]
    """Tensors of their own on the host, named as the actor names them."""
    version: int
    """The trainer's number of the adapter."""
    rank: int
    """``lora_rank``."""
    alpha: int
    """``lora_alpha``."""


def expected_shapes(model: DiffusionModel, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter that ``attach_lora`` gives the actor, from the base model alone."""
    layers = linear_layers(model.transformer)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in target_layers(model.transformer, model, config):
        shapes[name + _A] = (config.lora_rank, layers[name].in_features)
        shapes[name + _B] = (layers[name].out_features, config.lora_rank)
    return shapes


def as_held(state: Mapping[str, Tensor], dtype: torch.dtype, scaling: float) -> dict[str, Tensor]:
    """What vllm-omni's layers hold of ``state``: its dtype, and ``alpha / rank`` multiplied into the B matrices."""
    rounded = {name: tensor.to(dtype) for name, tensor in to_host(state).items()}
    return rounded | {name: tensor * scaling for name, tensor in rounded.items() if name.endswith(_B)}


def pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """``{module: (A, B)}``, modules named as the actor names them."""
    modules = sorted({name.removesuffix(_A).removesuffix(_B) for name in state})
    absent = [m + ending for m in modules for ending in (_A, _B) if m + ending not in state]
    if absent:
        raise AdapterMismatchError(f"the adapter does not bind: {absent[0]} is missing")
    return {m: (state[m + _A], state[m + _B]) for m in modules}


def unpaired(held: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """``pairs`` undone."""
    return {m + ending: t for m, ab in held.items() for ending, t in zip((_A, _B), ab, strict=True)}


def engine_module(module: str, present: Container[str]) -> str:
    """The actor's module name as vllm-omni has it, whose model has the modules ``present``."""
    # Diffusers' to_out is a list of a linear layer and a dropout; some of vllm-omni's are the layer itself.
    return module.removesuffix(".0") if module.endswith(".to_out.0") and module not in present else module
