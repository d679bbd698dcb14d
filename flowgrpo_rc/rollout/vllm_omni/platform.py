"""The platform of vllm-omni's worker, runner and attention layers on a CPU.

Loaded through ``plugin.register`` only, and so never beside an accelerator.
"""

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from flowgrpo_rc.rollout.vllm_omni.plain_torch import keep_plain_torch


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One CPU device, eager, attention by ``scaled_dot_product_attention``, products by plain torch."""

    # The kind of platform that vllm-omni takes from a plugin.
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "flowgrpo_rc.rollout.vllm_omni.attention.CpuSDPABackend"

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
