"""Importance-sampling weights (SPEC section 2): ``w = r``, of each element or of a whole row, within bounds.

Every weight is carried twice, as ``w`` and as its excess ``w - 1``: near 1 the second is the more exact in float32,
near 0 the first. A new ``rollout_is_mode`` is a case of ``bound_weights``, with its entry in ``plan.WEIGHT_MODES``.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, Rows, RowSums
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import SAFETY_BOUND, ImportanceSampling

Sum = TypeVar("Sum", float, Tensor)


class Weights(NamedTuple):
    """Importance weights of a block of rows, before batch normalisation."""

    values: Float[Tensor, "B T"]
    """0 at invalid elements."""
    outside: Bool[Tensor, "B #T"]
    """Where the ratio is beyond the bounds; mode ``mask`` rejects that."""


def bound_weights(
    spec: ImportanceSampling,
    ratio: Float[Tensor, "*shape"],
    excess: Float[Tensor, "*shape"],
    outside: Bool[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """``w`` and ``w - 1`` of ratios ``r``, given ``r``, ``r - 1`` and whether ``r`` is beyond the bounds."""
    if spec.mode == "zero":
        return ratio.masked_fill(outside, 0.0), excess.masked_fill(outside, -1.0)
    if spec.mode == "mask":
        return ratio, excess
    # truncate and clip; truncation has a lower bound of 0
    return ratio.clamp(spec.lower, spec.upper), excess.clamp(spec.lower - 1.0, spec.upper - 1.0)


def element_weights(spec: ImportanceSampling, x: Elements, sums: RowSums) -> Weights:
    """``w = exp(l)`` of each element (``rollout_is=token``), and the sums behind its metrics."""
    low, high = x.beyond(x.clamped, spec.log_lower, spec.log_upper)
    outside = low | high
    weight, excess = bound_weights(spec, x.clamped.exp(), x.excess, outside)
    weight = x.zero_invalid(weight)
    excess = x.zero_invalid(excess)
    sums.add("is_low", low)
    sums.add("is_high", high)
    sums.add("is_weight", weight)
    sums.add("is_weight_squared", weight.square())
    sums.add("is_excess", excess)
    sums.add("is_excess_squared", excess.square())
    return Weights(weight, outside)


def element_weight_figures(
    spec: ImportanceSampling, x: Elements, rows: Rows, weights: Weights, figures: RowFigures
) -> None:
    """Adds the figures of ``element_weights``: a row's weight is the mean of its elements'."""
    mean, excess, raw_excess = rows.mean("is_weight"), rows.mean("is_excess"), rows.mean("excess")
    small = mean < 0.5
    _add_row_weight(figures, torch.where(small, mean, 1.0 + excess), torch.where(small, mean - 1.0, excess))
    figures.sums |= {
        "is_raw": rows.count + rows.sums["excess"],
        "is_row_low": (raw_excess < spec.reported_lower - 1.0).double(),
        "is_row_high": (raw_excess > spec.upper - 1.0).double(),
    }
    figures.add_range("is_weight", *x.extremes(weights.values))


def row_weights(spec: ImportanceSampling, x: Elements, rows: Rows, figures: RowFigures) -> Weights:
    """``w = exp(sum of l)`` ("sequence") or ``exp(mean of l)`` ("geometric") at each element of a row; adds figures."""
    log_ratio = rows.sums["log_ratio"] if spec.level == "sequence" else rows.mean("log_ratio")
    # decided in the compute dtype, as the bounds are rounded to it
    log_ratio = log_ratio.to(rows.dtype).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    low = log_ratio < spec.log_lower
    high = log_ratio > spec.log_upper
    outside = low | high
    log_ratio = log_ratio.double()
    ratio = log_ratio.exp()
    weight, excess = bound_weights(spec, ratio, torch.expm1(log_ratio), outside)
    _add_row_weight(figures, weight, excess)
    figures.sums |= {
        "is_row_low": low.double(),
        "is_row_high": high.double(),
        "is_raw": rows.count * ratio,
        "is_low": rows.count * low,
        "is_high": rows.count * high,
        "is_weight": rows.count * weight,
        "is_weight_squared": rows.count * weight.square(),
        "is_excess": rows.count * excess,
        "is_excess_squared": rows.count * excess.square(),
    }
    figures.add_range("is_weight", ratio)
    values = weight.to(rows.dtype)[:, None].expand_as(x.log_ratio)
    return Weights(x.zero_invalid(values), outside[:, None])


def _add_row_weight(figures: RowFigures, weight: Float[Tensor, " B"], excess: Float[Tensor, " B"]) -> None:
    figures.sums |= {
        "is_row_weight": weight,
        "is_row_weight_squared": weight.square(),
        "is_row_excess": excess,
        "is_row_excess_squared": excess.square(),
    }
    figures.add_range("is_row_weight", weight)
    figures.add_range("is_row_excess", excess)


def divisor_sums(spec: ImportanceSampling, sums: Mapping[str, Sum]) -> tuple[Sum, Sum, Sum]:
    """Sums of ``w``, of ``w - 1`` and of 1: over elements ("token"), else over rows."""
    if spec.level == "token":
        return sums["is_weight"], sums["is_excess"], sums["elements"]
    return sums["is_row_weight"], sums["is_row_excess"], sums["rows"]


def batch_divisor(weight: float, excess: float, count: float) -> float:
    """What batch normalisation divides by: the mean weight, from sums of ``w``, ``w - 1`` and 1; 1 where it is tiny."""
    mean = weight / max(count, 1.0)
    if mean >= 0.5:
        mean = 1.0 + excess / count
    return mean if mean > 1e-8 else 1.0
