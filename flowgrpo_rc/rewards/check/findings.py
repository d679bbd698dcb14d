"""Scores the pictures with a reward and says what was found, beside what was expected."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.check.expectations import PROMPT, QUALITY, REFERENCE, Expectation
from flowgrpo_rc.rewards.check.pictures import SETS, Picture, colours, damaged, twice_as_large
from flowgrpo_rc.rewards.mix import RewardMix

RIGHT_SHARE = 0.75
"""Share of the comparisons of which more must come out right: 19 of the 24 that four pictures and prompts give, which
tossing coins reaches once in 300 times."""

SPREAD_SHARE = 0.02
"""Change of a score, as a share of the largest difference between scores, that other neighbours in a batch may make:
rounding on a GPU does."""

ROUNDING = 1e-4
"""The same where all scores are equal, or nearly."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    found: str
    as_expected: bool | None
    """None where nothing is expected."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    findings: list[Finding]
    seconds_per_image: float
    """Of a second call with a batch of ``batch`` images; the first may load and compile."""
    first_call_s: float
    batch: int

    @property
    def as_expected(self) -> bool:
        """Whether nothing contradicts what was expected."""
        return all(finding.as_expected is not False for finding in self.findings)


class Check:
    """One reward under examination.

    Args:
        reward: a mix that holds it alone.
        expectation: what it should do; None for a reward that is not known, of which the order is told unjudged.
        pictures: the set to use; None for the one that the reward is made for.
    """

    def __init__(self, reward: RewardMix, expectation: Expectation | None, pictures: str | None = None) -> None:
        (self.name,) = reward.functions
        self._reward = reward
        self._expected = expectation
        self._set = pictures or (expectation.pictures if expectation else "scenes")
        self._order = expectation.order if expectation else PROMPT
        self._scored: list[np.ndarray] = []

    def run(self) -> Report:
        """Score everything.

        Raises:
            ValueError: the reward refuses one of the prompts before any image is scored.
            RewardError: it failed, or gave scores that training would refuse.
        """
        pictures = SETS[self._set]()
        self._refuse_early(pictures)
        start = time.perf_counter()
        images, prompts, rows = self._pairs(pictures)
        scores = self._score(images, prompts, rows)
        first_call_s = time.perf_counter() - start
        again = time.perf_counter()
        reordered = self._score(images[::-1], prompts[::-1], rows[::-1])[::-1]
        seconds = time.perf_counter() - again
        alone = np.concatenate([self._score(images[i : i + 1], prompts[i : i + 1], rows[i : i + 1]) for i in range(4)])
        count = len(pictures)
        large = twice_as_large(images)
        findings = [
            self._order_finding("order", scores, images, count),
            self._neighbours_finding(scores, reordered, alone),
            self._order_finding("twice as large", self._score(large, prompts, rows), large, count),
        ]
        if self._order == PROMPT and self._set == "scenes":
            images, prompts, rows = self._pairs(colours())
            findings.append(self._order_finding("red and blue", self._score(images, prompts, rows), images, 2))
        findings.append(self._range_finding())
        return Report(
            findings=findings,
            seconds_per_image=seconds / count**2,
            first_call_s=first_call_s,
            batch=count**2,
        )

    def _refuse_early(self, pictures: Sequence[Picture]) -> None:
        size = (pictures[0].image.shape[0], pictures[0].image.shape[1])
        rows = [self._row(picture) for picture in pictures]
        self._reward.check_prompts([p.prompt for p in pictures], image_size=size, metadata=rows)

    def _pairs(self, pictures: Sequence[Picture]) -> tuple[np.ndarray, list[str], list[Mapping[str, Any]]]:
        """Every picture with every prompt and its row, (N * N, H, W, 3), one picture after the other."""
        images = np.stack([picture.image for picture in pictures for _ in pictures])
        prompts = [picture.prompt for _ in pictures for picture in pictures]
        return images, prompts, [self._row(picture) for _ in pictures for picture in pictures]

    def _row(self, picture: Picture) -> dict[str, Any]:
        row: dict[str, Any] = {name: name for name in self._expected.columns} if self._expected else {}
        row |= picture.metadata
        return row | {"images": [picture.image]} if self._order == REFERENCE else row

    def _score(self, images: np.ndarray, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        scores = self._reward(images, prompts, [dict(row) for row in rows]).parts[self.name]
        self._scored.append(scores)
        return scores

    def _order_finding(self, name: str, scores: np.ndarray, images: np.ndarray, count: int) -> Finding:
        """What the scores of all pairs of ``count`` pictures and prompts say; ``images`` are the pairs' images."""
        table = scores.reshape(count, count)
        right = np.diag(table)
        if self._order == QUALITY:
            wrong = self._score(damaged(images[:: count + 1]), [""] * count, [{}] * count)
            won = int((right > wrong).sum())
            compared = count
            words = f"clean above noisy in {won} of {compared} pictures"
        else:
            wrong = table[~np.eye(count, dtype=bool)]
            # Against the same picture with other prompts, and against other pictures with the same prompt.
            won = int((right[:, None] > table).sum() + (right[None, :] > table).sum())
            compared = 2 * wrong.size
            partner = "prompt" if self._order == PROMPT else "reference"
            words = f"own {partner} above another's in {won} of {compared} comparisons"
        words += f", {right.mean():.4g} against {wrong.mean():.4g} on average"
        return Finding(name=name, found=words, as_expected=self._judged(won > RIGHT_SHARE * compared))

    def _judged(self, as_expected: Any) -> bool | None:
        return None if self._expected is None else bool(as_expected)

    def _neighbours_finding(self, scores: np.ndarray, reordered: np.ndarray, alone: np.ndarray) -> Finding:
        change = max(np.abs(scores - reordered).max(), np.abs(scores[: len(alone)] - alone).max())
        allowed = max(SPREAD_SHARE * np.ptp(scores), ROUNDING)
        words = f"scores change by at most {change:.2g} in a batch of another order and one by one"
        return Finding(name="neighbours", found=words, as_expected=self._judged(change <= allowed))

    def _range_finding(self) -> Finding:
        scores = np.concatenate(self._scored)
        words = f"{scores.min():.4g} to {scores.max():.4g}"
        if self._expected is None:
            return Finding(name="range", found=words, as_expected=None)
        low, high = self._expected.low, self._expected.high
        # float32 rounds a cosine of 1 to a little more.
        slack = 1e-5 * max(1.0, *(abs(bound) for bound in (low, high) if np.isfinite(bound)))
        inside = bool(low - slack <= scores.min() and scores.max() <= high + slack)
        return Finding(name="range", found=f"{words}, by the formula {low:.4g} to {high:.4g}", as_expected=inside)


def memory() -> dict[str, float]:
    """Peak memory so far in bytes: of this process, where the system says, and of each GPU that torch has used."""
    found: dict[str, float] = {}
    try:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["the process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    except ImportError:  # Windows
        pass
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            peak = torch.cuda.max_memory_allocated(index)
            found |= {f"GPU {index}": peak} if peak else {}
    return found
