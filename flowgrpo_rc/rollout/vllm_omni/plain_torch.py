"""Make vllm's linear layers on a CPU use plain torch.

vllm's CPU platform chooses a kernel by the processor's features (AMX, AVX512, Arm's ACL, AMD's zentorch, else oneDNN),
packs each loaded weight for it and drops the original. That is wrong here for two reasons:
``scripts/install_vllm_omni_cpu.sh`` builds none of these kernels, and a packed weight rounds unlike the trainer's and
cannot be read back. Nothing of this is needed on a GPU.
"""

import importlib
import re
from typing import Any

import torch
from torch import nn

CHOICE = ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
"""The function in which vllm chooses; its layers look it up after each loading."""
UNCALLED = {"silu_and_mul": "silu_and_mul(Tensor! out, Tensor input) -> ()"}
"""Kernels that vllm's activations look up but do not call on a CPU, with torch's declarations."""
# torch's error for a missing operator of vllm's compiled library _C (_moe_C, _C_cache_ops).
_MISSING_KERNEL = re.compile(r"'_\w*C\w*' object has no attribute '(\w+)'")
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
    # Replaced in the module, since layers look it up there each time.
    setattr(module, function, _use_torch)
    _declare_uncalled()


def check_plain_torch(model: nn.Module) -> None:
    """Check that a model loaded by vllm multiplies by plain torch.

    Raises:
        RuntimeError: names the first layer with another product.
    """
    for name, layer in model.named_modules():
        # Layers of other kinds have no such attribute.
        product = getattr(layer, "cpu_linear", torch.nn.functional.linear)
        if product is not torch.nn.functional.linear:
            raise RuntimeError(
                f"vllm chose a kernel for the layer {name} by what this processor offers, which is not what the "
                f"trainer computes with; {_REMEDY}"
            )


def with_cause(error: str) -> str:
    """Add cause and remedy to an error of the engine's process about a kernel that is not built."""
    missing = _MISSING_KERNEL.search(error)
    if missing is None:
        return error
    return (
        f"{error} (cause: vllm asked for {missing.group(1)}, one of its compiled kernels, because of what this "
        "processor offers; scripts/install_vllm_omni_cpu.sh builds none. Remedy: "
        "actor_rollout_ref.rollout.dtype=float32, or actor_rollout_ref.rollout.name=diffusers)"
    )


def _declare_uncalled() -> None:
    """Declare ``UNCALLED`` without kernels; a call would be an error of torch's."""
    for name, declaration in UNCALLED.items():
        if not hasattr(torch.ops._C, name):
            _DECLARATIONS.define(declaration)


# Kept alive, because torch drops the declarations of a deleted library.
_DECLARATIONS = torch.library.Library("_C", "FRAGMENT")


def _use_torch(layer: Any, remove_weight: bool) -> None:
    """Replaces vllm's choice. ``remove_weight`` is ignored: it is for packed weights."""
    layer.cpu_linear = torch.nn.functional.linear
