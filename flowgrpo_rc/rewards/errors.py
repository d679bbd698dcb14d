"""Errors of rewards, and values of a user's own code as their messages quote them."""

from typing import Any

LONGEST = 400
"""Characters of an exception's text, a prompt or a value in a message."""


class RewardError(RuntimeError):
    """A reward function failed or gave an answer unfit for training. The message names the function."""


class AnswerError(RewardError):
    """A reward function returned something unfit; a check of ours found it."""


def brief_repr(value: Any) -> str:
    """Python's representation of a value in one line, shortened for a message."""
    return shortened(" ".join(repr(value).splitlines()))


def shortened(text: str) -> str:
    """The first ``LONGEST`` characters of a text."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
