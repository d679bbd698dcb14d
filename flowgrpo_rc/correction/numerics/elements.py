"""From the elements of a block of rows to sums along the rows: what weights, rejection and diagnostics have in common.

Notation of this folder, for one element: ``l = log_prob - rollout_log_prob`` (train over rollout), ``r = exp(l)``. An
element is one token or one SDE step; a row is one sequence, or one image's window of steps.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND

SUMMED_TOGETHER = 1 << 14
"""Elements of a block up to which everything is summed in one operation: few calls. Above, one by one: little memory."""


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
    """``r - 1`` of the clamped ``l``: near ``l = 0`` it keeps the digits that ``exp(l)`` rounds away."""
    valid: Bool[Tensor, "B T"] | None
    """Which elements count; ``None`` when all do."""
    ones: Float[Tensor, "B T"] | None
    """The same as 1 and 0, to multiply with."""

    def zero_invalid(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Finite values, with 0 at invalid elements."""
        return values if self.ones is None else values * self.ones

    def beyond(
        self, values: Float[Tensor, "B T"], lower: float, upper: float
    ) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Valid elements below and above the bounds, which are rounded to the compute dtype, of values that are 0 at
        invalid ones."""
        below = values < lower
        above = values > upper
        if self.valid is not None and not lower <= 0.0 <= upper:
            below = below & self.valid
            above = above & self.valid
        return below, above

    def extremes(self, values: Float[Tensor, "B T"]) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Smallest and largest valid value of each row."""
        if self.valid is None:
            return values.amin(1), values.amax(1)
        invalid = ~self.valid
        return values.masked_fill(invalid, torch.inf).amin(1), values.masked_fill(invalid, -torch.inf).amax(1)


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
    if mask is not None:
        valid = mask != 0
        ones = valid.to(dtype)
        zero = log_ratio.new_zeros(())
        log_prob = torch.where(valid, log_prob, zero)
        log_ratio = torch.where(valid, log_ratio, zero)
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return Elements(log_prob, log_ratio, clamped, torch.expm1(clamped), valid, ones)


class Rows(NamedTuple):
    """Sums of elements along each row of a block, in float64."""

    names: tuple[str, ...]
    table: Float[Tensor, "K B"]
    """One sum of every row for each name."""
    sums: dict[str, Float[Tensor, " B"]]
    """The same by name; ``elements`` counts the valid ones."""
    means: dict[str, Float[Tensor, " B"]]
    """Over the row's valid elements; 0 for a row without one."""


class RowSums:
    """Collects what is to be summed along the rows of a block."""

    def __init__(self, x: Elements) -> None:
        self._together = x.log_ratio.numel() <= SUMMED_TOGETHER
        self._values: dict[str, Tensor] = {}
        self.add("elements", torch.ones_like(x.log_ratio) if x.ones is None else x.ones)

    def add(self, name: str, values: Shaped[Tensor, "B T"]) -> None:
        """Numbers or flags, 0 at invalid elements."""
        self._values[name] = values if self._together else values.sum(1)

    def rows(self) -> Rows:
        """The sums of everything added."""
        table = torch.stack(list(self._values.values()))
        if self._together:
            table = table.sum(2)
        table = table.double()
        means = table / table[0].clamp(min=1.0)
        names = tuple(self._values)
        return Rows(
            names, table, dict(zip(names, table.unbind(), strict=True)), dict(zip(names, means.unbind(), strict=True))
        )


def safe_exp(log: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``exp``, its argument clamped to the safety bound."""
    return log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
