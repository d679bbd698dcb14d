"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or of whole rows, and the veto.

Element criteria decide before the sums along rows are taken, row criteria after; both report the same figures.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, Rows, RowSums
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import Criterion

ELEMENT_SUMS = ("statistic", "inside", "inside_squared", "below", "above")
"""The statistic, as it is and clamped to its bounds, and whether it is beyond them; a row's once for each element."""
ROW_SUMS = ("row", "row_squared", "row_below", "row_above")
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


def judge_elements(criterion: Criterion, x: Elements, sums: RowSums, figures: RowFigures) -> Bool[Tensor, "T B"]:
    """What an element criterion rejects; adds the sums behind its figures."""
    lower, upper = criterion.statistic_bounds
    statistic = element_statistic(criterion, x.clamped, x.excess)
    below, above = x.beyond(statistic, lower, upper)
    inside = x.zero_invalid(statistic.clamp(lower, upper))
    elements = (statistic, inside, inside.square(), below, above)
    for name, values in zip(ELEMENT_SUMS, elements, strict=True):
        sums.add(f"{criterion.name}/{name}", values)
    if criterion.statistic != "k1":  # its extremes, and the largest k2 and k3, are those of an extreme l
        smallest, largest = x.extremes(statistic)
        figures.add_ranges((f"{criterion.name}/element",), smallest[None], largest[None])
    return below | above


def add_row_sums(criteria: Sequence[Criterion], x: Elements, sums: RowSums) -> None:
    """Adds the sums behind row criteria; that of k3 is among the diagnostics."""
    needed = {c.statistic for c in criteria if c.aggregate in ("seq_sum", "seq_mean")}
    if "k1" in needed:
        sums.add("k1", -x.clamped)
    if "k2" in needed:
        sums.add("k2", x.clamped.square() / 2)


def judge_rows(
    criteria: Sequence[Criterion],
    x: Elements,
    rows: Rows,
    row_bounds: Float[Tensor, " B"] | None,
    figures: RowFigures,
) -> Bool[Tensor, " B"]:
    """Which rows the row criteria reject; adds the figures of rows of all criteria, element criteria first.

    ``row_bounds`` are the bounds of a calibrated criterion.
    """
    statistic = torch.stack([_of_row(criterion, x, rows) for criterion in criteria])
    lower, upper = _bounds(criteria, x, row_bounds)
    compared = statistic.to(lower.dtype)
    below = compared < lower
    above = compared > upper
    inside = compared.clamp(lower, upper).double()
    flags = torch.stack([below, above]).double()
    figures.add(_names(criteria, ("row",)), statistic)
    figures.add(_names(criteria, ("row_squared",)), statistic.square())
    figures.add(_names(criteria, ("row_below", "row_above")), flags.flatten(0, 1))
    figures.add_ranges(_names(criteria, ("row",)), statistic)
    first = sum(c.aggregate == "token" for c in criteria)
    for c in criteria[:first]:
        beyond = rows.sums[f"{c.name}/below"] + rows.sums[f"{c.name}/above"]
        figures.add((f"{c.name}/row_rejected",), (beyond > 0).double()[None])
    each = torch.cat([torch.stack([statistic, inside, inside.square()]), flags])[:, first:]
    figures.add(_names(criteria[first:], ELEMENT_SUMS), (rows.sums["elements"] * each).flatten(0, 1))
    return (below | above)[first:].any(0)


def _of_row(criterion: Criterion, x: Elements, rows: Rows) -> Float[Tensor, " B"]:
    """A criterion's statistic of whole rows; of an element criterion the mean."""
    if criterion.aggregate == "token":
        return rows.means[f"{criterion.name}/statistic"]
    if criterion.aggregate == "seq_max":  # k2 and k3 are 0, their minimum, at invalid elements
        return element_statistic(criterion, x.clamped, x.excess).amax(0).double()
    return (rows.means if criterion.aggregate == "seq_mean" else rows.sums)[criterion.statistic]


def _names(criteria: Sequence[Criterion], figures: Sequence[str]) -> list[str]:
    return [f"{criterion.name}/{figure}" for figure in figures for criterion in criteria]


def _bounds(
    criteria: Sequence[Criterion], x: Elements, row_bounds: Float[Tensor, " B"] | None
) -> tuple[Float[Tensor, "C #B"], Float[Tensor, "C #B"]]:
    """Bounds of the row statistics, rounded to the compute dtype, so that a statistic equal to its bound is inside."""
    if row_bounds is None:
        return _constant_bounds(tuple(c.statistic_bounds for c in criteria), x.log_ratio.dtype, x.log_ratio.device)
    upper = row_bounds[None].to(x.log_ratio.dtype)  # a calibrated criterion stands alone
    return -upper if criteria[0].statistic == "k1" else torch.full_like(upper, -math.inf), upper


@lru_cache(maxsize=64)
def _constant_bounds(
    bounds: tuple[tuple[float, float], ...], dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "C 1"], Float[Tensor, "C 1"]]:
    """Kept, so that later calls copy nothing to the device."""
    lower, upper = torch.tensor(bounds, dtype=dtype, device=device).unsqueeze(-1).unbind(1)
    return lower, upper


def veto_elements(log_threshold: float, x: Elements, sums: RowSums) -> None:
    """Counts valid elements of ``l < log_threshold``; here ``l`` is not clamped."""
    low, _ = x.beyond(x.log_ratio, log_threshold, math.inf)
    sums.add("veto_elements", low)


def veto_rows(rows: Rows, figures: RowFigures) -> Bool[Tensor, " B"]:
    """Rejects every row with such an element."""
    rejected = rows.sums["veto_elements"] > 0
    figures.add(("veto_rows",), rejected.double()[None])
    return rejected


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """What a row criterion bounds, in float64: the size of the sum or mean of ``l`` for k1; else of k2 or k3."""
    log_ratio = log_ratio.double()
    statistic = element_statistic(criterion, log_ratio, torch.expm1(log_ratio))
    reductions = {"seq_sum": statistic.sum(1), "seq_mean": statistic.mean(1), "seq_max": statistic.amax(1)}
    return reductions[criterion.aggregate].abs()
