"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or of whole rows, and the veto.

``k1 = -l``, ``k2 = l^2 / 2``, ``k3 = r - 1 - l``, all of the clamped ``l``. A k1 criterion bounds the ratio, so its
quantity here is ``l`` itself; the metrics report ``-l``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.weights import LogRatios, row_mean, row_sum
from flowgrpo_rc.correction.plan import CorrectionPlan, Criterion

QUANTITIES: dict[str, Callable[[LogRatios], Tensor]] = {
    "k1": lambda x: x.clamped,
    "k2": lambda x: x.clamped * x.clamped / 2,
    "k3": lambda x: x.k3,
}
"""The quantity of each element that a criterion bounds."""
AGGREGATES: dict[str, Callable[[Tensor, LogRatios], Tensor]] = {
    "token": lambda values, x: values,
    "seq_sum": lambda values, x: row_sum(values),
    "seq_mean": lambda values, x: row_mean(values, x.sizes),
    # k2 and k3 are never negative, so that the 0 of an invalid element is no maximum.
    "seq_max": lambda values, x: values.amax(1).double(),
}
"""From the quantity of elements to the number that is held against the bounds."""


class Verdict(NamedTuple):
    """One criterion's numbers: of elements ``(B, T)``, or of rows ``(B,)`` in float64."""

    criterion: Criterion
    values: Float[Tensor, "B ..."]
    """The aggregated quantity."""
    lower: float | Float[Tensor, " B"]
    upper: float | Float[Tensor, " B"]
    low: Bool[Tensor, "B ..."]
    """Below the bounds; False where nothing is valid."""
    high: Bool[Tensor, "B ..."]
    """Above the bounds; False where nothing is valid."""


class Rejection(NamedTuple):
    """The mask of elements that pass everything, and the verdicts that it was made from."""

    keep: Bool[Tensor, "B T"]
    verdicts: list[Verdict]
    vetoed: Bool[Tensor, "B T"] | None
    """Elements with a ratio below the veto's threshold; None without a veto."""


def rejection_mask(x: LogRatios, plan: CorrectionPlan, row_bounds: Float[Tensor, " B"] | None = None) -> Rejection:
    """Keeps what every criterion keeps; a row with one ``l`` below ``plan.log_veto`` is rejected whole.

    Args:
        row_bounds: the bounds of a calibrated criterion, which stands alone, in place of its own.
    """
    verdicts = [judge(x, criterion, row_bounds) for criterion in plan.criteria]
    # Every criterion judges all elements, so that its metrics do not depend on the order of the others.
    keep = x.valid
    for verdict in verdicts:
        keep = keep & ~by_element(verdict.low | verdict.high)
    vetoed = None
    if plan.log_veto is not None:
        # Not clamped, since a threshold may lie beyond the safety bound.
        vetoed = (x.log_ratio < plan.log_veto) & x.valid
        keep = keep & ~vetoed.any(1, keepdim=True)
    return Rejection(keep, verdicts, vetoed)


def judge(x: LogRatios, criterion: Criterion, row_bounds: Float[Tensor, " B"] | None = None) -> Verdict:
    """Holds the log ratios against one criterion; bounds are inclusive."""
    values = AGGREGATES[criterion.aggregate](QUANTITIES[criterion.statistic](x), x)
    # Compared in the compute dtype, to which the bounds are rounded.
    compared = values.to(x.log_ratio.dtype)
    lower = criterion.lower
    upper = criterion.upper
    if row_bounds is not None:
        upper = row_bounds.to(compared.dtype)
        lower = -upper
    # Elements and rows without a valid log ratio hold 0, which a band may exclude.
    judged = x.valid if values.dim() == 2 else x.sizes > 0
    return Verdict(criterion, values, lower, upper, (compared < lower) & judged, (compared > upper) & judged)


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """Size of the number that a row criterion bounds, in float64: of the aggregated ``l`` for k1, else of k2 or k3."""
    log_ratio = log_ratio.double()
    return judge(LogRatios(log_ratio, torch.zeros_like(log_ratio)), criterion).values.abs()


def by_element(flags: Bool[Tensor, "B ..."]) -> Bool[Tensor, "B ..."]:
    """Flags of elements, or those of rows so that they broadcast to elements."""
    return flags if flags.dim() == 2 else flags.unsqueeze(1)
