"""vllm-omni's torch attention on a CPU.

A module of its own, because vllm-omni imports ``platform.py`` before its attention.
"""

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPABackend(SDPABackend):
    """vllm-omni's attention by torch, for a platform that it does not know."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuSDPAImpl


class CpuSDPAImpl(SDPAImpl):
    """As on CUDA, without a kernel of its own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")
