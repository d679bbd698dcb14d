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

# Kernels that vllm's activations look up but do not call on a CPU, with torch's declarations.
_UNCALLED = {"silu_and_mul": "silu_and_mul(Tensor! out, Tensor input) -> ()"}
# Kept alive, because torch drops the declarations of a deleted library.
_DECLARATIONS = torch.library.Library("_C", "FRAGMENT")


def keep_plain_torch() -> None:
    """Make every unquantised layer that vllm loads from now on multiply by ``torch.nn.functional.linear``."""
    from vllm.model_executor.layers import utils

    # Replaced in the module, since layers look it up there after each loading.
    utils.dispatch_cpu_unquantized_gemm = _use_torch
    for name, declaration in _UNCALLED.items():
        # Without a kernel: a call would be an error of torch's.
        if not hasattr(torch.ops._C, name):
            _DECLARATIONS.define(declaration)


def _use_torch(layer: Any, remove_weight: bool) -> None:
    """Replaces vllm's choice. ``remove_weight`` is ignored: it is for packed weights."""
    layer.cpu_linear = torch.nn.functional.linear


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One CPU device, eager, attention by ``scaled_dot_product_attention``, products by plain torch."""

    # The kind of platform that vllm-omni takes from a plugin.
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "flowgrpo_rc.rollout.vllm_omni.pipeline.CpuAttention"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Settle the kernels: a worker calls this before it loads a model."""
        keep_plain_torch()

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
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(psutil.Process().memory_info().rss)

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total
