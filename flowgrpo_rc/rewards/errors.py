"""The error of a reward, and how an exception of a user's own code is told in one line."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

LONGEST = 400
"""Characters of an exception's text, a prompt or a value that a message repeats."""


class RewardError(RuntimeError):
    """A reward function failed or gave an answer unfit for training. The message names the function."""


class AnswerError(RewardError):
    """What a reward function returned is unfit: found by a check of ours, not raised by the function."""


def told(error: BaseException, file: str | None) -> str:
    """`KeyError: 'gone' at /home/me/mine.py:12, in compute_score`: type, text and place of an exception.

    Args:
        error: what was raised.
        file: the user's file. The place is the innermost line of it that the exception passed through; without
            such a line the innermost of all.
    """
    text = text_of(error)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return named + _place(error, file)


def text_of(error: BaseException) -> str:
    """The exception's text in one line."""
    try:
        return " ".join(str(error).split())
    except BaseException as broken:  # a text that cannot be had must not hide the error itself
        return f"(its text raised {type(broken).__name__})"


def shown(value: Any) -> str:
    """What Python shows for a value, in one line and not longer than a message can bear."""
    try:
        text = " ".join(repr(value).splitlines())
    except BaseException as broken:
        return f"a {type(value).__name__} (showing it raised {type(broken).__name__})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _place(error: BaseException, file: str | None) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f" at {error.filename}:{error.lineno}"
    frames = list(_frames(error.__traceback__))
    own = [frame for frame in frames if frame[0] == file]
    if not frames:
        return ""
    where, line, function = (own or frames)[-1]
    return f" at {where}:{line}, in {function}"


def _frames(innermost: TracebackType | None) -> list[tuple[str, int, str]]:
    """File, line and function of every level, outermost first, less the ones of this package's call itself."""
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(innermost)]
    return frames[1:]
