"""Precisions that a configuration may name: one table for the whole project. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
EMULATED = "fp8_emulated"
"""Rounds weights through fp8 and multiplies in the engine's dtype."""
TRAINED_DTYPES = ("float32", "bfloat16")
"""Of trained weights: gradients and AdamW's second moments underflow in float16, whose smallest number is 6e-8."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in ``DTYPES``."""
    import torch

    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of any torch dtype in configurations and messages, e.g. ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def set_tf32(allowed: bool) -> None:
    """Have a GPU multiply float32 numbers in TF32, or not, in matrix products and convolutions alike. torch's default
    allows it in convolutions alone."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
