"""Log ratios and importance weights (SPEC sections 1 and 2).

Notation of this folder, for element ``t`` of row ``i``: ``l = log_prob - rollout_log_prob`` (train over rollout) and
``r = exp(l)``. An element is one token or one SDE step; a row is one sequence, or one image's window of steps, with
``n_i`` valid elements. Invalid elements hold 0 in every tensor, so that they add nothing to a sum.

Elements are computed in float32 (float64 for float64 log-probs), and sums over rows are kept in float64.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND, WEIGHT_MODES, ImportanceSampling


class LogRatios:
    """Log-probs and log ratios ``(B, T)`` of two policies in the compute dtype, 0 where invalid."""

    def __init__(
        self, p: Float[Tensor, "B T"], q: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"] | None = None
    ) -> None:
        """``p`` of the policy being trained, ``q`` of the rollout; ``mask`` is non-zero where valid (None: all)."""
        # Half precision cannot hold differences of 1e-5 to 1e-2, the size of an SDE step's log ratio.
        dtype = torch.float64 if torch.float64 in (p.dtype, q.dtype) else torch.float32
        invalid = torch.zeros_like(p, dtype=torch.bool) if mask is None else mask == 0
        # Filled before the subtraction, since a NaN or an infinity at an invalid element must have no effect.
        self.log_prob = p.to(dtype).masked_fill(invalid, 0.0).contiguous()
        self.rollout_log_prob = q.to(dtype).masked_fill(invalid, 0.0).contiguous()
        self.log_ratio = self.log_prob - self.rollout_log_prob
        self.valid = ~invalid.contiguous()
        self.sizes = row_sum(self.valid)
        """``n_i``."""

    @cached_property
    def clamped(self) -> Float[Tensor, "B T"]:
        """``l`` within the safety bound."""
        return clamp(self.log_ratio)

    @cached_property
    def excess(self) -> Float[Tensor, "B T"]:
        """``r - 1`` of the clamped ``l``."""
        return self._exact_excess.to(self.clamped.dtype)

    @cached_property
    def k3(self) -> Float[Tensor, "B T"]:
        """``k3 = r - 1 - l`` of the clamped ``l``."""
        return (self._exact_excess - self.clamped.double()).to(self.clamped.dtype)

    @cached_property
    def _exact_excess(self) -> Tensor:
        # Near l = 0 float32 rounds away the digits that standard deviations, chi-squared and k3 are made of.
        return torch.expm1(self.clamped.double())


def clamp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``l`` within the safety bound."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)


def safe_exp(log: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``exp``, its argument clamped to the safety bound."""
    return clamp(log).exp()


def row_sum(values: Shaped[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """``sum_t values`` in float64, of numbers or flags."""
    return values.sum(1).double()


def row_mean(values: Shaped[Tensor, "B T"], sizes: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """``(1 / n_i) sum_t values`` in float64; 0 for a row without a valid element."""
    return row_sum(values) / sizes.clamp(min=1.0)


class ImportanceWeights(NamedTuple):
    """Weights of the units that have one: elements ``(B, T)`` for level ``token``, else rows ``(B,)`` in float64."""

    weight: Float[Tensor, "B ..."]
    """``w``, within its bounds; 0 where nothing is valid."""
    ratio: Float[Tensor, "B ..."]
    """``r``, before the bounds."""
    log_ratio: Float[Tensor, "B ..."]
    """Log of ``r``, clamped."""
    low: Bool[Tensor, "B ..."]
    """``r`` is below the bounds."""
    high: Bool[Tensor, "B ..."]
    """``r`` is above the bounds."""


def importance_weights(x: LogRatios, spec: ImportanceSampling) -> ImportanceWeights:
    """Importance weights ``w = bound(r)`` without batch normalisation; ``plan.WEIGHT_MODES`` has the ``bound``.

    ========== ===========================  ===============
    level      ``log r``                    one weight for
    ========== ===========================  ===============
    token      ``l``                        each element
    sequence   ``sum_t l``                  each row
    geometric  ``(1 / n_i) sum_t l``        each row
    ========== ===========================  ===============

    ``log r`` is clamped to the safety bound.
    """
    lower, upper = spec.log_bounds
    if spec.level == "token":
        log_ratio = x.clamped
        # Invalid elements have a ratio of 1, which a band may exclude.
        low = (log_ratio < lower) & x.valid
        high = (log_ratio > upper) & x.valid
        has_weight = x.valid
    else:
        total = row_sum(x.log_ratio) if spec.level == "sequence" else row_mean(x.log_ratio, x.sizes)
        # Compared with its bounds in the compute dtype, as an element is.
        log_ratio = clamp(total.to(x.log_ratio.dtype))
        low = log_ratio < lower
        high = log_ratio > upper
        has_weight = x.sizes > 0
        # A product of many ratios needs the range and the digits of float64.
        log_ratio = log_ratio.double()
    ratio = log_ratio.exp()
    weight = WEIGHT_MODES[spec.mode].bound(ratio, low | high, spec).masked_fill(~has_weight, 0.0)
    return ImportanceWeights(weight, ratio, log_ratio, low, high)
