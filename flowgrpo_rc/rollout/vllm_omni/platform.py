"""The platform of vllm-omni's worker, runner and attention layers on a CPU, with products by plain torch.

Loaded through ``plugin.register`` only, and so never beside an accelerator.

vllm's own CPU platform chooses a kernel for each linear layer by the processor's features (AMX, AVX512, Arm's ACL,
AMD's zentorch, else oneDNN), packs the loaded weight for it and drops the original. That is wrong here for two reasons:
``scripts/install_vllm_omni_cpu.sh`` builds none of these kernels, and a packed weight rounds unlike the trainer's and
cannot be read back.
"""

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

# Kept alive, because torch drops the declarations of a deleted library.
_DECLARATIONS = torch.library.Library("_C", "FRAGMENT")


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One CPU device, attention by ``scaled_dot_product_attention``, products by plain torch."""

    # The kind of platform that vllm-omni takes from a plugin.
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return True  # it compiles if ``rollout.torch_compile`` asks for it

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Settle the kernels: a worker calls this before it loads a model."""
        # Only now: vllm-omni imports this module before its attention.
        from vllm.model_executor.layers import utils
        from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

        # On a platform from a plugin, attention by torch has no implementation.
        SDPAImpl.forward = SDPAImpl.forward_cuda
        # Replaced in the module, since layers look it up there after each loading.
        utils.dispatch_cpu_unquantized_gemm = _use_torch
        # vllm's activations look this kernel up, and do not call it on a CPU.
        if not hasattr(torch.ops._C, "silu_and_mul"):
            _DECLARATIONS.define("silu_and_mul(Tensor! out, Tensor input) -> ()")

    @classmethod
    def synchronize(cls) -> None:
        """Everything is synchronous."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is no caching allocator."""

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """Peaks are not tracked."""

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        return 0

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total


def _use_torch(layer: Any, remove_weight: bool) -> None:
    """Replaces vllm's choice. ``remove_weight`` is ignored: it is for packed weights."""
    layer.cpu_linear = torch.nn.functional.linear
