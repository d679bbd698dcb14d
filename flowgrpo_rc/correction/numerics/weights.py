"""Importance weights (SPEC section 2): ``w = bound(r)`` of each element, or of a whole row.

``bound`` belongs to the ``rollout_is_mode``; ``plan.WEIGHT_MODES`` has it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.log_ratios import LogRatios, clamp, excess, row_mean, row_sum
from flowgrpo_rc.correction.plan import ImportanceSampling


class ImportanceWeights(NamedTuple):
    """Weights of the units that have one: elements ``(B, T)`` for level ``token``, else rows ``(B,)`` in float64.

    A weight is kept as ``w`` and as ``w - 1``: near 1 the second is the more exact, near 0 the first.
    """

    weight: Float[Tensor, "B ..."]
    """``w``, within its bounds; 0 where nothing is valid."""
    excess: Float[Tensor, "B ..."]
    """``w - 1``; at invalid elements 0."""
    ratio: Float[Tensor, "B ..."]
    """``r``, before the bounds."""
    ratio_excess: Float[Tensor, "B ..."]
    """``r - 1``."""
    low: Bool[Tensor, "B ..."]
    """``r`` is below the bounds."""
    high: Bool[Tensor, "B ..."]
    """``r`` is above the bounds."""

    def applied(self, x: LogRatios) -> Float[Tensor, "B T"]:
        """The weight of each element in the compute dtype, 0 where invalid."""
        if self.weight.dim() == 2:
            return self.weight
        # Multiplied by the mask, as weights of rows are finite.
        return self.weight.to(x.log_ratio.dtype).unsqueeze(1) * x.valid


def importance_weights(
    log_ratio: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], spec: ImportanceSampling
) -> ImportanceWeights:
    """Importance weights of log ratios, without batch normalisation.

    ========== ===========================  ===============
    level      log weight                   one weight for
    ========== ===========================  ===============
    token      ``l``                        each element
    sequence   ``sum_t l``                  each row
    geometric  ``(1 / n_i) sum_t l``        each row
    ========== ===========================  ===============

    The log weight is clamped to the safety bound, then ``r = exp(log weight)`` and ``w = bound(r)``.
    """
    if spec.level == "token":
        log_weight = clamp(log_ratio)
        has_weight = valid
    else:
        total = row_sum(log_ratio) if spec.level == "sequence" else row_mean(log_ratio, row_sum(valid))
        # Compared with its bounds in the compute dtype, as an element is.
        log_weight = clamp(total.to(log_ratio.dtype))
        has_weight = valid.any(1)
    low = log_weight < spec.log_lower
    high = log_weight > spec.log_upper
    empty_excess = -1.0
    if spec.level == "token":
        # Invalid elements have a ratio of 1, which a band may exclude.
        low = low & valid
        high = high & valid
        empty_excess = 0.0
    else:
        # A product of many ratios needs the range and the digits of float64.
        log_weight = log_weight.double()
    ratio = log_weight.exp()
    ratio_excess = excess(log_weight)
    weight = spec.bound(ratio, low | high)
    # expm1 has more digits than w - 1, and holds for every ratio that bounding left alone.
    weight_excess = torch.where(weight == ratio, ratio_excess, weight - 1.0)
    nothing = ~has_weight
    return ImportanceWeights(
        weight=weight.masked_fill(nothing, 0.0),
        excess=weight_excess.masked_fill_(nothing, empty_excess),
        ratio=ratio,
        ratio_excess=ratio_excess,
        low=low,
        high=high,
    )
