"""Scores the pictures with a reward and compares the scores with the right behaviour of each built-in reward.

Rewards that are not in the table of expectations are not judged.
"""

import itertools
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.check.pictures import SETS, Picture, colours
from flowgrpo_rc.rewards.config import RewardConfig
from flowgrpo_rc.rewards.mix import RewardMix

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
RIGHT_SHARE = 0.75
"""Share of right comparisons that must be exceeded: four pictures and prompts give 24, and tossing coins reaches 19 of
them once in 300 times."""
SPREAD_SHARE = 0.02
"""Largest change of a score with its neighbours in the batch, as a share of the scores' spread; a GPU's rounding is
smaller."""
ROUNDING = 1e-4
"""The same in absolute terms, for scores that are nearly equal."""


def expectation(name: str, config: RewardConfig) -> Expectation | None:
    """The right behaviour of the reward ``name`` in a run of this configuration. None where it is not known, as of
    every function of the user's own, whatever its name."""
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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one comparison."""

    name: str
    found: str
    as_expected: bool | None
    """None where nothing is expected."""


class Check:
    """One reward under examination.

    Args:
        reward: a mix that holds it alone.
        expectation: its right behaviour; None for an unknown reward, whose findings are not judged.
        pictures: the set to use; None for the one that the reward is made for.
        rows: prompts, with their other columns, that the pictures get in turn; by default their own.

    Attributes:
        first_call_s: time of the first call, which may load and compile.
        seconds_per_image: time of the second call, with the same ``batch`` images.
    """

    def __init__(
        self,
        reward: RewardMix,
        expectation: Expectation | None,
        pictures: str | None = None,
        rows: Sequence[tuple[str, dict[str, Any]]] = (),
    ) -> None:
        (self.name,) = reward.functions
        self._reward = reward
        self._judges = expectation is not None
        self._expected = expectation or Expectation(order=PROMPT)
        self._set = pictures or self._expected.pictures
        self._scored: list[np.ndarray] = []
        self._rows = rows

    def run(self) -> list[Finding]:
        """Score everything.

        Raises:
            ValueError: the reward refuses one of the prompts before any image is scored.
            RewardError: it failed, or gave scores that training would refuse.
        """
        pictures = SETS[self._set]()
        images, prompts, rows = self._pairs(pictures)
        self._reward.check_prompts(prompts, image_size=images.shape[1:3], metadata=rows)
        self.batch = len(images)
        start = time.perf_counter()
        scores = self._score(images, prompts, rows)
        again = time.perf_counter()
        reordered = self._score(images[::-1], prompts[::-1], rows[::-1])[::-1]
        self.first_call_s = again - start
        self.seconds_per_image = (time.perf_counter() - again) / self.batch
        alone = np.concatenate([self._score(images[i : i + 1], prompts[i : i + 1], rows[i : i + 1]) for i in range(4)])
        # Rewards that pad a batch, or hand scores out in another order, depend on an image's neighbours.
        change = max(np.abs(scores - reordered).max(), np.abs(scores[: len(alone)] - alone).max())
        large = images.repeat(2, axis=1).repeat(2, axis=2)
        findings = [
            self._order_finding("order", scores, images),
            self._finding(
                "neighbours",
                f"scores change by at most {change:.2g} in a batch of another order and one by one",
                change <= max(SPREAD_SHARE * np.ptp(scores), ROUNDING),
            ),
            self._order_finding("twice as large", self._score(large, prompts, rows), large),
        ]
        if self._expected.order == PROMPT and self._set == "scenes":
            # Red and blue swap where a reward takes RGB for BGR, which no other picture shows.
            images, prompts, rows = self._pairs(colours())
            findings.append(self._order_finding("red and blue", self._score(images, prompts, rows), images))
        return [*findings, self._range_finding()]

    def _pairs(self, pictures: Sequence[Picture]) -> tuple[np.ndarray, list[str], list[dict[str, Any]]]:
        """Every picture with every prompt and its row, (N * N, H, W, 3), one picture after the other."""
        if self._rows:
            given = zip(pictures, itertools.cycle(self._rows), strict=False)
            pictures = [replace(one, prompt=prompt, metadata=columns) for one, (prompt, columns) in given]
        images = np.stack([picture.image for picture in pictures for _ in pictures])
        prompts = [picture.prompt for _ in pictures for picture in pictures]
        return images, prompts, [self._row(picture) for _ in pictures for picture in pictures]

    def _row(self, picture: Picture) -> dict[str, Any]:
        row: dict[str, Any] = {name: name for name in self._expected.columns} | picture.metadata
        return row | {"images": [picture.image]} if self._expected.order == REFERENCE else row

    def _score(self, images: np.ndarray, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        scores = self._reward(images, prompts, [dict(row) for row in rows]).parts[self.name]
        self._scored.append(scores)
        return scores

    def _finding(self, name: str, found: str, as_expected: Any) -> Finding:
        return Finding(name=name, found=found, as_expected=bool(as_expected) if self._judges else None)

    def _order_finding(self, name: str, scores: np.ndarray, images: np.ndarray) -> Finding:
        """Compare right with wrong among the scores of all pairs; ``images`` are those of the pairs."""
        count = round(len(scores) ** 0.5)
        table = scores.reshape(count, count)
        right = np.diag(table)
        if self._expected.order == QUALITY:
            # Under strong noise, the same in every run.
            clean = images[:: count + 1]
            noisy = clean + np.random.default_rng(0).normal(0, 60.0, clean.shape)
            wrong = self._score(np.clip(np.rint(noisy), 0, 255).astype(np.uint8), [""] * count, [{}] * count)
            won = int((right > wrong).sum())
            compared = count
            words = f"clean above noisy in {won} of {compared} pictures"
        else:
            wrong = table[~np.eye(count, dtype=bool)]
            # Against the same picture with other prompts, and against other pictures with the same prompt.
            won = int((right[:, None] > table).sum() + (right[None, :] > table).sum())
            compared = 2 * wrong.size
            words = f"own {self._expected.order} above another's in {won} of {compared} comparisons"
        words += f", {right.mean():.4g} against {wrong.mean():.4g} on average"
        return self._finding(name, words, won > RIGHT_SHARE * compared)

    def _range_finding(self) -> Finding:
        scores = np.concatenate(self._scored)
        words = f"{scores.min():.4g} to {scores.max():.4g}"
        low, high = self._expected.low, self._expected.high
        # float32 rounds a cosine of 1 to a little more.
        slack = 1e-5 * max([1.0, *(abs(bound) for bound in (low, high) if np.isfinite(bound))])
        inside = low - slack <= scores.min() and scores.max() <= high + slack
        if self._judges:
            words += f", by the formula {low:.4g} to {high:.4g}"
        return self._finding("range", words, inside)


def memory() -> dict[str, float]:
    """Peak memory so far in bytes: of this process, and of each GPU that torch has used."""
    # The system counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    found: dict[str, float] = {"the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            peak = torch.cuda.max_memory_allocated(index)
            found |= {f"GPU {index}": peak} if peak else {}
    return found
