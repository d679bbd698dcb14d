"""Small checks that configuration classes share; each error names the field, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any


def choice(field: str, value: object, options: Sequence[object]) -> None:
    """``value`` is one of ``options``."""
    if value not in options:
        raise ValueError(f"{field}: got {value!r}; choose one of {', '.join(map(str, options))}")


def positive(field: str, value: float | None, *, optional: bool = False) -> None:
    """``value`` is a finite number above 0 (or ``None`` where ``optional``)."""
    if optional and value is None:
        return
    if value is None or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{field}: got {value!r}; give a number above 0{' or null' if optional else ''}")


def non_negative(field: str, value: float | None, *, optional: bool = False) -> None:
    """``value`` is a finite number of at least 0 (or ``None`` where ``optional``)."""
    if optional and value is None:
        return
    if value is None or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{field}: got {value!r}; give 0 or more{' or null' if optional else ''}")


def path_text(field: str, value: object, *, optional: bool = False) -> None:
    """``value`` is a string that a file system takes as a path (or ``None`` where ``optional``)."""
    if optional and value is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{field}: got {value!r}; give a path as text{' or null' if optional else ''}")
    if "\0" in value:
        raise ValueError(f"{field}: got {value!r}; a path cannot hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{field}: got {value!r}; a path cannot hold half a surrogate pair") from None


def section(field: str, cls: type, value: Any) -> Any:
    """``value``, or where it is a mapping the configuration class made from it."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: got {value!r}; give a {cls.__name__} or a mapping of its keys")
    known = [f.name for f in fields(cls)]
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise ValueError(f"{field}: has no key {', '.join(unknown)}; its keys are {', '.join(known)}")
    return cls(**value)
