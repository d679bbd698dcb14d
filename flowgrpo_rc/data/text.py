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


def character_fault(text: str) -> str | None:
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
        ValueError: it is not JSON (``NaN`` is not), no object, names a key twice, nests too deeply, or holds a number
            that is too large or a character that no tokenizer takes; names ``source``.
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
    containers = (depth for _, value, depth in _walk(row) if isinstance(value, (dict, list)))
    # Counting brackets first is quick and spares nearly every row the walk.
    if line.count("[") + line.count("{") > DEEPEST and max(containers, default=0) >= DEEPEST:
        raise _too_deep(source)
    # Only an escape can bring a lone surrogate into text that was decoded.
    texts = _walk(row) if "\\ud" in line.lower() else ()
    for key, text, _ in texts:
        fault = character_fault(text) if isinstance(text, str) else None
        if fault is not None and "surrogate" in fault:
            raise ValueError(f"{source}: {key!r} holds {fault}; write the character itself, or remove it")
    return row


def _too_deep(source: str) -> ValueError:
    return ValueError(f"{source} is not usable JSON (it nests too deeply); write one flat object a line")


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


def _walk(row: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Every key and value in a row: the key of the row that it stands under, itself, how many containers hold it.

    Without recursion, which a row that nests too deeply would exhaust.
    """
    waiting: list[tuple[str, Any, int]] = [(key, part, 1) for key, value in row.items() for part in (value, key)]
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value, depth
        if isinstance(value, dict):
            waiting += [(key, part, depth + 1) for part in (*value.values(), *value)]
        elif isinstance(value, list):
            waiting += [(key, part, depth + 1) for part in value]
