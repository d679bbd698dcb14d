"""From a measured value with its interval and a limit to one of three verdicts: safe, not safe, or not shown safe.

A value measured on a few images is not the true one. What it seems to be decides nothing: a configuration is safe where
the whole interval lies below the limit, not safe where the whole of it lies above, and in between it has not been shown
to be safe, which is reason enough not to start a long run, and a reason to measure more. A figure may have two limits,
where what it does between them depends on what no image tells; a value there is never shown to be safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo_rc.gap.intervals import Interval

SAFE = "safe"
NOT_SHOWN_SAFE = "not shown safe"
NOT_SAFE = "not safe"
VERDICTS = (SAFE, NOT_SHOWN_SAFE, NOT_SAFE)
"""From best to worst."""


@dataclass(frozen=True)
class JudgedFigure:
    """One measured value against its limit."""

    what: str
    value: float
    low: float
    high: float
    limit: float
    """Above it the value is not safe."""
    safe_below: float
    """Below it the value is safe; ``limit`` itself, where that is all there is."""
    is_share: bool
    verdict: str

    @property
    def settled(self) -> bool:
        """Whether no limit lies within the interval, so that more images would change nothing."""
        return self.verdict != NOT_SHOWN_SAFE or (self.safe_below < self.low and self.high < self.limit)

    def __str__(self) -> str:
        if self.is_share:
            return f"{self.what}: {self.value:.0%} ({interval_words(self.low, self.high)}), limit {self.limit:.0%}"
        limit = f"limit {self.limit:g}"
        if self.safe_below < self.limit:
            limit = f"safe below {self.safe_below:g}, not safe above {self.limit:g}"
        return f"{self.what}: {self.value:.2g} ({self.low:.2g} to {self.high:.2g}), {limit}"


def judge(
    what: str,
    value: float,
    interval: Interval,
    limit: float,
    *,
    safe_below: float | None = None,
    is_share: bool = True,
) -> JudgedFigure:
    """The verdict on one value; a NaN in it or in its interval is never safe. ``safe_below`` None: ``limit``."""
    safe_below = limit if safe_below is None else safe_below
    verdict = NOT_SHOWN_SAFE
    if interval.high < safe_below:
        verdict = SAFE
    elif interval.low > limit:
        verdict = NOT_SAFE
    return JudgedFigure(what, value, interval.low, interval.high, limit, safe_below, is_share, verdict)


def decisive(judged: Sequence[JudgedFigure]) -> JudgedFigure:
    """The worst of several, which is the verdict on all of them; of equally bad ones the highest for its limit."""
    worst = max(VERDICTS.index(one.verdict) for one in judged)
    candidates = [one for one in judged if VERDICTS.index(one.verdict) == worst]
    return max(candidates, key=lambda one: one.high / one.limit)


def interval_words(low: float, high: float) -> str:
    """The interval of a share in words: ``1.5% to 12.0%``."""
    return f"{low:.1%} to {high:.1%}"
