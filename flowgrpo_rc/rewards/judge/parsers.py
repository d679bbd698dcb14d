"""Answers of OpenAI's protocol, and their parsers, each with its ready question: scores between 0 and 1.

An answer that cannot be read is an error, and never a 0. A 0 for an answer out of form, as other trainers give it,
would teach the model to confuse the judge, or to avoid images that make it talkative.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.messages import printable
from flowgrpo_rc.rewards.http_client import parse_json
from flowgrpo_rc.rewards.ocr import text_similarity

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"


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
class Parser:
    """The reading of an answer, and the two requests for one that it can read."""

    read: Callable[[Answer, float, str], float]
    """From an answer, the best score that the judge could give and the text that the image should show to a score in
    [0, 1]; raises ``UnreadableAnswer`` for an answer of another form."""
    question: str
    """The default question; ``{prompt}`` is replaced with the image's prompt."""
    again: str
    """The second request, after an answer that cannot be read."""


def _score(answer: Answer, scale: float, target: str) -> float:
    """``x / scale`` of the last ``<Score>x</Score>``; x must lie in [0, scale]. ``x/5`` is x where the scale is 5."""
    pattern = rf"<score>\s*{_NUMBER}\s*(?:/\s*{_NUMBER}\s*)?</score>"
    number, out_of = _last(pattern, answer, "<Score>x</Score>")
    if out_of and float(out_of) != scale:
        raise UnreadableAnswer(f"its score is out of {out_of}, not of {scale:g}")
    return _within("score", number, 0.0, scale) / scale


def _unified_reward_1_5(answer: Answer, scale: float, target: str) -> float:
    """``x / 5`` of the last ``Final Score: x``, from 1 to 5: UnifiedReward 1.5, as flow_grpo scores it."""
    number = _last(rf"Final Score[\s*]*:[\s*]*{_NUMBER}", answer, "'Final Score: x'")
    return _within("score", number, 1.0, 5.0) / 5.0


def _unified_reward_2(answer: Answer, scale: float, target: str) -> float:
    """``(x - 1) / 4``, x the mean of the aspects' scores from 1 to 5: UnifiedReward 2.0, as verl-omni scores it."""
    scores = []
    for aspect in ("Alignment", "Coherence", "Style"):
        # Models set the names in bold, and leave the range out.
        pattern = rf"{aspect} Score[\s*]*(?:\(1-5\)[\s*]*)?:[\s*]*{_NUMBER}"
        number = _last(pattern, answer, f"'{aspect} Score (1-5): x'")
        scores.append(_within(f"{aspect} Score", number, 1.0, 5.0))
    return (sum(scores) / len(scores) - 1.0) / 4.0


def _yes_no(answer: Answer, scale: float, target: str) -> float:
    """``P(Yes) / (P(Yes) + P(No))`` for the first token, each summed over capitals and white space around it. A token
    that is not among the likeliest counts as impossible. Smooth, so that the images of a group seldom tie."""
    found = {"yes": [0.0], "no": [0.0]}
    for token, logprob in answer.first_tokens or ():
        # Tokenizers mark a space before a word as ▁ or Ġ.
        found.setdefault(token.strip(" \t\n▁Ġ").lower(), []).append(math.exp(logprob))
    yes = math.fsum(found["yes"])
    no = math.fsum(found["no"])
    # An answer such as "Maybe": one half would be a score that nobody gave.
    if yes + no == 0:
        raise UnreadableAnswer("neither Yes nor No is among its likeliest first words")
    return yes / (yes + no)


def _ocr(answer: Answer, scale: float, target: str) -> float:
    """The answer as a transcript of the image, against the target: 1 where it holds the target, as in verl-omni, else
    ``1 - min(lev, n) / n``; see ``text_similarity``."""
    return text_similarity(answer.text, target, contained_is_match=True)


def _last(pattern: str, answer: Answer, form: str) -> Any:
    """The last match: models repeat the form before they answer, or correct themselves."""
    found = re.findall(pattern, answer.text, re.IGNORECASE)
    if not found:
        raise UnreadableAnswer(f"it holds no {form}")
    return found[-1]


