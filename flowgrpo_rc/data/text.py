"""Checks of one line of text: blank prompts, characters that no tokenizer takes, and rows that are no JSON object."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from flowgrpo_rc.messages import one_line

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me"}
"""Unicode categories without a glyph of their own: controls, formats (zero-width characters), spaces, marks."""
# Tab and line ends are text; a NUL ends a string in some tokenizers, and an escape code would reach the terminal.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def is_blank(text: str) -> bool:
    """The text shows nothing."""
    return all(unicodedata.category(character) in _INVISIBLE for character in text)


def character_fault(text: str) -> str | None:
    """The first control character besides tab and line ends, in words; ``None`` without one."""
    found = _CONTROL.search(text)
    if found is None:
        return None
    return f"the control character U+{ord(found.group()):04X} at character {found.start() + 1}"


def parse_row(line: str, source: str) -> dict[str, Any]:
    """A line of JSON as an object.

    Raises:
        ValueError: it is no JSON object; names ``source``.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON ({one_line(error, 120)}); write one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{source} is a JSON {type(row).__name__}; write one object a line")
    return row
