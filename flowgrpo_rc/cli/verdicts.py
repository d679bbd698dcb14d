"""What can become of a key that is none here: the verdicts of which ``foreign_keys`` makes its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

Tree = Mapping[str, Any]
"""All settings that were given, dotted key to value."""
Harmless = Callable[[Any, Tree], bool]
SECTIONS = {
    "A": "actor_rollout_ref.actor",
    "R": "actor_rollout_ref.rollout",
    "M": "actor_rollout_ref.model",
    "P": "actor_rollout_ref.rollout.pipeline",
    "V": "actor_rollout_ref.rollout.val_kwargs",
}
"""The sections that a verdict's keys shorten to a letter."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of the keys that fit a pattern, and why."""

    reason: str
    keys: str
    """Patterns, apart by blanks and lines. On a line ``section: a b`` they are ``section.a`` and ``section.b``, and
    sections may be the letters of ``SECTIONS``.

    In a pattern ``*`` stands for text within one part of a key, a leading ``**`` for any parts, and ``a.**`` for ``a``
    and everything below it.
    """

    @cached_property
    def targets(self) -> Mapping[str, str]:
        """Every pattern, with the key here that a line ``pattern -> key`` gives it, or else an empty text."""
        return dict(entry for line in self.keys.splitlines() for entry in _entries(line))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of keys that this verdict is on."""
        return tuple(self.targets)


class Ignored(Verdict):
    """Cannot change what is learned."""


class Deleted(Verdict):
    """Means nothing here: the key is refused, and the remedy is to delete it."""


@dataclass(frozen=True)
class Refused(Verdict):
    """Would change what is learned, and nothing here does the same."""

    harmless: tuple[Any, ...] | Harmless = ()
    """Values that ask for what happens here anyway."""

    def is_harmless(self, value: Any, tree: Tree) -> bool:
        """Whether this value asks for what happens here anyway."""
        return self.harmless(value, tree) if callable(self.harmless) else value in self.harmless


@dataclass(frozen=True)
class Moved(Verdict):
    """Acts through another key; its lines are ``there -> here``, and a ``*`` here is what the one there matched."""

    values: Mapping[Any, Any] = field(default_factory=dict)
    """Spellings of a value that differ; ``DROP`` leaves the key out."""
    only: bool = False
    """Whether values that are not listed are refused."""

    def target_for(self, key: str) -> str:
        """The key here, for one that fits."""
        for pattern, target in self.targets.items():
            found = fit(pattern, key)
            if found:
                return target.replace("*", found[1]) if "*" in target else target
        raise KeyError(key)


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


def _entries(line: str) -> list[tuple[str, str]]:
    """Patterns of a line, each with the key here that it is moved to, if it is."""
    line = re.sub(r"(?<![\w.])([ARMPV])(?=[.:])", lambda found: SECTIONS[found[1]], line)
    there, arrow, here = line.strip().partition(" -> ")
    if arrow:
        return [(there, here)]
    section, colon, names = line.rpartition(":")
    prefix = f"{section.strip()}." if colon else ""
    return [(f"{prefix}{name}", "") for name in names.split()]
