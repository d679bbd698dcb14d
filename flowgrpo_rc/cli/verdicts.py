"""What can become of a key that is none here: the verdicts of which ``foreign_keys`` makes its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

Tree = Mapping[str, Any]
"""All settings that were given, dotted key to value."""
Harmless = Callable[[Any, Tree], bool]


@dataclass(frozen=True)
class Verdict:
    """What becomes of the keys that fit a pattern, and why; a key goes by the narrowest that fits."""

    pattern: str
    """See ``foreign_keys.yaml``."""
    reason: str


class Ignored(Verdict):
    """Cannot change what is learned."""


class Deleted(Verdict):
    """Means nothing here: the key is refused, and the remedy is to delete it."""


@dataclass(frozen=True)
class Refused(Verdict):
    """Would change what is learned, and nothing here does the same."""

    harmless: tuple[Any, ...] | Harmless
    """Values that ask for what happens here anyway."""

    def is_harmless(self, value: Any, tree: Tree) -> bool:
        """Whether this value asks for what happens here anyway."""
        return self.harmless(value, tree) if callable(self.harmless) else value in self.harmless


@dataclass(frozen=True)
class Moved(Verdict):
    """Acts through another key."""

    target: str
    """The key here; a ``*`` in it is what the one in the pattern matched."""
    values: Mapping[Any, Any]
    """Spellings of a value that differ; ``DROP`` leaves the key out."""
    only: bool
    """Whether values that are not listed are refused."""

    def target_for(self, key: str) -> str:
        """The key here, for one that fits."""
        found = fit(self.pattern, key)
        return self.target.replace("*", found[1]) if found and "*" in self.target else self.target


class Renamed(Moved):
    """Belongs to a program whose configuration has another form; shown as it is written here, never applied."""


DROP = object()
"""The value that leaves a key out."""


def fit(pattern: str, key: str) -> re.Match[str] | None:
    """The match where a pattern fits a key, whose groups are the texts of the pattern's ``*``."""
    return _regex(pattern).fullmatch(key.removeprefix("config."))  # flow_grpo's flags begin with it


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    parts = []
    for i, part in enumerate(pattern.split(".")):
        if part == "**":
            parts.append(r"(?:\.[^.]+)*" if i else r"(?:[^.]+\.)*[^.]+")
        else:
            parts.append((r"\." if i else "") + re.escape(part).replace(r"\*", r"([^.]*)"))
    return re.compile("".join(parts))


def rank(pattern: str) -> tuple[int, int]:
    """Sorts patterns so that the one that says most of a key comes first.

    Those without ``*`` come before those with it, and whole sections last, of which the longer are the narrower.
    """
    if pattern.endswith(".**"):
        return 2, -len(pattern)
    return int("*" in pattern), 0
