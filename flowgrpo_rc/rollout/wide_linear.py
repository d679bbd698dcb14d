"""Linear layers in bfloat16 or float16 on a processor without instructions for them.

There oneDNN has no kernel, and torch's own is an order of magnitude slower than converting to float32 and back. A
product of two such numbers is exact in float32, so that both add up the same terms and round once.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def has_fast_linear(dtype: torch.dtype, device: torch.device) -> bool:
    """False on a CPU for a 16-bit precision that oneDNN does not compute there."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def linear_layers(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, linear layers in ``dtype`` compute in float32 and round their output, where that is faster."""
    return nullcontext() if has_fast_linear(dtype, device) else _WideLinear()


class _WideLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].dtype in (torch.bfloat16, torch.float16):
            return _linear(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = F.linear(input.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(input.dtype)
