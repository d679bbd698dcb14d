"""What can be wrong with a line of text: characters that no tokenizer takes, or JSON that is broken."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from itertools import accumulate
from typing import Any

from flowgrpo_rc.messages import one_line

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me"}
"""Unicode categories of what shows nothing by itself: controls, formats (zero-width characters), spaces, marks."""
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Fillers and the empty braille cell: letters and symbols by category, blank to the eye."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Surrogates, and the control characters besides tab and line ends."""
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
DEEPEST = 100
"""Levels of a row; what copies or writes rows later recurses, and Python allows little more."""
_EXAMPLE = 60
"""Characters of a line that a message quotes."""


def is_blank(text: str) -> bool:
    """Whether nothing of it can be seen."""
    return all(unicodedata.category(c) in _INVISIBLE or c in _BLANK for c in text)


def character_fault(text: str, unfit: re.Pattern[str] = _UNFIT) -> str | None:
    """The first character that no tokenizer or no log takes, in words; None where there is none."""
    found = unfit.search(text)
    if found is None:
        return None
    code = f"U+{ord(found.group()):04X}"
    place = f"at character {found.start() + 1}"
    if found.group() >= "\ud800":
        return f"half a surrogate pair ({code}) {place}, which is no text"
    return f"the control character {code} {place}"


def parse_row(line: str, source: str) -> dict[str, Any]:
    """A line of JSON as an object.

    Raises:
        ValueError: it is not JSON (``NaN`` is not), no object, names a key twice, nests too deeply, or holds a number
            that is too large or a character that no tokenizer takes; names ``source``.
    """
    if _depth(line) > DEEPEST:
        raise ValueError(f"{source} is not usable JSON (it nests too deeply); write one flat object a line")
    try:
        row = json.loads(line, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    # Besides JSONDecodeError: what the hooks raise, and Python itself for an integer of too many digits.
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({one_line(error, 2 * _EXAMPLE)}); write one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{source} is a JSON {type(row).__name__}; write one object a line")
    # Only an escape can bring a lone surrogate into text that was decoded.
    for key, value in row.items() if "\\ud" in line.lower() else ():
        for part in (value, key):
            text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
            fault = character_fault(text, _SURROGATES)
            if fault is not None:
                raise ValueError(f"{source}: {key!r} holds {fault}; write the character itself, or remove it")
    return row


def _depth(line: str) -> int:
    """How deeply the brackets outside its strings nest."""
    # Counting brackets first is quick and spares nearly every row the walk.
    if line.count("[") + line.count("{") <= DEEPEST:
        return 0
    return max(accumulate((c in "[{") - (c in "]}") for c in _JSON_STRING.sub("", line)))


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
