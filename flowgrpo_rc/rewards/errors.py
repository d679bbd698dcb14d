"""Errors of rewards, and one-line descriptions of exceptions and values of a user's own code."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from flowgrpo_rc.messages import one_line

LONGEST = 400
"""Characters of an exception's text, a prompt or a value in a message."""


class RewardError(RuntimeError):
    """A reward function failed or gave an answer unfit for training. The message names the function."""


class AnswerError(RewardError):
    """A reward function returned something unfit; a check of ours found it."""


def describe_exception(error: BaseException, file: str | None) -> str:
    """``KeyError: 'gone' at /home/me/mine.py:12, in compute_score``: type, text and place of an exception.

    The place is the innermost line of the user's ``file`` on its traceback; without one the innermost of all.
    """
    name = type(error).__name__
    text = one_line(error)
    described = name if text == name else f"{name}: {_shorten(text)}"
    # The traceback of a syntax error ends in the import, not in the line.
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{described} at {error.filename}:{error.lineno}"
    # The outermost level is this package's call itself.
    levels = list(traceback.walk_tb(error.__traceback__))[:0:-1]
    return described + describe_place(levels, file)


def describe_place(levels: Sequence[tuple[FrameType, int]], file: str | None, *, quote: bool = False) -> str:
    """`` at FILE:LINE, in FUNCTION``: the innermost level of a stack in the user's ``file``, or else of all.

    Args:
        levels: frames and their lines, the innermost first; the text is empty without any.
        file: the user's.
        quote: add the line itself, in parentheses.
    """
    if not levels:
        return ""
    # A fault inside a library is the user's to find from the line that calls it.
    frame, number = next((level for level in levels if level[0].f_code.co_filename == file), levels[0])
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip() if quote else ""
    return f" at {path}:{number}, in {frame.f_code.co_name}" + (f" ({line})" if line else "")


def brief_repr(value: Any) -> str:
    """Python's representation of a value in one line, shortened for a message."""
    return _shorten(" ".join(repr(value).splitlines()))


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
