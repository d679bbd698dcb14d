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
    """Named figures of a block of rows, on its device, in float64."""

    sums: dict[str, Float[Tensor, " B"]] = field(default_factory=dict)
    """One value a row, to be summed over rows."""
    minima: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    maxima: dict[str, Float[Tensor, ""]] = field(default_factory=dict)

    def add_extremes(self, name: str, ends: tuple[Float[Tensor, ""], Float[Tensor, ""]]) -> None:
        """Notes the smallest and the largest value of something."""
        self.minima[name], self.maxima[name] = ends

    def update(self, other: "RowFigures") -> None:
        """Takes over the figures of ``other``, which have other names."""
        self.sums |= other.sums
        self.minima |= other.minima
        self.maxima |= other.maxima


class Totals(NamedTuple):
    """``RowFigures`` reduced over rows, as vectors in the order of their names; still on the device."""

    sums: Float[Tensor, " sums"]
    minima: Float[Tensor, " minima"]
    maxima: Float[Tensor, " maxima"]


def reduce_rows(figures: RowFigures, counted: Bool[Tensor, " B"] | None) -> Totals:
    """Sums over the rows that are counted (``None``: all)."""
    table = torch.stack(list(figures.sums.values()))
    if counted is not None:
        table = table * counted
    return Totals(
        table.sum(1), torch.stack(list(figures.minima.values())), torch.stack(list(figures.maxima.values()))
    )


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
