"""vllm's linear layers on a CPU: plain torch, whatever the processor offers.

Once a layer's weights are loaded, vllm's CPU platform chooses a kernel for its product by asking the processor: AMX
tiles, AVX512, Arm's ACL, AMD's zentorch, else oneDNN. It packs the weight for that kernel and drops the original. Here
that would be wrong twice: ``scripts/install_vllm_omni_cpu.sh`` builds none of these kernels, so that the worker ends
where the processor offers them; and a packed weight rounds unlike the trainer does and cannot be read back.

Nothing here is needed on a GPU. vllm is imported inside a function, since the trainer's side uses this file too.
"""

import importlib
import re
from typing import Any

import torch
from torch import nn

CHOICE = ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
"""The one function in which vllm chooses; its layers look it up there each time that they have been loaded."""
UNCALLED = {"silu_and_mul": "silu_and_mul(Tensor! out, Tensor input) -> ()"}
"""Kernels that vllm's activations look up when they are made and do not call on a CPU, with torch's declarations."""
_MISSING_KERNEL = re.compile(r"'_\w*C\w*' object has no attribute '(\w+)'")
"""What torch says when an operator of vllm's compiled library ``_C`` (``_moe_C``, ``_C_cache_ops``) is not there."""
_REMEDY = "install the versions of constraints-vllm.txt, or set actor_rollout_ref.rollout.name=diffusers"


def keep_plain_torch() -> None:
    """Make every unquantised layer that vllm loads from now on multiply by ``torch.nn.functional.linear``.

    Raises:
        RuntimeError: this vllm chooses in another place.
    """
    module_name, function = CHOICE
    try:
        module = importlib.import_module(module_name)
        getattr(module, function)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"vllm cannot be kept on plain torch: this version has no {function}, so it would choose kernels by what "
            f"the processor offers, built or not; {_REMEDY} ({error})"
        ) from error
    setattr(module, function, _use_torch)
    _declare_uncalled()


def check_plain_torch(model: nn.Module) -> None:
    """Make sure that it holds for a model that vllm has loaded.

    Raises:
        RuntimeError: names the first layer with another product.
    """
    for name, layer in model.named_modules():
        product = getattr(layer, "cpu_linear", torch.nn.functional.linear)
        if product is not torch.nn.functional.linear:
            raise RuntimeError(
                f"vllm chose a kernel for the layer {name} by what this processor offers, which is not what the "
                f"trainer computes with; {_REMEDY}"
            )


def with_cause(error: str) -> str:
    """An error from the engine's process, with cause and remedy where vllm asked for a kernel that is not built."""
    missing = _MISSING_KERNEL.search(error)
    if missing is None:
        return error
    return (
        f"{error} (cause: vllm asked for {missing.group(1)}, one of its compiled kernels, because of what this "
        "processor offers; scripts/install_vllm_omni_cpu.sh builds none. Remedy: "
        "actor_rollout_ref.rollout.dtype=float32, or actor_rollout_ref.rollout.name=diffusers)"
    )


def _declare_uncalled() -> None:
    """Give what is looked up in vain a declaration without a kernel: a call would be an error of torch's."""
    for name, declaration in UNCALLED.items():
        if not hasattr(torch.ops._C, name):
            _DECLARATIONS.define(declaration)


_DECLARATIONS = torch.library.Library("_C", "FRAGMENT")
"""torch forgets a declaration with the library that it was made in."""


def _use_torch(layer: Any, remove_weight: bool) -> None:
    """In the place of vllm's choice; ``remove_weight`` is for packed weights, and here the layer's own is used."""
    layer.cpu_linear = torch.nn.functional.linear
