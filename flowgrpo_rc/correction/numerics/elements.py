"""The elements of a block of rows: their log ratios, from which weights, rejection and diagnostics are computed.

Notation of this folder, for one element: ``l = log_prob - rollout_log_prob`` (train over rollout), ``r = exp(l)``. An
element is one token or one SDE step; a row is one sequence, or one image's window of steps.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND


@dataclass(frozen=True, slots=True)
class Elements:
    """Log ratios of ``(B, T)`` elements, in the compute dtype. Invalid elements hold 0 in every tensor."""

    log_prob: Float[Tensor, "B T"]
    """Log-probs of the policy being trained."""
    log_ratio: Float[Tensor, "B T"]
    """``l``, not clamped."""
    clamped: Float[Tensor, "B T"]
    """``l`` within the safety bound."""
    excess: Float[Tensor, "B T"]
    """``r - 1`` of the clamped ``l``. Near ``l = 0`` it keeps the digits that ``exp(l)`` rounds away."""
    valid: Bool[Tensor, "B T"] | None
    """Which elements count; ``None`` when all do."""
    ones: Float[Tensor, "B T"] | None
    """The same as 1 and 0."""
    count: Float[Tensor, " B"]
    """Valid elements of each row, float64."""

    @property
    def nonempty(self) -> Bool[Tensor, " B"]:
        """Rows with a valid element."""
        return self.count > 0

    def zero_invalid(self, values: Shaped[Tensor, "B T"]) -> Shaped[Tensor, "B T"]:
        """Finite numbers or flags, with 0 (False) at invalid elements."""
        if self.valid is None or self.ones is None:
            return values
        return values & self.valid if values.dtype == torch.bool else values * self.ones

    def row_mean(self, row_sum: Float[Tensor, "*K B"]) -> Float[Tensor, "*K B"]:
        """Means over a row's valid elements; 0 for a row without one."""
        return row_sum / self.count.clamp(min=1.0)


def make_elements(
    log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"] | None,
    dtype: torch.dtype,
) -> Elements:
    """The elements of some rows; ``dtype`` is the compute dtype.

    Invalid elements are selected away before any arithmetic, so that a NaN there reaches nothing.
    """
    log_prob = log_prob.to(dtype)
    log_ratio = log_prob - rollout_log_prob.to(dtype)
    valid = ones = None
    if mask is None:
        count = log_prob.new_full(log_prob.shape[:1], log_prob.shape[1], dtype=torch.float64)
    else:
        valid = mask != 0
        ones = valid.to(dtype)
        count = valid.sum(1).double()
        log_prob = torch.where(valid, log_prob, 0.0)
        log_ratio = torch.where(valid, log_ratio, 0.0)
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return Elements(log_prob, log_ratio, clamped, torch.expm1(clamped), valid, ones, count)


def safe_exp(log: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``exp``, its argument clamped to the safety bound."""
    return log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def row_sums(*values: Float[Tensor, "B T"]) -> Float[Tensor, "K B"]:
    """Sums of each tensor along its rows, in float64."""
    return torch.stack([each.sum(1) for each in values]).double()


def row_counts(*flags: Bool[Tensor, "B T"]) -> Float[Tensor, "K B"]:
    """How many flags each row has, in float64."""
    return torch.stack([each.sum(1) for each in flags]).double()


def extremes(
    values: Float[Tensor, "*shape"], counts: Bool[Tensor, "*shape"] | None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Smallest and largest of the values that count (``None``: all do), in float64."""
    if counts is None:
        smallest, largest = torch.aminmax(values)
    else:
        smallest = torch.where(counts, values, torch.inf).amin()
        largest = torch.where(counts, values, -torch.inf).amax()
    return smallest.double(), largest.double()
