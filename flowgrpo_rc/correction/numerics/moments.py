"""Moments: named sums, minima and maxima from which every metric follows, and which merge exactly.

Weights, rejection and diagnostics describe a block of rows by ``RowFigures``; reduced over rows, blocks, micro-batches
and ranks they are ``Moments``. A metric is a function of the moments (``metrics``), so that a merged metric equals the
metric of the merged batch: means by their counts, standard deviations and effective sample sizes from sums of squares.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.plan import CorrectionPlan


@dataclass(slots=True)
class RowFigures:
    """Named figures of each row of a block, on its device: matrices with one line for each name."""

    names: list[str] = field(default_factory=list)
    sums: list[Float[Tensor, "_ B"]] = field(default_factory=list)
    """To be summed over rows."""
    range_names: list[str] = field(default_factory=list)
    smallest: list[Float[Tensor, "_ B"]] = field(default_factory=list)
    """Of which the smallest is wanted."""
    largest: list[Float[Tensor, "_ B"]] = field(default_factory=list)
    """Of which the largest is wanted, under the same names."""

    def add(self, names: Iterable[str], figures: Float[Tensor, "K B"]) -> None:
        """Figures to be summed, float64."""
        self.names += names
        self.sums.append(figures)

    def add_ranges(
        self, names: Iterable[str], smallest: Float[Tensor, "K B"], largest: Float[Tensor, "K B"] | None = None
    ) -> None:
        """Figures of which the smallest and the largest are wanted."""
        self.range_names += names
        self.smallest.append(smallest)
        self.largest.append(smallest if largest is None else largest)


class Totals(NamedTuple):
    """``RowFigures`` reduced over rows, in the order of their names; still on the device, in float64."""

    sums: Float[Tensor, " sums"]
    minima: Float[Tensor, " ranges"]
    maxima: Float[Tensor, " ranges"]


def reduce_rows(figures: RowFigures, nonempty: Bool[Tensor, " B"] | None) -> Totals:
    """Totals over the rows with a valid element (``None``: all have one)."""
    sums = torch.cat(figures.sums)
    smallest = torch.cat(figures.smallest)
    largest = torch.cat(figures.largest)
    if nonempty is not None:
        sums = sums * nonempty
        empty = ~nonempty
        smallest = smallest.masked_fill(empty, math.inf)
        largest = largest.masked_fill(empty, -math.inf)
    return Totals(sums.sum(1), smallest.amin(1), largest.amax(1))


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
