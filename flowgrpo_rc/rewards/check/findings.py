"""Scores the pictures with a reward and compares the scores with the reward's right behaviour."""

import resource
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
"""Share of right comparisons that must be exceeded: four pictures and prompts give 24, and tossing coins reaches 19 of
them once in 300 times."""
SPREAD_SHARE = 0.02
"""Largest change of a score with its neighbours in the batch, as a share of the scores' spread; a GPU's rounding is
smaller."""
ROUNDING = 1e-4
"""The same in absolute terms, for scores that are nearly equal."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one comparison."""

    name: str
    found: str
    as_expected: bool | None
    """None where nothing is expected."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    findings: list[Finding]
    seconds_per_image: float
    """Of a second call with a batch of ``batch`` images; the first may load and compile."""
    first_call_s: float
    batch: int

    @property
    def as_expected(self) -> bool:
        """False where a finding contradicts the expectation."""
        return all(finding.as_expected is not False for finding in self.findings)


class Check:
    """One reward under examination.

    Args:
        reward: a mix that holds it alone.
        expectation: its right behaviour; None for an unknown reward, whose findings are not judged.
        pictures: the set to use; None for the one that the reward is made for.
    """

    def __init__(self, reward: RewardMix, expectation: Expectation | None, pictures: str | None = None) -> None:
        (self.name,) = reward.functions
        self._reward = reward
        self._judges = expectation is not None
        self._expected = expectation or Expectation(order=PROMPT)
        self._set = pictures or self._expected.pictures
        self._scored: list[np.ndarray] = []

    def run(self) -> Report:
        """Score everything.

        Raises:
            ValueError: the reward refuses one of the prompts before any image is scored.
            RewardError: it failed, or gave scores that training would refuse.
        """
        pictures = SETS[self._set]()
        images, prompts, rows = self._pairs(pictures)
        self._reward.check_prompts(prompts, image_size=images.shape[1:3], metadata=rows)
        start = time.perf_counter()
        scores = self._score(images, prompts, rows)
        again = time.perf_counter()
        reordered = self._score(images[::-1], prompts[::-1], rows[::-1])[::-1]
        end = time.perf_counter()
        alone = np.concatenate([self._score(images[i : i + 1], prompts[i : i + 1], rows[i : i + 1]) for i in range(4)])
        large = twice_as_large(images)
        findings = [
            self._order_finding("order", scores, images),
            self._neighbours_finding(scores, reordered, alone),
            self._order_finding("twice as large", self._score(large, prompts, rows), large),
        ]
        if self._expected.order == PROMPT and self._set == "scenes":
            # Red and blue swap where a reward takes RGB for BGR, which no other picture shows.
            images, prompts, rows = self._pairs(colours())
            findings.append(self._order_finding("red and blue", self._score(images, prompts, rows), images))
        findings.append(self._range_finding())
        batch = len(scores)
        return Report(
            findings=findings, seconds_per_image=(end - again) / batch, first_call_s=again - start, batch=batch
        )

    def _pairs(self, pictures: Sequence[Picture]) -> tuple[np.ndarray, list[str], list[dict[str, Any]]]:
        """Every picture with every prompt and its row, (N * N, H, W, 3), one picture after the other."""
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
            wrong = self._score(damaged(images[:: count + 1]), [""] * count, [{}] * count)
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

    def _neighbours_finding(self, scores: np.ndarray, reordered: np.ndarray, alone: np.ndarray) -> Finding:
        # Rewards that pad a batch, or hand scores out in another order, depend on an image's neighbours.
        change = max(np.abs(scores - reordered).max(), np.abs(scores[: len(alone)] - alone).max())
        words = f"scores change by at most {change:.2g} in a batch of another order and one by one"
        return self._finding("neighbours", words, change <= max(SPREAD_SHARE * np.ptp(scores), ROUNDING))

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
