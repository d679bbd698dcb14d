"""All that is wrong with a configuration, told at once: grouped by what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field


class ConfigError(ValueError):
    """The configuration cannot be composed; the message names every key that is wrong, and the remedy."""


DELETE = "delete; they mean nothing here"
INSTEAD = "write instead"
CANNOT = "cannot work here"
UNKNOWN = "unknown"
WRONG = "wrong value"
GROUPS = (DELETE, INSTEAD, CANNOT, UNKNOWN, WRONG)
"""In the order of the message."""


@dataclass(frozen=True)
class _Refusal:
    group: str
    subject: str
    """What was given: a key, or ``key=value``."""
    reason: str
    alone: str
    """The whole message when nothing else is wrong."""
    follows: str
    """Stands between subject and reason."""


@dataclass
class Refusals:
    """Collects refusals; ``raise_if_any`` turns them into one ``ConfigError``."""

    found: list[_Refusal] = field(default_factory=list)

    def delete(self, key: str, reason: str) -> None:
        """A key without a meaning."""
        self._add(DELETE, key, reason, f"{key} has no meaning here: {reason}; delete it")

    def instead(self, subject: str, override: str, reason: str) -> None:
        """A key that has another name here; ``override`` is ready to paste."""
        self._add(
            INSTEAD, override, f"for {subject}: {reason}", f"{subject}: write {override} instead ({reason})", "  "
        )

    def cannot(self, subject: str, reason: str) -> None:
        """A key that asks for something that is not done here."""
        self._add(CANNOT, subject, reason, f"{subject} cannot work here: {reason}")

    def unknown(self, key: str, nearest: str) -> None:
        """A key that nobody documents."""
        self._add(
            UNKNOWN, key, f"nearest: {nearest}", f"unknown configuration key {key}; nearest: {nearest}", follows="; "
        )

    def wrong(self, message: str) -> None:
        """A message that begins with the key."""
        self._add(WRONG, message, "", message, follows="")

    def __bool__(self) -> bool:
        return bool(self.found)

    def raise_if_any(self) -> None:
        """Raise one error for everything that was found: a line when there is one thing, else a line for each.

        Raises:
            ConfigError: something was found.
        """
        if len(self.found) == 1:
            raise ConfigError(self.found[0].alone)
        if self.found:
            raise ConfigError("\n".join(self._lines()))

    def _add(self, group: str, subject: str, reason: str, alone: str, follows: str = ": ") -> None:
        refusal = _Refusal(group, subject, reason, alone, follows)
        if refusal not in self.found:
            self.found.append(refusal)

    def _lines(self) -> list[str]:
        lines = [f"the configuration has {len(self.found)} settings that cannot be used"]
        for group in GROUPS:
            members = [refusal for refusal in self.found if refusal.group == group]
            if members:
                lines.append(f"  {group}:")
            reasons = dict.fromkeys((refusal.reason, refusal.follows) for refusal in members)
            for reason, follows in reasons:
                same = [refusal.subject for refusal in members if refusal.reason == reason]
                lines += [f"    {subject}" for subject in same] if not reason else [_joined(same, reason, follows)]
        return lines


def _joined(subjects: list[str], reason: str, follows: str) -> str:
    return f"    {', '.join(subjects)}{follows}{reason}"
