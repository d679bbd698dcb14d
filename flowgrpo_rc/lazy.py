"""Public names that are imported on first use (PEP 562), so that reading a configuration loads no torch.

A package says where its names live once, by imports under ``if TYPE_CHECKING:``. Type checkers follow these; at run
time, where they are not executed, ``lazy_names`` reads them from the package's source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the package of that ``__name__``: the names of its ``__all__``."""
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, str]:
        """Imported name -> full name of the module that defines it."""
        imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes()[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted(module.__all__)
