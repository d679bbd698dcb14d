"""Placeholders of a question, filled from the image's prompt and its row of the prompt file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.rewards.forms import ground_truth
from flowgrpo_rc.rewards.judge.config import JudgeQuestion
from flowgrpo_rc.rewards.ocr import quoted_target

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


def placeholders(question: JudgeQuestion) -> set[str]:
    """The names in braces in a question."""
    return set(_PLACEHOLDER.findall(question.words))


def wants_target(question: JudgeQuestion) -> bool:
    """Return True for a question about the text that the image should show."""
    return question.parser == "ocr" or "target" in placeholders(question)


def fill(question: JudgeQuestion, prompt: str, row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The words of a question about the image of one prompt, and the text that the image should show (empty if the
    question needs none).

    Raises:
        ValueError: the prompt or its row of the prompt file lacks what the question needs.
    """
    names = placeholders(question)
    target = target_text(prompt, row) if wants_target(question) else ""
    if target is None:
        raise ValueError(
            f"{where}: {prompt!r} has no text in double quotes and no column ground_truth, which the judge's question "
            f'{question.name!r} needs; write the wanted text in quotes, as in: a sign that says "42"'
        )
    # The two names come last, so that no column of the same name hides them.
    values: dict[str, Any] = {**row, "prompt": prompt, "target": target}
    lacking = sorted(name for name in names if not isinstance(values.get(name), str | int | float))
    if lacking:
        raise ValueError(
            f"{where} has no {', '.join(lacking)}, which the judge's question {question.name!r} asks about; add it as "
            "a column of a .parquet or .jsonl file, of text or numbers"
        )
    # In one pass, so that braces in a prompt stay as they are.
    return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), question.words), target


def target_text(prompt: str, row: Mapping[str, Any]) -> str | None:
    """The text that an image should show: the row's ground truth if that is text, or the prompt's text in double
    quotes. None without either."""
    # Other data sets hold numbers or lists in the column, which no transcript is compared with.
    truth = ground_truth(row)
    return truth if isinstance(truth, str) and truth.strip() else quoted_target(prompt)
