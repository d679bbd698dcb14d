"""Public names that are imported on first use (PEP 562), so that reading a configuration loads no torch.

A package lists its public names once, as imports under ``if TYPE_CHECKING:``, each in the form ``from module import
name as name`` by which type checkers know a name that is public. These follow the imports; at run time, where the block
is not executed, ``lazy_names`` reads it from the package's source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the package of that ``__name__``."""
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, str]:
        """Public name -> full name of the module that defines it."""
        loader: Any = module.__loader__  # which has the source in a zip file, too
        tree = ast.parse(loader.get_source(package))
        (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
        imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name == "__all__":  # ``from package import *`` asks for it
            return sorted(homes())
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Stored on the module, so that this function runs once for a name.
        value = getattr(importlib.import_module(homes()[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted(homes())
