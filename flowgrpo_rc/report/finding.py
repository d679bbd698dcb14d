"""What a check found, and the bands that its value is held against."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WATCH, PROBLEM = "ok", "watch", "problem"
LEVELS = (OK, WATCH, PROBLEM)
"""From best to worst."""


@dataclass(frozen=True)
class Band:
    """Where a value is healthy and where it is a problem; between the two it is one to watch. Bounds are inclusive.

    None leaves a side open.
    """

    low: float | None = None
    high: float | None = None
    """Healthy: from ``low`` to ``high``."""
    problem_low: float | None = None
    problem_high: float | None = None
    """A problem: below ``problem_low`` or above ``problem_high``."""

    def judge(self, value: float) -> tuple[str, float | None]:
        """The level, and the bound that was passed, or else the nearest one."""
        if self.problem_low is not None and value < self.problem_low:
            return PROBLEM, self.problem_low
        if self.problem_high is not None and value > self.problem_high:
            return PROBLEM, self.problem_high
        if self.low is not None and value < self.low:
            return WATCH, self.low
        if self.high is not None and value > self.high:
            return WATCH, self.high
        bounds = [b for b in (self.low, self.high, self.problem_low, self.problem_high) if b is not None]
        return OK, min(bounds, key=lambda b: abs(b - value), default=None)

    def words(self) -> str:
        """``healthy 0.95 to 1.05, problem below 0.5 or above 2``."""
        low, high = self.low, self.high
        if low is not None and high is not None:
            parts = [f"healthy {number(low)} to {number(high)}"]
        else:
            parts = [f"healthy from {number(low)}"] if low is not None else []
            parts += [f"healthy up to {number(high)}"] if high is not None else []
        ends = [f"below {number(self.problem_low)}"] if self.problem_low is not None else []
        ends += [f"above {number(self.problem_high)}"] if self.problem_high is not None else []
        return ", ".join([*parts, *([f"problem {' or '.join(ends)}"] if ends else [])])


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    level: str
    """``ok``, ``watch`` or ``problem``."""
    check: str
    """The check's name, as in ``docs/report.md``."""
    title: str
    """What it looks at, in a few words."""
    metric: str
    """The metric it was measured on."""
    value: float
    """What was measured; see ``measured`` for its unit."""
    limit: float | None
    """The bound that the value passed, or else the nearest."""
    band: str
    """All bounds, in words."""
    steps: tuple[int, int]
    """First and last step that went into the value."""
    measured: str
    """The value in words, with where it comes from."""
    advice: str
    """What to do, in one sentence; also given when all is well."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def worst(findings: Sequence[Finding]) -> str:
    """The worst level among ``findings``; ``ok`` of none."""
    return max((f.level for f in findings), key=LEVELS.index, default=OK)


def number(value: float) -> str:
    """A number for people: three significant digits, exponents only where they help."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"
        return text if "e" not in text else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
