"""The errors of rewards, and exceptions and values of a user's own code told in one line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from flowgrpo_rc.messages import one_line

LONGEST = 400
"""Characters of an exception's text, a prompt or a value that a message repeats."""


class RewardError(RuntimeError):
    """A reward function failed or gave an answer unfit for training. The message names the function."""


class AnswerError(RewardError):
    """What a reward function returned is unfit: found by a check of ours, not raised by the function."""


def describe_exception(error: BaseException, file: str | None) -> str:
    """``KeyError: 'gone' at /home/me/mine.py:12, in compute_score``: type, text and place of an exception.

    The place is the innermost line of the user's ``file`` that it passed through; without one the innermost of all.
    """
    name = type(error).__name__
    text = exception_text(error)
    told = name if text == name else f"{name}: {_shorten(text)}"
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{told} at {error.filename}:{error.lineno}"
    # The two outermost levels are this package's call itself.
    levels = list(traceback.walk_tb(error.__traceback__))[:1:-1]
    return told + describe_place(levels, file)


def describe_place(levels: Sequence[tuple[FrameType, int]], file: str | None, *, quote: bool = False) -> str:
    """`` at FILE:LINE, in FUNCTION``: the innermost level of a stack in the user's ``file``, or else of all.

    ``levels`` are frames and their lines, the innermost first; without any the text is empty. With ``quote`` the line
    itself follows, in parentheses.
    """
    if not levels:
        return ""
    frame, number = next((level for level in levels if level[0].f_code.co_filename == file), levels[0])
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip() if quote else ""
    return f" at {path}:{number}, in {frame.f_code.co_name}" + (f" ({line})" if line else "")


def exception_text(error: BaseException) -> str:
    """The exception's text in one line, or its type where it has none."""
    try:
        return one_line(error)
    except BaseException as broken:  # a text that cannot be had must not hide the error itself
        return f"(its text raised {type(broken).__name__})"


def brief_repr(value: Any) -> str:
    """What Python shows for a value, in one line and not longer than a message can bear."""
    try:
        text = " ".join(repr(value).splitlines())
    except BaseException as broken:
        return f"a {type(value).__name__} (showing it raised {type(broken).__name__})"
    return _shorten(text)


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
