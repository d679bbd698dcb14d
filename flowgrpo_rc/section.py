"""The base of the configuration dataclasses, which checks their fields.

A class declares types and ranges in its annotations, and rules between fields in ``problems``. Making an object
collects everything that is wrong with it and its nested sections, and raises it as one error. Loads no torch.
"""

import difflib
import functools
import math
import os
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from flowgrpo_rc.checks import show

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
}
"""Type -> its name in messages."""


class INVALID:
    """Value of a field whose setting was refused before; rules that read the field are left out."""


@dataclass(frozen=True)
class Check:
    """A condition within an annotation: ``Annotated[int, Check(lambda n: n >= 2, "give at least 2")]``."""

    holds: Callable[[Any], object]
    remedy: str


@dataclass(frozen=True)
class Read:
    """A function that takes the place of the type: ``Annotated[Any, Read(function)]``.

    It returns the field's value, and raises ``Problems`` or a ``ValueError`` whose message begins with ``got``.
    """

    function: Callable[[Any], Any]


def complaints(check: Callable[..., object], *arguments: Any, within: str = "") -> list[str]:
    """The message of the ``ValueError`` that a check raises, without the section's name ``within``; else nothing."""
    try:
        check(*arguments)
    except ValueError as error:
        return [str(error).removeprefix(f"{within}.")]
    return []


def read_mapping(remedy: str) -> Callable[[Any], dict[str, Any]]:
    """A reader for mappings of free keys, null for none; ``remedy`` describes them."""

    def read(value: Any) -> dict[str, Any]:
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"got {show(value)}; give {remedy}")
        return {str(key): item for key, item in (value or {}).items()}

    return read


def one_of(options: Collection[str]) -> Check:
    """The condition that a text is one of ``options``, a table whose rows may be added later."""
    return Check(lambda value: value in options, f"choose one of {', '.join(options)}")


_POSITIVE = Check(lambda number: number > 0, "give a number above 0")
_NON_NEGATIVE = Check(lambda number: number >= 0, "give 0 or more")
PositiveInt = Annotated[int, _POSITIVE]
PositiveFloat = Annotated[float, _POSITIVE]
NonNegativeInt = Annotated[int, _NON_NEGATIVE]
NonNegativeFloat = Annotated[float, _NON_NEGATIVE]
PathText = Annotated[str, Check(str.strip, "give a path, as text")]
PathOrEmpty = Annotated[str, Check(lambda text: text == "" or text.strip(), "give a path, as text")]


class Problems(ValueError):
    """Everything that is wrong with a section: ``found`` has messages that begin with a field's name."""

    def __init__(self, found: Sequence[str], section: str = "") -> None:
        """Put the section's dotted name in front of each message."""
        self.found = list(found)
        prefix = f"{section}." if section else ""
        super().__init__("\n".join(f"{prefix}{message}" for message in found))


