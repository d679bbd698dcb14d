"""Texts of errors, as messages quote them, and the place that a warning is given for."""

import sys

_WITHIN = ("flowgrpo_rc", "jaxtyping", "beartype")
"""Packages whose frames are not the caller's; the last two wrap functions where shapes are checked."""


def level_of_caller() -> int:
    """``stacklevel`` of a warning that is to name the line which called this package. Python 3.12 has
    ``skip_file_prefixes`` for it."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WITHIN:
        frame = frame.f_back
        level += 1
    return level


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The text of ``error`` in a line, cut to ``limit`` characters; its type where it has no text."""
    return printable(str(error))[:limit] or type(error).__name__


def printable(text: str) -> str:
    """``text`` in a line without control characters: the words of a server may hold a terminal's escape codes."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def reason(error: OSError) -> str:
    """The system's words for what went wrong, without the file's name, which a message already has."""
    return error.strerror or str(error)
