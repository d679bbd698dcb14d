"""Log ratios of a batch, and the sums over them that weights, rejection and diagnostics share.

Notation of this folder, for element ``t`` of row ``i``: ``l = log_prob - rollout_log_prob`` (train over rollout) and
``r = exp(l)``. An element is one token or one SDE step; a row is one sequence, or one image's window of steps, with
``n_i`` valid elements. Invalid elements hold 0 in every tensor, so that they add nothing to a sum.

Elements are computed in float32 (float64 for float64 log-probs), and sums over rows are kept in float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND


class LogRatios(NamedTuple):
    """Log-probs and log ratios ``(B, T)`` in the compute dtype, 0 where invalid."""

    log_prob: Float[Tensor, "B T"]
    """Of the policy being trained."""
    rollout_log_prob: Float[Tensor, "B T"]
    """Of the behaviour policy."""
    log_ratio: Float[Tensor, "B T"]
    """``l``, not clamped."""
    valid: Bool[Tensor, "B T"]
    sizes: Float[Tensor, " B"]
    """``n_i``, the valid elements of each row, in float64."""


def log_ratios(
    log_prob: Float[Tensor, "B T"], rollout_log_prob: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"] | None = None
) -> LogRatios:
    """Log ratios of two policies; ``mask`` is non-zero where an element is valid (None: everywhere)."""
    # Half precision cannot hold differences of 1e-5 to 1e-2, the size of an SDE step's log ratio.
    dtype = torch.float64 if torch.float64 in (log_prob.dtype, rollout_log_prob.dtype) else torch.float32
    valid = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask != 0
    # Filled before the subtraction, since a NaN or an infinity at an invalid element must have no effect.
    p = log_prob.to(dtype).masked_fill(~valid, 0.0).contiguous()
    q = rollout_log_prob.to(dtype).masked_fill(~valid, 0.0).contiguous()
    return LogRatios(p, q, p - q, valid.contiguous(), row_sum(valid))


def clamp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``l`` within the safety bound."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)


def safe_exp(log: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``exp``, its argument clamped to the safety bound."""
    return clamp(log).exp()


def excess(clamped: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``r - 1``."""
    # Near l = 0 exp(l) rounds away the digits that standard deviations and chi-squared are made of.
    return torch.expm1(clamped.double()).to(clamped.dtype)


def excess_and_k3(clamped: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """``r - 1`` and ``k3 = r - 1 - l``."""
    # In float32 the difference would be rounding noise at |l| near 1e-4, where SDE steps are.
    exact = clamped.double()
    growth = torch.expm1(exact)
    return growth.to(clamped.dtype), (growth - exact).to(clamped.dtype)


def row_sum(values: Shaped[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """``sum_t values`` in float64, of numbers or flags."""
    return values.sum(1).double()


def row_mean(values: Shaped[Tensor, "B T"], count: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """``(1 / n_i) sum_t values`` in float64; 0 for a row without a valid element."""
    return row_sum(values) / count.clamp(min=1.0)
