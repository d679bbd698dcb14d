"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or of whole rows, and the veto.

Element criteria decide before the sums along rows are taken, row criteria after; both report the same figures.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, Rows, RowSums
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import Criterion

ELEMENT_SUMS = ("statistic", "inside", "inside_squared", "below", "above")
"""The statistic, as it is and clamped to its bounds, and whether it is beyond them; a row's once for each element."""
ROW_SUMS = ("row", "row_squared", "row_below", "row_above", "row_rejected")
"""The statistic of whole rows: for an element criterion the mean, which may be inside where an element is not."""


def element_statistic(
    criterion: Criterion, log_ratio: Float[Tensor, "*shape"], excess: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """``k1 = -l``, ``k2 = l^2 / 2`` or ``k3 = r - 1 - l``, from ``l`` and ``r - 1``."""
    if criterion.statistic == "k1":
        return -log_ratio
    if criterion.statistic == "k2":
        return log_ratio.square() / 2
    return excess - log_ratio


def judge_elements(criterion: Criterion, x: Elements, sums: RowSums, figures: RowFigures) -> Bool[Tensor, "B T"]:
    """What a criterion rejects, element by element."""
    lower, upper = criterion.statistic_bounds
    statistic = element_statistic(criterion, x.clamped, x.excess)
    below, above = x.beyond(statistic, lower, upper)
    rejected = below | above
    inside = x.zero_invalid(statistic.clamp(lower, upper))
    elements = (statistic, inside, inside.square(), below, above)
    for name, values in _named(criterion, ELEMENT_SUMS, elements).items():
        sums.add(name, values)
    if criterion.statistic != "k1":  # its extremes, and the largest k2 and k3, are those of an extreme l
        figures.minima[f"{criterion.name}/element"] = x.extremes(statistic)[0]
    return rejected


def element_criterion_figures(criterion: Criterion, rows: Rows, figures: RowFigures) -> None:
    """Adds the figures of ``judge_elements`` that follow from its sums."""
    lower, upper = criterion.statistic_bounds
    mean = rows.mean(f"{criterion.name}/statistic")
    compared = mean.to(rows.dtype)
    rejected = rows.sums[f"{criterion.name}/below"] + rows.sums[f"{criterion.name}/above"] > 0
    flags = torch.stack([compared < lower, compared > upper, rejected]).double()
    _add_rows(criterion, figures, mean, *flags.unbind())


def add_row_statistic(criterion: Criterion, x: Elements, sums: RowSums) -> None:
    """Element sums that ``judge_rows`` needs."""
    if criterion.aggregate != "seq_max":
        sums.add(criterion.name, element_statistic(criterion, x.clamped, x.excess))


def judge_rows(
    criterion: Criterion, x: Elements, rows: Rows, row_bounds: Float[Tensor, " B"] | None, figures: RowFigures
) -> Bool[Tensor, "B 1"]:
    """Which rows a criterion rejects; ``row_bounds`` are the bounds of a calibrated one."""
    if criterion.aggregate == "seq_max":  # k2 and k3 are 0, their minimum, at invalid elements
        statistic = element_statistic(criterion, x.clamped, x.excess).amax(1)
    elif criterion.aggregate == "seq_mean":
        statistic = rows.mean(criterion.name).to(rows.dtype)
    else:
        statistic = rows.sums[criterion.name].to(rows.dtype)
    lower, upper = criterion.statistic_bounds
    if criterion.calibrated and row_bounds is not None:
        upper = row_bounds.to(rows.dtype)
        lower = -upper if criterion.statistic == "k1" else torch.full_like(upper, -math.inf)
    below = statistic < lower
    above = statistic > upper
    rejected = below | above
    inside = statistic.clamp(lower, upper)  # pyright: ignore[reportCallIssue, reportArgumentType]
    statistic, inside, below, above = torch.stack([statistic, inside, below, above]).double().unbind()
    elements = rows.count * torch.stack([statistic, inside, inside.square(), below, above])
    figures.sums |= _named(criterion, ELEMENT_SUMS, elements.unbind())
    _add_rows(criterion, figures, statistic, below, above, below + above)
    return rejected[:, None]


def _add_rows(
    criterion: Criterion,
    figures: RowFigures,
    statistic: Float[Tensor, " B"],
    below: Float[Tensor, " B"],
    above: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
) -> None:
    figures.sums |= _named(criterion, ROW_SUMS, (statistic, statistic.square(), below, above, rejected))
    figures.add_range(f"{criterion.name}/row", statistic)


def _named(criterion: Criterion, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{criterion.name}/{name}": each for name, each in zip(names, values, strict=True)}


def veto_elements(log_threshold: float, x: Elements, sums: RowSums) -> None:
    """Counts valid elements of ``l < log_threshold``; here ``l`` is not clamped."""
    low, _ = x.beyond(x.log_ratio, log_threshold, math.inf)
    sums.add("veto_elements", low)


def veto_rows(rows: Rows, figures: RowFigures) -> Bool[Tensor, "B 1"]:
    """Rejects every row with such an element."""
    rejected = rows.sums["veto_elements"] > 0
    figures.sums["veto_rows"] = rejected.double()
    return rejected[:, None]


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """What a row criterion bounds, in float64: the size of the sum or mean of ``l`` for k1; else of k2 or k3."""
    log_ratio = log_ratio.double()
    statistic = element_statistic(criterion, log_ratio, torch.expm1(log_ratio))
    reductions = {"seq_sum": statistic.sum(1), "seq_mean": statistic.mean(1), "seq_max": statistic.amax(1)}
    return reductions[criterion.aggregate].abs()
