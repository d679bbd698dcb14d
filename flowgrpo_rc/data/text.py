"""What can be wrong with a line of text: characters that no tokenizer takes, bytes that are no text, broken JSON."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me"}
"""Unicode categories of what shows nothing by itself: controls, formats (zero-width characters), spaces, marks."""
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Fillers and the empty braille cell: letters and symbols by category, blank to the eye."""
_ALLOWED_CONTROLS = "\t\n\r"
DEEPEST = 100
"""Levels of a row; what copies or writes rows later recurses, and Python allows little more."""
_EXAMPLE = 60
"""Characters of a line that a message quotes."""


def is_blank(text: str) -> bool:
    """Whether nothing of it can be seen."""
    return all(unicodedata.category(c) in _INVISIBLE or c in _BLANK for c in text)


def fault_of(text: str) -> str | None:
    """The first character that no tokenizer or no log takes, in words; None where there is none."""
    # Most texts have none, and this says so quickly.
    if text.isprintable():
        return None
    for place, c in enumerate(text, start=1):
        if "\ud800" <= c <= "\udfff":
            return f"half a surrogate pair (U+{ord(c):04X}) at character {place}, which is no text"
        if (c < " " and c not in _ALLOWED_CONTROLS) or c == "\x7f":
            return f"the control character U+{ord(c):04X} at character {place}"
    return None


def undecodable(path: Path, content: bytes, error: UnicodeDecodeError) -> str:
    """What a file is whose bytes are not UTF-8, and in which line that shows."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"{path} is not UTF-8 text but UTF-16"
    line = content.count(b"\n", 0, error.start) + 1
    return f"{path} is not UTF-8 text (line {line}, byte 0x{content[error.start]:02x}: {error.reason})"


def parse_row(line: str, source: str) -> dict[str, Any]:
    """A line of JSON as an object.

    Raises:
        ValueError: it is not JSON (`NaN` is not), no object, names a key twice, nests too deeply, or holds a number
            that is too large or a character that no tokenizer takes; names `source`.
    """
    try:
        row = json.loads(line, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep(source) from None
    # Besides JSONDecodeError: what the hooks raise, and Python itself for an integer of too many digits.
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({_brief(error)}); write one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{source} is a JSON {type(row).__name__}; write one object a line")
    if line.count("[") + line.count("{") > DEEPEST and _depth(row) > DEEPEST:
        raise _too_deep(source)
    # Only an escape can bring a lone surrogate into text that was decoded.
    if "\\ud" in line.lower():
        for key, text in _texts(row):
            fault = fault_of(text)
            if fault is not None and "surrogate" in fault:
                raise ValueError(f"{source}: {key!r} holds {fault}; write the character itself, or remove it")
    return row


def _too_deep(source: str) -> ValueError:
    return ValueError(f"{source} is not usable JSON (it nests too deeply); write one flat object a line")


def _depth(row: dict[str, Any]) -> int:
    deepest, waiting = 0, [(row, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        parts = node.values() if isinstance(node, dict) else node
        waiting += [(part, depth + 1) for part in parts if isinstance(part, (dict, list))]
    return deepest


def _brief(error: ValueError) -> str:
    text = str(error).partition(";")[0]
    return text if len(text) <= 2 * _EXAMPLE else f"{text[: 2 * _EXAMPLE]}..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:_EXAMPLE]!r} stands there twice")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_EXAMPLE]} is too large")
    return value


def _texts(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every string in a row with the key of the row that it stands under; without recursion."""
    waiting: list[tuple[str, Any]] = list(row.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            waiting += [(key, part) for part in value.values()]
            waiting += [(key, name) for name in value]
        elif isinstance(value, list):
            waiting += [(key, part) for part in value]
    yield from ((key, key) for key in row)
