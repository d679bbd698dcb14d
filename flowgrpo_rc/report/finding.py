"""The outcome of a check, and the limits that it was judged by."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WATCH, PROBLEM = "ok", "watch", "problem"
LEVELS = (OK, WATCH, PROBLEM)
"""From best to worst."""


@dataclass(frozen=True)
class HealthyRange:
    """The limits of a check, inclusive; None leaves a side open. Between healthy and problem is the level to watch."""

    low: float | None = None
    """The smallest healthy value."""
    high: float | None = None
    """The largest healthy value."""
    problem_low: float | None = None
    """Below this a value is a problem."""
    problem_high: float | None = None
    """Above this a value is a problem."""

    def judge(self, value: float) -> tuple[str, float | None]:
        """The level, and the limit that was passed, or else the nearest one."""
        # The problem's limits lie outside the healthy ones, so they are tested first.
        for level, low, high in ((PROBLEM, self.problem_low, self.problem_high), (WATCH, self.low, self.high)):
            if low is not None and value < low:
                return level, low
            if high is not None and value > high:
                return level, high
        given = [b for b in (self.low, self.high, self.problem_low, self.problem_high) if b is not None]
        return OK, min(given, key=lambda bound: abs(bound - value), default=None)

    def words(self) -> str:
        """``healthy 0.95 to 1.05, problem below 0.5 or above 2``."""
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"healthy {number(self.low)} to {number(self.high)}")
        elif self.low is not None:
            parts.append(f"healthy from {number(self.low)}")
        elif self.high is not None:
            parts.append(f"healthy up to {number(self.high)}")
        ends = {"below": self.problem_low, "above": self.problem_high}
        problem = " or ".join(f"{side} {number(bound)}" for side, bound in ends.items() if bound is not None)
        return ", ".join([*parts, *([f"problem {problem}"] if problem else [])])


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    level: str
    """``ok``, ``watch`` or ``problem``."""
    check: str
    """The check's name, as in ``docs/report.md``."""
    title: str
    """The subject, in a few words."""
    metric: str
    """The metric it was measured on."""
    value: float
    """The value; ``measured`` has its unit."""
    limit: float | None
    """The limit that the value passed, or else the nearest."""
    band: str
    """All limits of the check, in words."""
    steps: tuple[int, int]
    """First and last step that went into the value."""
    measured: str
    """The value in words, with its metric and steps."""
    advice: str
    """The remedy, in one sentence; also given when all is well."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def worst(findings: Sequence[Finding]) -> str:
    """The worst level among ``findings``; ``ok`` of none."""
    return max((f.level for f in findings), key=LEVELS.index, default=OK)


def fixed(value: float, digits: int) -> str:
    """Format a number with so many decimals; a small one keeps three significant digits."""
    return number(value) if 0 < abs(value) < 0.1 else f"{value:.{digits}f}"


def number(value: float) -> str:
    """Format a number with three significant digits, and exponents only for very small or large ones."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"
        return text if "e" not in text else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
