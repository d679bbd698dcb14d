"""What each built-in reward should make of the pictures, in one table. A reward that is not in it is not judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flowgrpo_rc.rewards.config import RewardConfig
from flowgrpo_rc.rewards.judge.config import JudgeConfig
from flowgrpo_rc.rewards.judge.wording import placeholders, wants_target

PROMPT = "prompt"
"""A picture scores higher with its own prompt than with those of others."""
REFERENCE = "reference"
"""A picture scores higher with itself as the reference, the column ``images``, than with others."""
QUALITY = "quality"
"""A clean picture scores higher than the same under noise, whatever the prompt."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a right reward does with the pictures."""

    order: str
    """``PROMPT``, ``REFERENCE`` or ``QUALITY``."""
    low: float = -math.inf
    high: float = math.inf
    """No score lies outside, by the reward's formula."""
    pictures: str = "scenes"
    """Which set of ``pictures.SETS`` it is made for."""
    columns: frozenset[str] = frozenset()
    """Columns of the prompt file that it reads; a picture's row that lacks one gets its name as its value."""


EXPECTATIONS = {
    "ocr": Expectation(order=PROMPT, low=0.0, high=1.0, pictures="numbers"),
    "jpeg_compressibility": Expectation(order=QUALITY, high=0.0),
    # exp(logit_scale) is at most 100 in CLIP and its descendants.
    "pickscore": Expectation(order=PROMPT, low=-100 / 26, high=100 / 26),
    "clipscore": Expectation(order=PROMPT, low=-100 / 30, high=100 / 30),
    "clip_cosine": Expectation(order=PROMPT, low=-1.0, high=1.0),
    "hpsv2": Expectation(order=PROMPT, low=-1.0, high=1.0),
    "aesthetic": Expectation(order=QUALITY, low=0.0, high=11.0),
    "clip_similarity": Expectation(order=REFERENCE, low=-1.0, high=1.0),
    "dino_similarity": Expectation(order=REFERENCE, low=-1.0, high=1.0),
    "siglip_similarity": Expectation(order=REFERENCE, low=-1.0, high=1.0),
    "judge": Expectation(order=PROMPT, low=0.0, high=1.0),
}
"""Name of a built-in reward -> what it should do."""


def expectation(name: str, config: RewardConfig) -> Expectation | None:
    """What the reward of this name should do in a run of this configuration; None where that is not known, as of every
    function of the user's own, whatever it is called."""
    if name in config.own_functions():
        return None
    known = EXPECTATIONS.get(name)
    return _of_judge(known, config.judge) if known is not None and name == "judge" else known


def _of_judge(judge: Expectation, config: JudgeConfig) -> Expectation:
    """With pictures that show a text where a question asks for one, with the columns of all questions, and with
    references where a question shows them."""
    pictures = "numbers" if any(map(wants_target, config.questions)) else judge.pictures
    columns = frozenset[str]().union(*map(placeholders, config.questions))
    order = REFERENCE if any(question.references for question in config.questions) else judge.order
    return replace(judge, order=order, pictures=pictures, columns=columns)
