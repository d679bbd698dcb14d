"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or whole rows, and the veto."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, extremes, row_counts, row_sums
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import Criterion


ELEMENT_SUMS = ("statistic", "inside", "inside_squared", "below", "above")
"""The statistic, as it is and clamped to the bounds, and whether it is beyond them; of a row once for each element."""
ROW_SUMS = ("row", "row_squared", "row_below", "row_above", "row_rejected")
"""The statistic of whole rows: of an element criterion the mean, which may be inside where an element is not."""


class Rejection(NamedTuple):
    """What one criterion rejects."""

    rejected: Bool[Tensor, "B #T"]
    figures: RowFigures


def element_statistic(
    criterion: Criterion, log_ratio: Float[Tensor, "*shape"], excess: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """``k1 = -l``, ``k2 = l^2 / 2`` or ``k3 = r - 1 - l``, from ``l`` and ``r - 1``."""
    if criterion.statistic == "k1":
        return -log_ratio
    if criterion.statistic == "k2":
        return log_ratio.square() / 2
    return excess - log_ratio


def judge(criterion: Criterion, x: Elements, row_bounds: Float[Tensor, " B"] | None) -> Rejection:
    """What a criterion rejects; ``row_bounds`` are the bounds of a calibrated one."""
    statistic = element_statistic(criterion, x.clamped, x.excess)
    if criterion.aggregate == "token":
        return _judge_elements(criterion, x, statistic)
    return _judge_rows(criterion, x, statistic, row_bounds)


def _judge_elements(criterion: Criterion, x: Elements, statistic: Float[Tensor, "B T"]) -> Rejection:
    lower, upper = criterion.statistic_bounds
    below = x.zero_invalid(statistic < lower)
    above = x.zero_invalid(statistic > upper)
    rejected = below | above
    inside = x.zero_invalid(statistic.clamp(lower, upper))
    total, inside_sum, inside_squared = row_sums(statistic, inside, inside.square()).unbind()
    below_count, above_count = row_counts(below, above).unbind()
    mean = x.row_mean(total)
    compared = mean.to(statistic.dtype)
    elements = [total, inside_sum, inside_squared, below_count, above_count]
    rows = [mean, mean.square(), (compared < lower) & x.nonempty, (compared > upper) & x.nonempty, rejected.any(1)]
    figures = _figures(criterion, x, elements, rows)
    figures.add_extremes(f"{criterion.name}/element", _element_extremes(criterion, x, statistic))
    return Rejection(rejected, figures)


def _element_extremes(
    criterion: Criterion, x: Elements, statistic: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Smallest and largest statistic of a valid element."""
    if criterion.statistic == "k1":
        return extremes(statistic, x.valid)
    # k2 and k3 are convex with their minimum at 0, so the largest is that of an extreme l, exact in float64
    ends = torch.stack(extremes(x.clamped, x.valid))
    return extremes(statistic, x.valid)[0], element_statistic(criterion, ends, torch.expm1(ends)).amax()


def _judge_rows(
    criterion: Criterion, x: Elements, statistic: Float[Tensor, "B T"], row_bounds: Float[Tensor, " B"] | None
) -> Rejection:
    if criterion.aggregate == "seq_max":
        of_row = statistic.amax(1)  # k2 and k3 are 0, their minimum, at invalid elements
    else:
        of_row = statistic.sum(1)
    if criterion.aggregate == "seq_mean":
        of_row = x.row_mean(of_row).to(of_row.dtype)
    lower, upper = criterion.statistic_bounds
    if criterion.calibrated and row_bounds is not None:
        upper = row_bounds.to(of_row.dtype)
        lower = -upper if criterion.statistic == "k1" else torch.full_like(upper, -math.inf)
    below = (of_row < lower) & x.nonempty
    above = (of_row > upper) & x.nonempty
    rejected = below | above
    inside = of_row.clamp(lower, upper).double()  # pyright: ignore[reportCallIssue, reportArgumentType]
    of_row = of_row.double()
    elements = [x.count * each for each in (of_row, inside, inside.square(), below, above)]
    rows = [of_row, of_row.square(), below, above, rejected]
    return Rejection(rejected[:, None], _figures(criterion, x, elements, rows))


def _figures(criterion: Criterion, x: Elements, elements: list[Tensor], rows: list[Tensor]) -> RowFigures:
    """What every criterion reports: sums over elements (``ELEMENT_SUMS``) and over rows (``ROW_SUMS``), row extremes."""
    names = [f"{criterion.name}/{name}" for name in (*ELEMENT_SUMS, *ROW_SUMS)]
    figures = RowFigures(dict(zip(names, [each.double() for each in (*elements, *rows)], strict=True)))
    figures.add_extremes(f"{criterion.name}/row", extremes(rows[0], x.nonempty))
    return figures


def veto(log_threshold: float, x: Elements) -> Rejection:
    """Rejects every row with a valid element of ``l < log_threshold``; here ``l`` is not clamped."""
    low = x.zero_invalid(x.log_ratio < log_threshold)
    rejected = low.any(1)
    figures = RowFigures({"veto_elements": low.sum(1).double(), "veto_rows": rejected.double()})
    return Rejection(rejected[:, None], figures)


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """What a row criterion bounds, in float64: the size of the sum or mean of ``l`` for k1; else of k2 or k3."""
    log_ratio = log_ratio.double()
    statistic = element_statistic(criterion, log_ratio, torch.expm1(log_ratio))
    reductions = {"seq_sum": statistic.sum(1), "seq_mean": statistic.mean(1), "seq_max": statistic.amax(1)}
    return reductions[criterion.aggregate].abs()
