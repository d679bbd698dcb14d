"""Precisions that a configuration may name: one table for the whole project. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """One precision."""

    where: str
    """``module:name`` of the torch dtype."""
    fit_for_training: bool = True
    """AdamW's eps and squared gradients are within its range, so that trained weights may have this precision."""


# Gradients and AdamW's second moments underflow in float16, whose smallest number is 6e-8.
DTYPES: dict[str, Dtype] = {
    "float32": Dtype("torch:float32"),
    "bfloat16": Dtype("torch:bfloat16"),
    "float16": Dtype("torch:float16", fit_for_training=False),
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in ``DTYPES``."""
    return resolve_name(DTYPES[name].where)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of any torch dtype in configurations and messages, e.g. ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
