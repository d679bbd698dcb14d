"""The right behaviour of each built-in reward on the pictures. Rewards that are not in the table are not judged."""

import math
from dataclasses import dataclass, replace

from flowgrpo_rc.rewards.config import RewardConfig

PROMPT = "prompt"
"""A picture scores higher with its own prompt than with those of others."""
REFERENCE = "reference"
"""A picture scores higher with itself as the reference, the column ``images``, than with others."""
QUALITY = "quality"
"""A clean picture scores higher than the same under noise, whatever the prompt."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The right behaviour of a reward."""

    order: str
    """``PROMPT``, ``REFERENCE`` or ``QUALITY``."""
    low: float = -math.inf
    high: float = math.inf
    """Bounds of the scores, by the reward's formula."""
    pictures: str = "scenes"
    """The set of ``pictures.SETS`` that the reward is made for."""
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
"""Name of a built-in reward -> its right behaviour."""


def expectation(name: str, config: RewardConfig) -> Expectation | None:
    """The right behaviour of the reward ``name`` in a run of this configuration.

    None where it is not known, as of every function of the user's own, whatever its name.
    """
    if name in config.own_functions():
        return None
    known = EXPECTATIONS.get(name)
    if known is None or name != "judge":
        return known
    # A judge does what its questions ask for: read a text, compare with a reference, use columns of the run.
    questions = config.judge.questions
    return replace(
        known,
        pictures="numbers" if any(question.wants_target for question in questions) else known.pictures,
        columns=frozenset[str]().union(*(question.placeholders for question in questions)),
        order=REFERENCE if any(question.references for question in questions) else known.order,
    )
