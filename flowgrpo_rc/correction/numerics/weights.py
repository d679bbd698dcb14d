"""Importance-sampling weights (SPEC section 2): ``w = r``, of each element or of a whole row, within bounds.

Every weight is carried twice, as ``w`` and as its excess ``w - 1``: near 1 the second is the more exact in float32,
near 0 the first; ``metrics`` chooses. A new ``rollout_is_mode`` is a case of ``bound_weights``, with its entry in
``plan.WEIGHT_MODES``.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, flags
from flowgrpo_rc.correction.numerics.figures import Figures
from flowgrpo_rc.correction.plan import SAFETY_BOUND, ImportanceSampling


def bound_weights(
    spec: ImportanceSampling,
    ratio: Float[Tensor, "*shape"],
    excess: Float[Tensor, "*shape"],
    low: Float[Tensor, "*shape"],
    high: Float[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """``w`` and ``w - 1`` of ratios ``r``, given ``r``, ``r - 1`` and flags of the ``r`` below and above the bounds."""
    if spec.mode == "zero":
        outside = low + high
        inside = 1.0 - outside
        return ratio * inside, excess * inside - outside
    if spec.mode == "mask":
        return ratio, excess
    # truncate and clip; truncation has a lower bound of 0
    return ratio.clamp(spec.lower, spec.upper), excess.clamp(spec.lower - 1.0, spec.upper - 1.0)


class Weights(NamedTuple):
    """Importance weights of elements or of rows, and flags of the ratios below and above the bounds."""

    values: Float[Tensor, "*T B"]
    low: Float[Tensor, "*T B"]
    high: Float[Tensor, "*T B"]


def weigh_elements(spec: ImportanceSampling, x: Elements, figures: Figures) -> Weights:
    """``w = exp(l)`` of each element (``rollout_is=token``)."""
    low = x.zero_invalid(flags(torch.lt, x.clamped, spec.log_lower))
    high = x.zero_invalid(flags(torch.gt, x.clamped, spec.log_upper))
    weight, excess = bound_weights(spec, x.clamped.exp(), x.excess, low, high)
    weight = x.zero_invalid(weight)
    excess = x.zero_invalid(excess)
    figures.add("is/low", low)
    figures.add("is/high", high)
    figures.add("is/weight", weight)
    figures.add("is/weight_squared", weight * weight)
    figures.add("is/excess", excess)
    figures.add("is/excess_squared", excess * excess)
    return Weights(weight, low, high)


def average_weights(spec: ImportanceSampling, figures: Figures) -> None:
    """The figures of rows whose elements have weights: the row's is their mean."""
    excess = figures.mean("excess")
    low = flags(torch.lt, excess, spec.reported_lower - 1.0)
    high = flags(torch.gt, excess, spec.upper - 1.0)
    _add_rows(Weights(figures.mean("is/weight"), low, high), figures.mean("is/excess"), figures)


def weigh_rows(spec: ImportanceSampling, x: Elements, figures: Figures) -> Weights:
    """``w = exp(sum of l)`` ("sequence") or ``exp(mean of l)`` ("geometric") of each row."""
    log_ratio = figures.sum("log_ratio") if spec.level == "sequence" else figures.mean("log_ratio")
    # decided in the compute dtype, to which the bounds are rounded
    log_ratio = log_ratio.to(x.valid.dtype).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    low = flags(torch.lt, log_ratio, spec.log_lower)
    high = flags(torch.gt, log_ratio, spec.log_upper)
    log_ratio = log_ratio.double()
    ratio = log_ratio.exp()
    weight, excess = bound_weights(spec, ratio, torch.expm1(log_ratio), low, high)
    figures.add_rows(("rows/is/ratio",), ratio[None])
    _add_rows(Weights(weight, low, high), excess, figures)
    return Weights(weight, low, high)


def _add_rows(weights: Weights, excess: Float[Tensor, " B"], figures: Figures) -> None:
    """Figures of the weights of rows, at every level."""
    both = torch.stack([weights.values, excess])
    figures.add_rows(("rows/is/weight", "rows/is/excess"), both)
    figures.add_rows(("rows/is/weight_squared", "rows/is/excess_squared"), both * both)
    figures.add_rows(("rows/is/low", "rows/is/high"), torch.stack([weights.low, weights.high]))


def weight_sums(spec: ImportanceSampling, elements: dict[str, Any], rows: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Sums of ``w``, ``w - 1`` and 1 of what batch normalisation averages over: elements ("token"), else rows."""
    if spec.level == "token":
        return elements["is/weight"], elements["is/excess"], elements["elements"]
    return rows["rows/is/weight"], rows["rows/is/excess"], rows["elements"]


def batch_divisor(weight: float, excess: float, count: float) -> float:
    """What batch normalisation divides by: the mean weight, from sums of ``w``, ``w - 1`` and 1; 1 where it is tiny."""
    mean = weight / max(count, 1.0)
    if mean >= 0.5:
        mean = 1.0 + excess / count
    return mean if mean > 1e-8 else 1.0
