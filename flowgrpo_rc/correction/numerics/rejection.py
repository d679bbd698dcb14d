"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or of whole rows, and the veto.

``k1 = -l``, ``k2 = l^2 / 2``, ``k3 = r - 1 - l``, all of the clamped ``l``. A k1 criterion bounds the ratio, so its
quantity here is ``l`` itself; the metrics report ``-l``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.log_ratios import clamp, excess_and_k3, row_mean, row_sum
from flowgrpo_rc.correction.plan import Criterion

QUANTITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio * log_ratio / 2,
    "k3": lambda log_ratio: excess_and_k3(log_ratio)[1],
}
"""The quantity that a criterion bounds, as a function of the clamped ``l`` of one element."""
AGGREGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, valid: values,
    "seq_sum": lambda values, valid: row_sum(values),
    "seq_mean": lambda values, valid: row_mean(values, row_sum(valid)),
    # k2 and k3 are never negative, so that the 0 of an invalid element is no maximum.
    "seq_max": lambda values, valid: values.amax(1).double(),
}
"""From the quantity and the validity of elements to the number that is held against the bounds."""


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


def rejection_mask(
    log_ratio: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    criteria: Sequence[Criterion],
    *,
    log_veto: float | None = None,
    row_bounds: Float[Tensor, " B"] | None = None,
) -> Rejection:
    """Keeps what every criterion keeps; a row with one ``l < log_veto`` (not clamped) is rejected whole.

    Args:
        row_bounds: the bounds of a calibrated criterion, which stands alone, in place of its own.
    """
    verdicts = [judge(log_ratio, valid, criterion, row_bounds) for criterion in criteria]
    keep = valid
    for verdict in verdicts:
        keep = keep & ~by_element(verdict.low | verdict.high)
    vetoed = None
    if log_veto is not None:
        # Not clamped, since a threshold may lie beyond the safety bound.
        vetoed = (log_ratio < log_veto) & valid
        keep = keep & ~vetoed.any(1, keepdim=True)
    return Rejection(keep, verdicts, vetoed)


def judge(
    log_ratio: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    criterion: Criterion,
    row_bounds: Float[Tensor, " B"] | None = None,
) -> Verdict:
    """Holds the log ratios against one criterion; bounds are inclusive."""
    values = AGGREGATES[criterion.aggregate](QUANTITIES[criterion.statistic](clamp(log_ratio)), valid)
    # Compared in the compute dtype, to which the bounds are rounded.
    compared = values.to(log_ratio.dtype)
    lower = criterion.lower
    upper = criterion.upper
    if row_bounds is not None:
        upper = row_bounds.to(log_ratio.dtype)
        lower = -upper
    # Elements and rows without a valid log ratio hold 0, which a band may exclude.
    judged = valid if values.dim() == 2 else valid.any(1)
    return Verdict(criterion, values, lower, upper, (compared < lower) & judged, (compared > upper) & judged)


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """Size of the number that a row criterion bounds, in float64: of the aggregated ``l`` for k1, else of k2 or k3."""
    log_ratio = log_ratio.double()
    return judge(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool), criterion).values.abs()


def by_element(flags: Bool[Tensor, "B ..."]) -> Bool[Tensor, "B ..."]:
    """Flags of elements, or those of rows so that they broadcast to elements."""
    return flags if flags.dim() == 2 else flags.unsqueeze(1)
