"""Moments: sums and extremes by name, from which every metric follows, and which merge exactly.

Weights, rejection and diagnostics describe a block of rows by sums over elements and by figures of rows; reduced over
rows, blocks, micro-batches and ranks these are ``Moments``. A metric is a function of the moments (``metrics``), so
that a merged metric equals the metric of the merged batch: means by their counts, standard deviations and effective
sample sizes from sums of squares.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import FAR, Rows
from flowgrpo_rc.correction.plan import CorrectionPlan


class FigureMoments(NamedTuple):
    """What is kept of a figure ``x`` of rows, of which row ``i`` has ``n_i`` valid elements."""

    sum: float
    element_sum: float
    """Sum of ``n_i * x``."""
    square: float
    """Sum of ``x^2``."""
    element_square: float
    """Sum of ``n_i * x^2``."""
    smallest: float
    largest: float

    def merge(self, other: "FigureMoments") -> "FigureMoments":
        """Of the rows of both."""
        return FigureMoments(
            self.sum + other.sum,
            self.element_sum + other.element_sum,
            self.square + other.square,
            self.element_square + other.element_square,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )


class RowFigures:
    """Collects the figures of a block's rows, on its device."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._figures: list[Tensor] = []

    def add(self, names: Iterable[str], figures: Float[Tensor, "K B"]) -> None:
        """One line for each name: float64 numbers or flags; those of rows without a valid element are left out."""
        self.names += names
        self._figures.append(figures)

    def totals(self, rows: Rows, *, masked: bool) -> "Totals":
        """Everything reduced over rows; ``masked`` says whether some may have no valid element."""
        count = rows.sum("elements")
        nonempty = count.clamp(max=1.0)
        self.add(("rows",), nonempty[None])
        figures = torch.cat(self._figures)
        smallest = largest = figures
        if masked:
            away = (1.0 - nonempty) * FAR
            smallest = figures + away
            largest = figures - away
            figures = figures * nonempty
        # each row once, and as often as it has elements
        counted = torch.stack([figures, figures * count])
        squares = counted * figures
        return Totals(rows.sums.sum(1), counted.sum(2), squares.sum(2), smallest.amin(1), largest.amax(1))


class Totals(NamedTuple):
    """Sums over elements, and the moments of rows' figures, still on the device, in the order of their names."""

    element_sums: Float[Tensor, " sums"]
    figure_sums: Float[Tensor, "2 figures"]
    """With each row once, and with each as often as it has elements."""
    figure_squares: Float[Tensor, "2 figures"]
    smallest: Float[Tensor, " figures"]
    largest: Float[Tensor, " figures"]


def merge_blocks(blocks: Sequence[Totals]) -> Totals:
    """Totals of all blocks of one batch together."""
    if len(blocks) == 1:
        return blocks[0]
    elements, figures, squares, smallest, largest = (torch.stack(parts) for parts in zip(*blocks, strict=True))
    return Totals(elements.sum(0), figures.sum(0), squares.sum(0), smallest.amin(0), largest.amax(0))


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over elements and moments of rows' figures, by name, as Python floats."""

    plan: CorrectionPlan
    sums: dict[str, float]
    figures: dict[str, FigureMoments]
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

    @property
    def rows(self) -> float:
        """Rows with a valid element."""
        return self.figures["rows"].sum

    def element_sum(self, name: str) -> float:
        """Sum over elements, of a value of their own or else of their row's."""
        return self.sums[name] if name in self.sums else self.figures[name].element_sum

    def element_square(self, name: str) -> float:
        """Sum of squares over elements, likewise."""
        return self.sums[f"{name}_squared"] if name in self.sums else self.figures[name].element_square

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
            {name: figure.merge(other.figures[name]) for name, figure in self.figures.items()},
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
