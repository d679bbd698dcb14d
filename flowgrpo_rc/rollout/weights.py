"""The frozen weights of an engine of its own: rounded for its kernels, and the adapter merged into them.

torchao's layers (``int8``, ``fp8``) round activations too, a row at a time, and multiply in 8 bits. ``fp8_emulated``
rounds weights alone and multiplies in the engine's dtype.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.lora import linear_layers
from flowgrpo_rc.models.quantization import block_layers, check_packages, round_fp8_layers, round_fp8_rows
from flowgrpo_rc.rollout.engines import EMULATED

ONE_ROW_AN_IMAGE = re.compile(r"(_mod\.\d+|norm\w*\.linear|adaLN_modulation\.\d+)$")
"""Ends of the names of layers that modulate a block. Their input is the timestep, one row an image, where a GPU's
product of integers takes more than 16 rows."""
FIRST_WITH_FP8 = (8, 9)
"""The first compute capability of a GPU with float8 kernels (Ada, Hopper)."""


def on_device(quantization: str | None, device: torch.device) -> str | None:
    """The value of ``rollout.quantization`` on ``device``: ``fp8`` is emulated without float8 kernels."""
    if quantization != "fp8":
        return quantization
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_WITH_FP8
    return "fp8" if able else EMULATED


def check_kernels(
    quantization: str | None, dtype: torch.dtype, device: torch.device, section: str = "actor_rollout_ref.rollout"
) -> None:
    """Check that an engine in ``dtype`` can have ``quantization`` on ``device``, before anything is loaded; ``section``
    has both settings.

    Raises:
        UnsupportedModelError: the package of its kernels is missing.
        ValueError: they do not take ``dtype``.
    """
    here = on_device(quantization, device)
    check_packages(engine=here, engine_of=section)
    if here == "fp8" and dtype != torch.bfloat16:
        raise ValueError(
            f"{section}.dtype: got {dtype_name(dtype)} with quantization=fp8, whose kernels take "
            f"bfloat16 alone; set it to bfloat16, or quantization={EMULATED}"
        )


def layers_to_round(
    transformer: nn.Module, model: DiffusionModel, quantization: str | None, skip: Iterable[str] | None
) -> set[str]:
    """Names of the linear layers, as ``linear_layers`` has them, that ``quantization`` rounds in a transformer.

    Args:
        transformer: the engine's.
        model: of its family.
        quantization: ``int8`` and ``fp8`` round the layers of the blocks, ``fp8_emulated`` every linear layer.
        skip: names, or parts of names between dots, of layers that stay; ``None``: the family's ``keeps_unrounded`` for
            ``int8`` and ``fp8``, for ``int8`` also ``ONE_ROW_AN_IMAGE``, and none for ``fp8_emulated``.

    Raises:
        ValueError: ``skip`` names a layer that ``quantization`` does not round anyway.
    """
    if quantization is None:
        return set()
    layers = set(linear_layers(transformer))
    if quantization != EMULATED:
        # An adapter that is gone leaves its layers' names behind.
        layers &= {name.removesuffix(".base_layer") for name in block_layers(transformer)}
    if skip is None:
        skip = () if quantization == EMULATED else model.keeps_unrounded
        if quantization == "int8":
            layers = {name for name in layers if not ONE_ROW_AN_IMAGE.search(name)}
    kept = {part: {name for name in layers if f".{part}." in f".{name}."} for part in skip}
    unknown = [part for part, names in kept.items() if not names]
    if unknown:
        endings = sorted({name.split(".", 2)[-1] for name in layers})
        raise ValueError(
            f"actor_rollout_ref.rollout.quantization_skip: {', '.join(unknown)} names no layer that "
            f"{quantization} rounds; there are {', '.join(endings)}"
        )
    return layers.difference(*kept.values())


def round_layers(layers: Iterable[nn.Linear], quantization: str) -> None:
    """Give these linear layers rounded weights of their own. Biases stay, and so do the tensors that the layers held
    before."""
    if quantization == EMULATED:
        round_fp8_layers(layers)
        return
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    # Its settings of the compiler would be the actor's too; some versions of torchao turn on TF32 with them.
    kind: Any = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if quantization == "fp8":
        kind = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    chosen = nn.ModuleList(layers)
    for layer in chosen:
        vars(layer).pop("extra_repr", None)  # torchao would wrap its own once more each time
    quantize_(chosen, kind)


def round_adapter(transformer: nn.Module, adapter: str) -> None:
    """Round the matrices of an adapter through ``round_fp8_rows``."""
    for name, layer in transformer.named_modules():
        if ".lora_" in name and name.endswith(f".{adapter}") and isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(round_fp8_rows(layer.weight), requires_grad=False)


@torch.no_grad()
def merge_into_weights(transformer: nn.Module, adapter: str, base: Mapping[str, Tensor]) -> None:
    """Give every adapted layer the weight ``W + scale * B @ A``, computed in float32 and rounded once to the dtype of
    ``W``.

    Args:
        transformer: with the adapter attached.
        adapter: its name.
        base: ``W`` of each adapted layer by the name of ``linear_layers``; left as they are.
    """
    for name, weight in base.items():
        layer: Any = transformer.get_submodule(name)
        first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        update = layer.scaling[adapter] * (second.float() @ first.float())
        layer.base_layer.weight = nn.Parameter((weight.float() + update).to(weight.dtype), requires_grad=False)
