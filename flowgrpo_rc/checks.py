"""Small checks that configuration classes share; each error names the field, the value and the remedy."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints

LARGEST_INTEGER = 2**63 - 1
"""What torch's and numpy's generators, tensors' sizes and the files of a run all take."""

_TRUE = ("true", "yes", "on", "y", "1")
_FALSE = ("false", "no", "off", "n", "0")
_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers, e.g. [0,5]",
    list[float]: "a list of numbers, e.g. [0.9,0.999]",
    list[str]: "a list of names, e.g. [a,b]",
    dict[str, float]: "a mapping of names to numbers, e.g. {ocr: 1.0}",
}
"""What an error asks for, by the type that a field is annotated with."""


def choice(field: str, value: object, options: Sequence[object]) -> None:
    """``value`` is one of ``options``."""
    if value not in options:
        raise ValueError(f"{field}: got {value!r}; choose one of {', '.join(map(_plain, options))}")


def positive(field: str, value: float | None, *, optional: bool = False) -> None:
    """``value`` is a finite number above 0 (or ``None`` where ``optional``)."""
    if value is None and optional:
        return
    if not _is_finite_number(value) or value <= 0:
        raise ValueError(f"{field}: got {show(value)}; give a number above 0{' or null' if optional else ''}")


def non_negative(field: str, value: float | None, *, optional: bool = False) -> None:
    """``value`` is a finite number of at least 0 (or ``None`` where ``optional``)."""
    if value is None and optional:
        return
    if not _is_finite_number(value) or value < 0:
        raise ValueError(f"{field}: got {show(value)}; give 0 or more{' or null' if optional else ''}")


def path(field: str, value: object, *, optional: bool = False) -> None:
    """``value`` is text that can name a file or folder: not blank, without NUL and half surrogate pairs (or ``None``
    where ``optional``)."""
    if optional and value is None:
        return
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field}: got {value!r}; give a path, as text{' or null' if optional else ''}")
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
        raise ValueError(f"{field}: got {show(value)}; give a {cls.__name__} or a mapping of its keys")
    known = [f.name for f in fields(cls)]
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise ValueError(f"{field}: has no key {', '.join(unknown)}; its keys are {', '.join(known)}")
    return cls(**value)


def fit_fields(section_name: str, instance: Any) -> None:
    """Bring every field of a configuration object to its annotated type: an integer becomes a float where a float is
    wanted, a mapping the section that it spells out. Called first in ``__post_init__``, so that the class's own checks
    see what they expect.

    NaN and infinity pass, for the class's own checks say what a number may be.

    Args:
        section_name: the section's dotted name for messages; empty for the whole configuration.

    Raises:
        ValueError: a field's value is not of its type; see ``fit`` and ``section``.
    """
    prefix = f"{section_name}." if section_name else ""
    for name, kind in get_type_hints(type(instance)).items():
        value = getattr(instance, name)
        left_to_class = isinstance(value, float) and not math.isfinite(value) and float in _options(kind)
        if is_dataclass(kind):
            setattr(instance, name, section(f"{prefix}{name}", kind, value))  # type: ignore[arg-type]
        elif kind is not Any and not left_to_class:
            setattr(instance, name, fit(f"{prefix}{name}", kind, value))


def fit(field: str, kind: Any, value: Any) -> Any:
    """``value`` as a ``kind``, which is a type annotation of a configuration class.

    Text that spells a number is one, an integer is fine where a float is wanted, and a tuple where a list is.

    Raises:
        ValueError: it is something else, a number that is not finite, or an integer beyond ``LARGEST_INTEGER``; the
            message names the field, the value and the type that is wanted.
    """
    options = _options(kind)
    if Any in options or (value is None and type(None) in options):
        return value
    value = plain(value)
    wanted = [option for option in options if option is not type(None)]
    for option in wanted:
        if option is str and len(wanted) > 1 and not isinstance(value, str):
            continue  # beside a number, text is a word such as auto
        with suppress(TypeError, ValueError, OverflowError):
            return _convert(option, value)
    names = [_IN_WORDS.get(option, str(option)) for option in wanted] + ["null"] * (type(None) in options)
    raise ValueError(f"{field}: got {show(value)}; {_why_not(wanted, value)}give {' or '.join(names)}")


def plain(value: Any) -> Any:
    """Numbers of other types (numpy's) as Python's own, and paths as text; everything else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def show(value: object) -> str:
    """A value as a message quotes it, shortened where it is long; null, true and false are spelled as in YAML."""
    if isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key}: {show(item)}' for key, item in list(value.items())[:9])}}}"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(show(item) for item in value[:9])}]"
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        text = f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest ones
    else:
        text = _plain(value) if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _plain(value: object) -> str:
    return "null" if value is None else str(value)


def _is_finite_number(value: object) -> TypeGuard[float]:
    # Compared, as ``math.isfinite`` takes no integer beyond the range of floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _convert(kind: Any, value: Any) -> Any:
    """``value`` as a ``kind``; raises a ``TypeError``, ``ValueError`` or ``OverflowError`` where it is none."""
    origin = get_origin(kind)
    if origin is list and isinstance(value, list | tuple):
        return [_convert(get_args(kind)[0], item) for item in value]
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _convert(get_args(kind)[1], item) for key, item in value.items()}
    if origin is not None or not isinstance(value, str | int | float):
        raise TypeError
    if kind is bool and str(value).lower() in (*_TRUE, *_FALSE):
        return str(value).lower() in _TRUE
    if kind is str:
        return str(value)
    if kind is bool or isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    number = kind(value)
    if abs(number) > LARGEST_INTEGER if kind is int else not math.isfinite(number):
        raise ValueError
    return number


def _why_not(wanted: Sequence[Any], value: Any) -> str:
    """What is wrong beyond the type, where there is more to say."""
    if isinstance(value, float) and not math.isfinite(value):
        return "that is not finite; "
    with suppress(TypeError, ValueError):
        if int in wanted and not isinstance(value, float) and abs(int(value)) > LARGEST_INTEGER:
            return "that is beyond 2**63 - 1, which is the largest integer that torch and numpy take; "
    if wanted == [int] and isinstance(value, str):
        return "it could not be converted to Integer; "
    return ""
