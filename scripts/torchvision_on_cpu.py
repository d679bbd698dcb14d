"""Let ``import torchvision`` work where its wheel was linked against CUDA and torch was not.

Package indexes serve a torchvision whose operators need CUDA libraries; transformers imports it for its image
processors, whose operators nothing here calls. ``install_vllm_omni_cpu.sh`` copies this file into the CPU environment
when torchvision does not import there, and a ``.pth`` file calls ``install`` at the start of its interpreters.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_OPERATORS = ("nms", "qnms")
_library: Any = None


class _Finder(MetaPathFinder):
    """Finds nothing; declares the operators just before torchvision is looked for, then leaves."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()


def install() -> None:
    """Declare torchvision's operators when, and only when, torchvision is first imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _declare_operators() -> None:
    import torch

    global _library
    if _library is not None or torch.accelerator.is_available():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
