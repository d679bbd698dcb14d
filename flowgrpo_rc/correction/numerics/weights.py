"""Importance-sampling weights (SPEC section 2): ``w = r``, of each element or of a whole row, within bounds.

Every weight is carried twice, as ``w`` and as its excess ``w - 1``: near 1 the second is the more exact in float32,
near 0 the first. A new ``rollout_is_mode`` is a case of ``bound_weights``, with its entry in ``plan.WEIGHT_MODES``.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, Rows, RowSums, flags
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import SAFETY_BOUND, ImportanceSampling


class Weights(NamedTuple):
    """Importance weights of a block of rows, before batch normalisation."""

    values: Float[Tensor, "T B"]
    """0 at invalid elements."""
    outside: Float[Tensor, "*T B"]
    """Flags of where the ratio is beyond the bounds; mode ``mask`` rejects that."""


def bound_weights(
    spec: ImportanceSampling,
    ratio: Float[Tensor, "*shape"],
    excess: Float[Tensor, "*shape"],
    outside: Float[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """``w`` and ``w - 1`` of ratios ``r``, given ``r``, ``r - 1`` and flags of the ``r`` beyond the bounds."""
    if spec.mode == "zero":
        inside = 1.0 - outside
        return ratio * inside, excess * inside - outside
    if spec.mode == "mask":
        return ratio, excess
    # truncate and clip; truncation has a lower bound of 0
    return ratio.clamp(spec.lower, spec.upper), excess.clamp(spec.lower - 1.0, spec.upper - 1.0)


def element_weights(spec: ImportanceSampling, x: Elements, sums: RowSums) -> Weights:
    """``w = exp(l)`` of each element (``rollout_is=token``), and the sums behind its metrics."""
    low, high = x.beyond(x.clamped, spec.log_lower, spec.log_upper)
    outside = low + high
    weight, excess = bound_weights(spec, x.clamped.exp(), x.excess, outside)
    weight = x.zero_invalid(weight)
    excess = x.zero_invalid(excess)
    sums.add("is_low", low)
    sums.add("is_high", high)
    sums.add("is_weight", weight)
    sums.add("is_weight_squared", weight * weight)
    sums.add("is_excess", excess)
    sums.add("is_excess_squared", excess * excess)
    return Weights(weight, outside)


def add_element_weight_figures(spec: ImportanceSampling, rows: Rows, figures: RowFigures) -> None:
    """Figures of the rows of ``element_weights``: a row's weight is the mean of its elements'."""
    mean = rows.mean("is_weight")
    raw_excess = rows.mean("excess")
    weight = torch.where(mean < 0.5, mean, 1.0 + rows.mean("is_excess"))
    low = flags(torch.lt, raw_excess, spec.reported_lower - 1.0)
    high = flags(torch.gt, raw_excess, spec.upper - 1.0)
    figures.add(("is_weight", "is_excess", "is_low", "is_high"), torch.stack([weight, weight - 1.0, low, high]))


def row_weights(spec: ImportanceSampling, x: Elements, rows: Rows, figures: RowFigures) -> Weights:
    """``w = exp(sum of l)`` ("sequence") or ``exp(mean of l)`` ("geometric") at each element of a row; adds figures."""
    log_ratio = rows.sum("log_ratio") if spec.level == "sequence" else rows.mean("log_ratio")
    # decided in the compute dtype, to which the bounds are rounded
    log_ratio = log_ratio.to(x.log_ratio.dtype).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    low = flags(torch.lt, log_ratio, spec.log_lower).double()
    high = flags(torch.gt, log_ratio, spec.log_upper).double()
    outside = low + high
    log_ratio = log_ratio.double()
    ratio = log_ratio.exp()
    weight, excess = bound_weights(spec, ratio, torch.expm1(log_ratio), outside)
    names = ("is_weight", "is_excess", "is_ratio", "is_low", "is_high")
    figures.add(names, torch.stack([weight, excess, ratio, low, high]))
    values = weight.to(x.log_ratio.dtype).expand_as(x.log_ratio)
    return Weights(x.zero_invalid(values), outside)


def batch_divisor(weight: float, excess: float, count: float) -> float:
    """What batch normalisation divides by: the mean weight, from sums of ``w``, ``w - 1`` and 1; 1 where it is tiny."""
    mean = weight / max(count, 1.0)
    if mean >= 0.5:
        mean = 1.0 + excess / count
    return mean if mean > 1e-8 else 1.0