class Section:
    """Base of the configuration dataclasses: converts and checks the fields when an object is made.

    An integer becomes a float in a field for floats, text that spells a number becomes it, and a mapping becomes the
    nested section that it spells out.
    """

    __slots__ = ()
    section: ClassVar[str]
    """Dotted name of the section, for messages. A class of several sections has none: its objects are checked as parts
    of a larger configuration, or by ``check``."""

    def __post_init__(self) -> None:
        if hasattr(self, "section"):
            self.check(self.section)

    def check(self, section: str) -> None:
        """Convert and check every field, those of nested sections included. Repeat it after changing a field.

        Args:
            section: the dotted name in front of every message.

        Raises:
            Problems: something is wrong; the message has a line for each field.
        """
        given = {name: getattr(self, name) for name in field_types(type(self))}
        try:
            for name, value in _converted(type(self), given).items():
                setattr(self, name, value)
            # Rules between fields read converted values, so they come last.
            if found := list(self.problems()):
                raise Problems(found)
        except Problems as error:
            raise Problems(error.found, section) from None

    def problems(self) -> Iterator[str]:
        """A message for each broken rule between fields; it begins with a field's name."""
        yield from ()


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Field -> type annotation of a dataclass, with its conditions."""
    # Cached: evaluating annotations takes most of the time of a check.
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def is_section(kind: Any) -> bool:
    """True for the annotation of a nested section."""
    return isinstance(kind, type) and issubclass(kind, Section)


def convert(kind: Any, value: Any) -> Any:
    """``value`` as the type annotation ``kind``.

    Raises:
        Problems: ``kind`` is a section with wrong fields.
        ValueError: the type is wrong, the number is not finite, or a condition does not hold; the message begins with
            ``got``.
    """
    # Reported before: the parents only learn that the section is incomplete.
    if value is INVALID:
        raise Problems([])
    if is_section(kind):
        return _section(kind, value)
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    or_null = " or null" if type(None) in options else ""
    if value is None and or_null:
        return None
    value = plain(value)
    names: list[str] = []
    for base, conditions in map(_split, options):
        if conditions and isinstance(conditions[0], Read):
            return conditions[0].function(value)
        if base is Any:
            return value
        # Beside a number, text is a word such as auto: a list must not become one.
        if base is type(None) or (base is str and names and not isinstance(value, str)):
            continue
        names.append(_in_words(base))
        try:
            return _convert(base, conditions, value)
        except TypeError:
            continue
        except ValueError as error:
            raise ValueError(f"{error}{or_null}") from None
    why = ""
    if isinstance(value, float) and not math.isfinite(value):
        why = "that is not finite; "
    elif isinstance(value, str) and _IN_WORDS[int] in names:
        why = "it could not be converted to Integer; "
    raise ValueError(f"got {show(value)}; {why}give {' or '.join(names)}{or_null}")


def plain(value: Any) -> Any:
    """Numbers of other types (numpy's) as Python's own, and paths as text; everything else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _section(kind: type[Section], value: Any) -> Section:
    """A mapping, or an object that may have been changed since it was made, as a checked section."""
    if isinstance(value, Mapping):
        known = field_types(kind)
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            nearest = f"; nearest: {near[0]}" if near else ""
            raise ValueError(f"has no key {', '.join(unknown)}{nearest}; its keys are {', '.join(known)}")
        value = kind(**_converted(kind, value))
    elif not isinstance(value, kind):
        raise ValueError(f"got {show(value)}; give a {kind.__name__} or a mapping of its keys")
    # Classes of several sections are checked here alone.
    value.check("")
    return value


def _converted(kind: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some fields as their types; raises ``Problems`` with everything that is wrong."""
    kinds = field_types(kind)
    values: dict[str, Any] = {}
    found: list[str] = []
    for name, value in given.items():
        try:
            values[name] = convert(kinds[name], value)
        except Problems as error:
            found += [f"{name}.{message}" for message in error.found]
        except ValueError as error:
            found.append(f"{name}: {error}")
    if len(values) < len(given):
        raise Problems(found)
    return values


def _convert(kind: Any, conditions: Sequence[Check], value: Any) -> Any:
    """``value`` as a ``kind`` without null; raises ``TypeError`` where the type is wrong, ``ValueError`` otherwise."""
    if get_origin(kind) is list and isinstance(value, list | tuple):
        result: Any = [_convert(*_split(get_args(kind)[0]), item) for item in value]
    elif not isinstance(value, str | int | float):
        raise TypeError
    # YAML's words for truth arrive as text from a shell.
    elif kind is bool and str(value).lower() in (*_TRUE, *_FALSE):
        result = str(value).lower() in _TRUE
    elif kind is str:
        result = str(value)
    # True is an int in Python, but never a count that somebody meant.
    elif kind not in (int, float) or isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    else:
        # Text that spells no number is of another type, such as the word auto.
        try:
            result = kind(value)
        except (ValueError, OverflowError):
            raise TypeError from None
        if not math.isfinite(result):
            # The range of a number is the clearer remedy than its type.
            if conditions and isinstance(value, float):
                raise ValueError(f"got {show(value)}; {conditions[0].remedy}")
            raise TypeError
    for condition in conditions:
        if not condition.holds(result):
            raise ValueError(f"got {show(result)}; {condition.remedy}")
    return result


def _split(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation's type, and the conditions on it."""
    return (kind.__origin__, kind.__metadata__) if hasattr(kind, "__metadata__") else (kind, ())


def _in_words(kind: Any) -> str:
    if get_origin(kind) is list:
        kind = list[_split(get_args(kind)[0])[0]]
    return _IN_WORDS.get(kind, str(kind))