def _within(name: str, number: str, least: float, most: float) -> float:
    if not least <= float(number) <= most:
        raise UnreadableAnswer(f"its {name} {float(number):g} is not between {least:g} and {most:g}")
    return float(number)


PARSERS: Mapping[str, Parser] = {
    "score": Parser(
        _score,
        question=(
            "This image was generated from the caption below. Judge how well it shows what the caption says, and how "
            "good it looks. First give your reasons in one or two sentences, then a score from 0 (nothing is right) to "
            "5 (perfect), in exactly this form: <Score>X</Score>\n\nCaption: {prompt}"
        ),
        again="I could not read the score. Give the number alone, in exactly this form: <Score>X</Score>",
    ),
    # The two of UnifiedReward are the words that its models were trained on.
    "unified_reward_1_5": Parser(
        _unified_reward_1_5,
        question=(
            "You are given a text caption and a generated image based on that caption. Your task is to evaluate this "
            "image based on two key criteria:\n"
            "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the "
            "accuracy of depicted objects, their relationships, and attributes as described in the caption.\n"
            "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
            "preservation, color accuracy, and overall aesthetic appeal.\n"
            "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
            "Your task is provided as follows:\nText Caption: [{prompt}]"
        ),
        again="I could not read the score. Give it from 1 to 5, in exactly this form: Final Score: X",
    ),
    "unified_reward_2": Parser(
        _unified_reward_2,
        question=(
            "You are presented with a generated image and its associated text caption. Your task is to analyze the "
            "image across multiple dimensions in relation to the caption. Specifically:\n"
            "Provide overall assessments for the image along the following axes (each rated from 1 to 5):\n"
            "- Alignment Score: How well the image matches the caption in terms of content.\n"
            "- Coherence Score: How logically consistent the image is (absence of visual glitches, object distortions, "
            "etc.).\n"
            "- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.\n\n"
            "Output your evaluation using the format below:\n\n"
            "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\n"
            "Your task is provided as follows:\nText Caption: [{prompt}]"
        ),
        again=(
            "I could not read the scores. Give the three of them from 1 to 5, in exactly this form:\n"
            "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z"
        ),
    ),
    "yes_no": Parser(
        _yes_no,
        question="Does this image show what the following caption says? Answer with Yes or No.\n\nCaption: {prompt}",
        again="Answer with one word, Yes or No.",
    ),
    "ocr": Parser(
        _ocr,
        question="Write down the text that stands in this image, and nothing else. Describe and explain nothing.",
        again="Write down the text that stands in the image, and nothing else.",
    ),
}
"""The parsers by name. To add one, write its function and a line here."""


def read_answer(text: bytes) -> Answer:
    """The judge's answer in a server's; ``ValueError`` where that is none of ``/chat/completions``."""
    answer = parse_json(text)
    try:
        choice = answer["choices"][0]
        words = choice["message"]["content"]
        complete = words is not None and choice.get("finish_reason") not in ("length", "content_filter")
        # A model that thinks first may show it. If it never stops, all of its words are thoughts.
        words = re.sub(r"^.*</think>", "", words or "", flags=re.DOTALL).strip()
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"answers with no text in choices[0].message.content: {text[:200].decode(errors='replace')!r}"
        ) from None
    tokens = None if choice.get("logprobs") is None else _first_tokens(choice)
    return Answer(words, tokens, complete and not words.startswith("<think>"))


def _first_tokens(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    try:
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        tokens = [(str(entry["token"]), float(entry["logprob"])) for entry in top]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        raise ValueError("answers with log-probabilities but no numbers in logprobs.content[0].top_logprobs") from None
    for token, logprob in tokens:
        # Rounding may carry the logarithm of 1 a little above 0.
        if not -1e9 < logprob < 1e-3:
            raise ValueError(f"answers with the log-probability {logprob:g} of the token {token[:40]!r}")
    return tokens


def read_models(text: bytes) -> list[str]:
    """The names of a server's models, from its answer to ``GET /models``; ``ValueError`` for any other answer."""
    answer = parse_json(text)
    try:
        # Messages, logs and config.yaml repeat the names.
        return [printable(str(model["id"])) for model in answer["data"]]
    except (KeyError, TypeError):
        raise ValueError(f"answers with no list of models: {text[:200].decode(errors='replace')!r}") from None
