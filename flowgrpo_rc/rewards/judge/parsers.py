"""Scores between 0 and 1 of a judge's answers. An answer that cannot be read is an error, and never a 0.

A 0 for an answer out of form, as other trainers give it, would teach the model to confuse the judge, or to avoid images
that make it talkative.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowgrpo_rc.rewards.ocr import text_similarity

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_ASPECTS = ("Alignment", "Coherence", "Style")


class UnreadableAnswer(ValueError):
    """The answer has another form than the question wants; the text names the missing part."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A judge's answer to one question."""

    text: str
    """The words after the model's thoughts."""
    first_tokens: Sequence[tuple[str, float]] | None = None
    """The likeliest first tokens with their log-probabilities; None where the server gives none."""
    complete: bool = True
    """False for an answer that was cut off or refused, or that ends within the model's thoughts."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parser's input beside the answer."""

    scale: float = 5.0
    """The best score that the judge could give."""
    target: str = ""
    """The text that the image should show."""


def score(answer: Answer, wanted: Wanted) -> float:
    """``x / scale`` of the last ``<Score>x</Score>``; x must lie in [0, scale]. ``x/5`` is x where the scale is 5."""
    found = re.findall(rf"<score>\s*{_NUMBER}\s*(?:/\s*{_NUMBER}\s*)?</score>", answer.text, re.IGNORECASE)
    if not found:
        raise UnreadableAnswer("it holds no <Score>x</Score>")
    # The last one: models repeat the form before they answer, or correct themselves.
    number, out_of = found[-1]
    if out_of and float(out_of) != wanted.scale:
        raise UnreadableAnswer(f"its score is out of {out_of}, not of {wanted.scale:g}")
    return _within("score", float(number), 0.0, wanted.scale) / wanted.scale


def unified_reward_1_5(answer: Answer, wanted: Wanted) -> float:
    """``x / 5`` of the last ``Final Score: x``, from 1 to 5: UnifiedReward 1.5, as flow_grpo scores it."""
    found = re.findall(rf"Final Score[\s*]*:[\s*]*{_NUMBER}", answer.text, re.IGNORECASE)
    if not found:
        raise UnreadableAnswer("it holds no 'Final Score: x'")
    return _within("score", float(found[-1]), 1.0, 5.0) / 5.0


def unified_reward_2(answer: Answer, wanted: Wanted) -> float:
    """``(x - 1) / 4``, x the mean of the aspects' scores from 1 to 5: UnifiedReward 2.0, as verl-omni scores it."""
    scores = []
    for aspect in _ASPECTS:
        # Models set the names in bold, and leave the range out.
        pattern = rf"{aspect} Score[\s*]*(?:\(1-5\)[\s*]*)?:[\s*]*{_NUMBER}"
        found = re.findall(pattern, answer.text, re.IGNORECASE)
        if not found:
            raise UnreadableAnswer(f"it holds no '{aspect} Score (1-5): x'")
        scores.append(_within(f"{aspect} Score", float(found[-1]), 1.0, 5.0))
    return (sum(scores) / len(scores) - 1.0) / 4.0


def yes_no(answer: Answer, wanted: Wanted) -> float:
    """``P(Yes) / (P(Yes) + P(No))`` for the first token, each summed over capitals and white space around it.

    A token that is not among the likeliest counts as impossible. Smooth, so that the images of a group seldom tie.
    """
    yes = _probability(answer, "yes")
    no = _probability(answer, "no")
    # An answer such as "Maybe": one half would be a score that nobody gave.
    if yes + no == 0:
        raise UnreadableAnswer("neither Yes nor No is among its likeliest first words")
    return yes / (yes + no)


def ocr(answer: Answer, wanted: Wanted) -> float:
    """The answer as a transcript of the image, against the target: 1 where it holds the target, as in verl-omni, else
    ``1 - min(lev, n) / n``; see ``text_similarity``."""
    return text_similarity(answer.text, wanted.target, contained_is_match=True)


PARSERS: Mapping[str, Callable[[Answer, Wanted], float]] = {
    "score": score,
    "unified_reward_1_5": unified_reward_1_5,
    "unified_reward_2": unified_reward_2,
    "yes_no": yes_no,
    "ocr": ocr,
}
"""The names of ``questions.FORMS``; each raises ``UnreadableAnswer`` for an answer of another form."""


def _probability(answer: Answer, word: str) -> float:
    # Tokenizers mark a space before a word as ▁ or Ġ.
    tokens = answer.first_tokens or ()
    return math.fsum(math.exp(logprob) for token, logprob in tokens if token.strip(" \t\n▁Ġ").lower() == word)


def _within(name: str, number: float, least: float, most: float) -> float:
    if not least <= number <= most:
        raise UnreadableAnswer(f"its {name} {number:g} is not between {least:g} and {most:g}")
    return number
