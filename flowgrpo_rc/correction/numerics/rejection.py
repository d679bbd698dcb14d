"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or of whole rows, and the veto.

Element criteria decide before the sums along rows are taken, row criteria after; both report the same figures.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, Rows, RowSums, flags
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import Criterion


def judge_elements(criterion: Criterion, x: Elements, sums: RowSums, figures: RowFigures) -> Float[Tensor, "T B"]:
    """Flags of what an element criterion rejects; adds the sums and extremes behind its figures."""
    name = criterion.name
    lower, upper = criterion.statistic_bounds
    statistic = _statistic(criterion, x)
    below, above = x.beyond(statistic, lower, upper)
    inside = x.zero_invalid(statistic.clamp(lower, upper))
    sums.add(f"{name}/statistic", statistic)
    sums.add(f"{name}/inside", inside)
    sums.add(f"{name}/inside_squared", inside * inside)
    sums.add(f"{name}/below", below)
    sums.add(f"{name}/above", above)
    if criterion.statistic != "k1":  # whose extremes are those of the log ratio
        figures.add((f"{name}/smallest", f"{name}/largest"), x.extremes(statistic))
    return below + above


def _statistic(criterion: Criterion, x: Elements) -> Float[Tensor, "T B"]:
    """``k1 = -l``, ``k2 = l^2 / 2`` or ``k3 = r - 1 - l`` of each element."""
    if criterion.statistic == "k1":
        return -x.clamped
    if criterion.statistic == "k2":
        return x.clamped * x.clamped / 2
    return x.k3


def add_row_sums(criteria: Sequence[Criterion], x: Elements, sums: RowSums) -> None:
    """Adds the sums behind row criteria; that of k3 is among the diagnostics."""
    needed = {c.statistic: c for c in criteria if c.aggregate in ("seq_sum", "seq_mean") and c.statistic != "k3"}
    for statistic, criterion in needed.items():
        sums.add(statistic, _statistic(criterion, x))


def judge_rows(
    criteria: Sequence[Criterion],
    x: Elements,
    rows: Rows,
    row_bounds: Float[Tensor, " B"] | None,
    figures: RowFigures,
) -> Float[Tensor, " B"]:
    """Flags of the rows that row criteria reject; adds the figures of rows of all criteria, element criteria first.

    ``row_bounds`` are the bounds of a calibrated criterion.
    """
    statistic = torch.stack([_of_row(criterion, x, rows) for criterion in criteria])
    lower, upper = _bounds(criteria, x, row_bounds)
    # decided in the compute dtype, to which the bounds are rounded
    compared = statistic.to(x.log_ratio.dtype).double()
    below = flags(torch.lt, compared, lower)
    above = flags(torch.gt, compared, upper)
    for figure, values in (
        ("statistic", statistic),
        ("inside", compared.clamp(lower, upper)),
        ("below", below),
        ("above", above),
    ):
        figures.add([f"{criterion.name}/{figure}" for criterion in criteria], values)
    of_elements = [c for c in criteria if c.aggregate == "token"]
    for c in of_elements:
        beyond = rows.sum(f"{c.name}/below") + rows.sum(f"{c.name}/above")
        figures.add((f"{c.name}/rejected",), beyond.clamp(max=1.0)[None])
    return (below + above)[len(of_elements) :].sum(0)


def _of_row(criterion: Criterion, x: Elements, rows: Rows) -> Float[Tensor, " B"]:
    """A criterion's statistic of whole rows; of an element criterion the mean."""
    if criterion.aggregate == "token":
        return rows.mean(f"{criterion.name}/statistic")
    if criterion.aggregate == "seq_max":  # k2 and k3 are 0, their minimum, at invalid elements
        return _statistic(criterion, x).amax(0).double()
    return rows.mean(criterion.statistic) if criterion.aggregate == "seq_mean" else rows.sum(criterion.statistic)


def _bounds(
    criteria: Sequence[Criterion], x: Elements, row_bounds: Float[Tensor, " B"] | None
) -> tuple[Float[Tensor, " C #B"], Float[Tensor, " C #B"]]:
    """Bounds of the row statistics, rounded to the compute dtype, so that a statistic equal to its bound is inside."""
    if row_bounds is None:
        return _constant_bounds(tuple(c.statistic_bounds for c in criteria), x.log_ratio.dtype, x.log_ratio.device)
    upper = row_bounds[None].to(x.log_ratio.dtype).double()  # a calibrated criterion stands alone
    return -upper if criteria[0].statistic == "k1" else torch.full_like(upper, -math.inf), upper


@lru_cache(maxsize=64)
def _constant_bounds(
    bounds: tuple[tuple[float, float], ...], dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, " C 1"], Float[Tensor, " C 1"]]:
    """Kept, so that later calls copy nothing to the device."""
    lower, upper = torch.tensor(bounds, dtype=dtype, device=device).double().unsqueeze(-1).unbind(1)
    return lower, upper


def veto_elements(log_threshold: float, x: Elements, sums: RowSums) -> None:
    """Counts valid elements of ``l < log_threshold``; here ``l`` is not clamped."""
    low, _ = x.beyond(x.log_ratio, log_threshold, math.inf)
    sums.add("veto", low)


def veto_rows(rows: Rows, figures: RowFigures) -> Float[Tensor, " B"]:
    """Flags of the rows with such an element, which are rejected."""
    rejected = rows.sum("veto").clamp(max=1.0)
    figures.add(("veto",), rejected[None])
    return rejected


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """What a row criterion bounds, in float64: the size of the sum or mean of ``l`` for k1; else of k2 or k3."""
    log_ratio = log_ratio.double()
    statistics = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(log_ratio) - log_ratio}
    statistic = statistics[criterion.statistic]
    reductions = {"seq_sum": statistic.sum(1), "seq_mean": statistic.mean(1), "seq_max": statistic.amax(1)}
    return reductions[criterion.aggregate].abs()
