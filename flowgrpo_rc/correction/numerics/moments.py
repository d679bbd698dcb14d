"""Moments: named sums, minima and maxima from which every metric follows, and which merge exactly.

Weights, rejection and diagnostics describe a block of rows by ``RowFigures``; reduced over rows, blocks, micro-batches
and ranks they are ``Moments``. A metric is a function of the moments (``metrics``), so that a merged metric equals the
metric of the merged batch: means by their counts, standard deviations and effective sample sizes from sums of squares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.plan import CorrectionPlan


@dataclass(slots=True)
class RowFigures:
    """Named figures of each row of a block, on its device."""

    sums: dict[str, Float[Tensor, " B"]] = field(default_factory=dict)
    """Float64, to be summed over rows."""
    minima: dict[str, Float[Tensor, " B"]] = field(default_factory=dict)
    """Of which the smallest counts."""
    maxima: dict[str, Float[Tensor, " B"]] = field(default_factory=dict)
    """Of which the largest counts."""

    def add_range(self, name: str, smallest: Float[Tensor, " B"], largest: Float[Tensor, " B"] | None = None) -> None:
        """Notes figures of which the smallest and the largest count."""
        self.minima[name] = smallest
        self.maxima[name] = smallest if largest is None else largest


class Totals(NamedTuple):
    """``RowFigures`` reduced over rows, as vectors in the order of their names; still on the device, in float64."""

    sums: Float[Tensor, " sums"]
    minima: Float[Tensor, " minima"]
    maxima: Float[Tensor, " maxima"]


def reduce_rows(figures: RowFigures, nonempty: Bool[Tensor, " B"] | None) -> Totals:
    """Totals over the rows with a valid element (``None``: all have one)."""
    sums = torch.stack(list(figures.sums.values()))
    minima = torch.stack(list(figures.minima.values())).double()
    maxima = torch.stack(list(figures.maxima.values())).double()
    if nonempty is not None:
        sums = sums * nonempty
        minima = minima.masked_fill(~nonempty, math.inf)
        maxima = maxima.masked_fill(~nonempty, -math.inf)
    return Totals(sums.sum(1), minima.amin(1), maxima.amax(1))


def reduce_blocks(blocks: Sequence[Totals]) -> Totals:
    """Totals of all blocks of one batch together."""
    if len(blocks) == 1:
        return blocks[0]
    sums, minima, maxima = (torch.stack(parts) for parts in zip(*blocks, strict=True))
    return Totals(sums.sum(0), minima.amin(0), maxima.amax(0))


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums, minima and maxima of a batch, by name, as Python floats."""

    plan: CorrectionPlan
    sums: dict[str, float]
    minima: dict[str, float]
    maxima: dict[str, float]
    divisor: float | None = None
    """What batch normalisation divided by; None when unknown (after a merge) or without normalisation."""
    timesteps: dict[float, tuple[float, float]] = field(default_factory=dict)
    """Sum of ``|l|`` and number of valid elements per timestep value."""

    @property
    def finite(self) -> bool:
        """False when a valid log-prob is NaN or infinite: it then is in the sum of ``l``."""
        return math.isfinite(self.sums["log_ratio"])

    @property
    def count(self) -> float:
        """Valid elements."""
        return self.sums["elements"]

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
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: min(value, other.minima[name]) for name, value in self.minima.items()},
            {name: max(value, other.maxima[name]) for name, value in self.maxima.items()},
            timesteps=timesteps,
        )


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
