"""Importance-sampling weights (SPEC section 2): ``w = r``, of an element or of a whole row, and its bounds.

Every weight is carried twice, as ``w`` and as ``w - 1``: near 1 the second is the more exact in float32, near 0 the
first. A new ``rollout_is_mode`` is a case of ``bound_weights``, with its entry in ``plan.WEIGHT_MODES``.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, extremes, row_counts, row_sums
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import SAFETY_BOUND, ImportanceSampling


class Weights(NamedTuple):
    """Importance weights of a block of rows, before batch normalisation."""

    values: Float[Tensor, "B T"]
    """0 at invalid elements."""
    outside: Bool[Tensor, "B #T"]
    """Ratios beyond the bounds; mode ``mask`` rejects them."""
    figures: RowFigures


class BoundedWeight(NamedTuple):
    """``w`` and ``w - 1`` after the bounds."""

    weight: Float[Tensor, "*shape"]
    excess: Float[Tensor, "*shape"]


def bound_weights(
    spec: ImportanceSampling,
    ratio: Float[Tensor, "*shape"],
    excess: Float[Tensor, "*shape"],
    outside: Bool[Tensor, "*shape"],
) -> BoundedWeight:
    """Weights of ratios ``r``, of which ``r - 1`` and whether they are beyond the bounds are given too."""
    if spec.mode == "zero":
        return BoundedWeight(ratio.masked_fill(outside, 0.0), excess.masked_fill(outside, -1.0))
    if spec.mode == "mask":
        return BoundedWeight(ratio, excess)
    # truncate and clip; the lower bound of truncation is 0
    return BoundedWeight(ratio.clamp(spec.lower, spec.upper), excess.clamp(spec.lower - 1.0, spec.upper - 1.0))


def importance_weights(spec: ImportanceSampling, x: Elements, rows: Shaped[Tensor, " B"] | None) -> Weights:
    """Weights at the level of ``spec``; ``rows`` are those that count in averages over rows (``None``: all)."""
    return _element_weights(spec, x, rows) if spec.level == "token" else _row_weights(spec, x, rows)


def _element_weights(spec: ImportanceSampling, x: Elements, rows: Shaped[Tensor, " B"] | None) -> Weights:
    """``w = exp(l)`` of each element."""
    high = x.zero_invalid(x.clamped > spec.log_upper)
    low = x.zero_invalid(x.clamped < spec.log_lower)
    outside = high | low
    bounded = bound_weights(spec, x.clamped.exp(), x.excess, outside)
    weight = x.zero_invalid(bounded.weight)
    excess = x.zero_invalid(bounded.excess)
    sums = row_sums(weight, weight.square(), excess, excess.square(), x.excess)
    high_count, low_count = row_counts(high, low).unbind()
    mean_weight, _, mean_excess, _, mean_raw_excess = x.row_mean(sums).unbind()
    small = mean_weight < 0.5
    # a row without a valid element weighs nothing
    raw_excess = torch.where(x.nonempty, mean_raw_excess, -1.0)
    figures = _weight_figures(
        sums[:4],
        BoundedWeight(
            torch.where(small, mean_weight, 1.0 + mean_excess), torch.where(small, mean_weight - 1.0, mean_excess)
        ),
        rows,
    )
    figures.sums |= {
        "is_raw_weight": sums[4] + x.count,
        "is_elements_high": high_count,
        "is_elements_low": low_count,
        "is_rows_high": (raw_excess > spec.upper - 1.0).double(),
        "is_rows_low": (raw_excess < spec.reported_lower - 1.0).double(),
    }
    figures.add_extremes("is_weight", extremes(weight, x.valid))
    return Weights(weight, outside, figures)


def _row_weights(spec: ImportanceSampling, x: Elements, rows: Shaped[Tensor, " B"] | None) -> Weights:
    """``w = exp(sum of l)`` ("sequence") or ``exp(mean of l)`` ("geometric") at each element of a row."""
    log_ratio = x.log_ratio.sum(1)
    if spec.level == "geometric":
        log_ratio = x.row_mean(log_ratio).to(log_ratio.dtype)
    log_ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    high, low = log_ratio > spec.log_upper, log_ratio < spec.log_lower
    outside = high | low
    exact = log_ratio.double()
    ratio = exact.exp()
    weight, excess = bound_weights(spec, ratio, torch.expm1(exact), outside)
    # a row without a valid element weighs nothing
    weight = torch.where(x.nonempty, weight, 0.0)
    excess = torch.where(x.nonempty, excess, -1.0)
    sums = x.count * torch.stack([weight, weight.square(), excess, excess.square()])
    figures = _weight_figures(sums, BoundedWeight(weight, excess), rows)
    figures.sums |= {
        "is_raw_weight": x.count * ratio,
        "is_elements_high": x.count * high,
        "is_elements_low": x.count * low,
        "is_ratios_high": high.double(),
        "is_ratios_low": low.double(),
        "is_rows_high": (high & x.nonempty).double(),
        "is_rows_low": (low | ~x.nonempty).double(),
    }
    figures.add_extremes("is_weight", extremes(ratio, rows))
    values = x.zero_invalid(weight[:, None].to(x.log_ratio.dtype).expand_as(x.log_ratio))
    return Weights(values, outside[:, None], figures)


def _weight_figures(
    element_sums: Float[Tensor, "4 B"], row: BoundedWeight, rows: Shaped[Tensor, " B"] | None
) -> RowFigures:
    """What both levels report: sums over elements of ``w, w^2, w - 1, (w - 1)^2``, and the same of row weights."""
    weight, weight_squared, excess, excess_squared = element_sums.unbind()
    figures = RowFigures(
        {
            "is_weight": weight,
            "is_weight_squared": weight_squared,
            "is_excess": excess,
            "is_excess_squared": excess_squared,
            "is_row_weight": row.weight,
            "is_row_weight_squared": row.weight.square(),
            "is_row_excess": row.excess,
            "is_row_excess_squared": row.excess.square(),
        }
    )
    figures.add_extremes("is_row_weight", extremes(row.weight, rows))
    figures.add_extremes("is_row_excess", extremes(row.excess, rows))
    return figures


Sum = TypeVar("Sum", float, Tensor)


def divisor_sums(spec: ImportanceSampling, sums: Mapping[str, Sum]) -> tuple[Sum, Sum, Sum]:
    """Sums of ``w``, of ``w - 1`` and of what is counted: of elements ("token"), else of rows with a valid element."""
    if spec.level == "token":
        return sums["is_weight"], sums["is_excess"], sums["elements"]
    weight, rows = sums["is_row_weight"], sums["nonempty_rows"]
    return weight, weight - rows, rows


def batch_divisor(weight: float, excess: float, count: float) -> float:
    """What batch normalisation divides by: the mean weight, from sums of ``w`` and ``w - 1``; 1 where it is about 0."""
    mean = weight / max(count, 1.0)
    if mean >= 0.5:
        mean = 1.0 + excess / count
    return mean if mean > 1e-8 else 1.0
