"""All that is wrong with a configuration, told at once: grouped by what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field


class ConfigError(ValueError):
    """The configuration cannot be composed; the message names every key that is wrong, and the remedy."""


GROUPS = ("delete; they mean nothing here", "write instead", "cannot work here", "unknown", "wrong value")
"""What to do about a refusal, in the order of the message."""
_DELETE, _INSTEAD, _CANNOT, _UNKNOWN, _WRONG = GROUPS


@dataclass(frozen=True)
class _Refusal:
    group: str
    subject: str
    """What was given: a key, or ``key=value``."""
    reason: str
    """What stands behind the subject, once for all subjects of the same reason."""
    alone: str
    """The whole message when nothing else is wrong."""


@dataclass
class Refusals:
    """Collects refusals; ``raise_if_any`` turns them into one ``ConfigError``."""

    found: list[_Refusal] = field(default_factory=list)

    def delete(self, key: str, reason: str) -> None:
        """A key without a meaning."""
        self._add(_DELETE, key, f": {reason}", f"{key} has no meaning here: {reason}; delete it")

    def instead(self, subject: str, override: str, reason: str) -> None:
        """A key that has another name here; ``override`` is ready to paste."""
        alone = f"{subject}: write {override} instead ({reason})"
        self._add(_INSTEAD, override, f"  for {subject}: {reason}", alone)

    def cannot(self, subject: str, reason: str) -> None:
        """A key that asks for something that is not done here."""
        self._add(_CANNOT, subject, f": {reason}", f"{subject} cannot work here: {reason}")

    def unknown(self, key: str, nearest: str) -> None:
        """A key that nobody documents."""
        self._add(_UNKNOWN, key, f"; nearest: {nearest}", f"unknown configuration key {key}; nearest: {nearest}")

    def wrong(self, message: str) -> None:
        """A message that begins with the key."""
        self._add(_WRONG, message, "", message)

    def __bool__(self) -> bool:
        return bool(self.found)

    def raise_if_any(self) -> None:
        """Raise one error for everything that was found: a line when there is one thing, else a line for each.

        Raises:
            ConfigError: something was found.
        """
        if self.found:
            raise ConfigError(self.found[0].alone if len(self.found) == 1 else "\n".join(self._lines()))

    def _add(self, group: str, subject: str, reason: str, alone: str) -> None:
        refusal = _Refusal(group, subject, reason, alone)
        if refusal not in self.found:
            self.found.append(refusal)

    def _lines(self) -> list[str]:
        lines = [f"the configuration has {len(self.found)} settings that cannot be used"]
        for group in GROUPS:
            members = [refusal for refusal in self.found if refusal.group == group]
            if members:
                lines.append(f"  {group}:")
            for reason in dict.fromkeys(refusal.reason for refusal in members):
                same = [refusal.subject for refusal in members if refusal.reason == reason]
                # What has no reason is a message of its own.
                lines += [f"    {', '.join(same)}{reason}"] if reason else [f"    {subject}" for subject in same]
        return lines
