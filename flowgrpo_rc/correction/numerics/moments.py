"""Moments: sums and extremes by name, from which every metric follows, and which merge exactly.

A metric is a function of the moments (``metrics``), so that a merged metric equals the metric of the merged batch:
means by their counts, standard deviations and effective sample sizes from sums of squares.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.correction.plan import CorrectionPlan


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums and extremes of ``Figures``, by their names, as Python floats: of blocks, micro-batches or ranks."""

    plan: CorrectionPlan
    elements: dict[str, float]
    """Sums over valid elements; of a figure of rows with each row as often as it has elements."""
    rows: dict[str, float]
    """Sums over rows with a valid element; of a figure of elements those of the rows' means."""
    smallest: dict[str, float]
    """Smallest figures of such a row."""
    largest: dict[str, float]
    divisor: float | None = None
    """What batch normalisation divided by; None when unknown (after a merge) or without normalisation."""
    timesteps: dict[float, tuple[float, float]] = field(default_factory=dict)
    """Sum of ``|l|`` and number of valid elements per timestep value."""

    @classmethod
    def read(cls, plan: CorrectionPlan, names: list[str], numbers: Iterator[float]) -> "Moments":
        """Of a block, from the next of the numbers: those of ``Figures.totals`` one after the other."""
        elements, rows, smallest, largest = (dict(zip(names, numbers, strict=False)) for _ in range(4))
        return cls(plan, elements, rows, smallest, largest)

    @property
    def finite(self) -> bool:
        """False when a valid log-prob is NaN or infinite: it then is in the sum of ``l``."""
        return math.isfinite(self.elements["log_ratio"])

    @property
    def count(self) -> float:
        """Valid elements."""
        return self.elements["elements"]

    @property
    def row_count(self) -> float:
        """Rows with a valid element."""
        return self.rows["elements"]

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both batches together.

        Raises:
            ValueError: they were computed with different options.
        """
        if self.plan != other.plan:
            raise ValueError("Only results computed with the same options can be merged.")
        timesteps = dict(self.timesteps)
        for t, (total, count) in other.timesteps.items():
            before = timesteps.get(t, (0.0, 0.0))
            timesteps[t] = (before[0] + total, before[1] + count)
        return Moments(
            self.plan,
            {name: value + other.elements[name] for name, value in self.elements.items()},
            {name: value + other.rows[name] for name, value in self.rows.items()},
            {name: min(value, other.smallest[name]) for name, value in self.smallest.items()},
            {name: max(value, other.largest[name]) for name, value in self.largest.items()},
            timesteps=timesteps,
        )


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Result of one call; unpacks as ``weights, mask, metrics = result``. Nothing in it carries a gradient."""

    weights: Tensor | None
    """Importance weights, float32 (float64 for float64 input), 0 at invalid elements; None without ``rollout_is``."""
    mask: Tensor
    """``mask * keep`` in the mask's dtype (bool when no mask was given)."""
    metrics: dict[str, float]
    """Named figures, prefixed ``rollout_corr/``."""
    moments: Moments
    """What ``metrics`` derive from; ``MetricAccumulator`` merges it exactly over micro-batches and ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weights, self.mask, self.metrics))


def merge_over_ranks(moments: Moments | None, dp_group: Any = None) -> Moments | None:
    """Merges each rank's moments (None where a rank has none); the same result on every rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return moments
    gathered: list[Moments | None] = [None] * torch.distributed.get_world_size(dp_group)
    torch.distributed.all_gather_object(gathered, moments, group=dp_group)
    merged = None
    for each in gathered:
        if each is not None:
            merged = each if merged is None else merged.merge(each)
    return merged
