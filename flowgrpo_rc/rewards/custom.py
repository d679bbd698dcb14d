"""A user's own reward function, loaded from a Python file by path and name."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FIELD = "reward.custom_reward_function"


def load_function(path: str | Path, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file `path`.

    The function is called once per batch as `fn(images, prompts, metadata)` with `images` (N, H, W, 3) uint8
    RGB, `prompts` a list of N strings and `metadata` a list of N dicts. It returns N floats, or
    `(N floats, info)` with `info` a dict of anything worth keeping beside the scores; `info["text"]`,
    N strings, captions the samples.

    The file is executed once; loading it again returns the same module.

    Raises:
        ValueError: the file is missing or raises when imported, or has no callable of that name.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"{FIELD}.path: {str(path)!r} is not a file; give the path of a Python file")
    module = _load_module(file)
    function = getattr(module, name, None)
    if function is None:
        known = ", ".join(_own_functions(module)) or "no function"
        raise ValueError(f"{FIELD}.name: {file} defines no {name!r}; it defines {known}")
    if not callable(function):
        raise ValueError(
            f"{FIELD}.name: {name!r} in {file} is a {type(function).__name__}, which cannot be called; "
            "name a function fn(images, prompts, metadata) -> scores"
        )
    return function


def _load_module(file: Path) -> ModuleType:
    module_name = f"flowgrpo_rc_custom_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{FIELD}.path: {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(
            f"{FIELD}.path: importing {file} raised {type(error).__name__}: {error}; run it by itself "
            "with python to see where"
        ) from error
    return module


def _own_functions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    )
