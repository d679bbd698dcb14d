"""From the elements of a block of rows to sums along the rows: what weights, rejection and diagnostics have in common.

Notation of this folder, for one element: ``l = log_prob - rollout_log_prob`` (train over rollout), ``r = exp(l)``. An
element is one token or one SDE step; a row is one sequence, or one image's window of steps.

Blocks are held transposed, as ``(T, B)``: a figure ``(B,)`` of rows broadcasts to its elements as it is, and the sums
of many short rows run over contiguous memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND

FAR = 1e38
"""Beyond any value, to keep invalid elements out of minima; its square is finite in float64."""
NEAR_ONE = 0.03
"""Size of the log ratio below which k3 comes from its series."""
SHORT_ROW = 64
"""Length up to which rows are laid out anew, steps first in memory; longer ones stay as they lie."""
SUMMED_TOGETHER = 1 << 14
"""Elements up to which a block of short rows is summed in one operation for all figures, which takes more memory."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Log ratios of a block, in the compute dtype. Invalid elements hold 0 in every tensor."""

    log_prob: Float[Tensor, "T B"]
    """Log-probs of the policy being trained."""
    log_ratio: Float[Tensor, "T B"]
    """``l``, not clamped."""
    clamped: Float[Tensor, "T B"]
    """``l`` within the safety bound."""
    excess: Float[Tensor, "T B"]
    """``r - 1`` of the clamped ``l``: near ``l = 0`` it keeps the digits that ``exp(l)`` rounds away."""
    k3: Float[Tensor, "T B"]
    """``r - 1 - l`` of the clamped ``l``."""
    valid: Bool[Tensor, "T B"] | None
    """Which elements count; ``None`` when all do."""
    ones: Float[Tensor, "T B"]
    """The same as 1 and 0."""

    def zero_invalid(self, values: Float[Tensor, "T B"]) -> Float[Tensor, "T B"]:
        """Finite values, with 0 at invalid elements."""
        return values if self.valid is None else values * self.ones

    def beyond(
        self, values: Float[Tensor, "T B"], lower: float, upper: float
    ) -> tuple[Bool[Tensor, "T B"], Bool[Tensor, "T B"]]:
        """Which valid elements lie below and above bounds, which are rounded to the compute dtype.

        The values are 0 at invalid elements.
        """
        below = values < lower
        above = values > upper
        if self.valid is not None and not lower <= 0.0 <= upper:
            below = below & self.valid
            above = above & self.valid
        return below, above

    def extremes(self, values: Float[Tensor, "T B"]) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Smallest and largest valid value of each row; finite for a row without one."""
        if self.valid is None:
            return values.amin(0), values.amax(0)
        invalid = ~self.valid
        return values.masked_fill(invalid, FAR).amin(0), values.masked_fill(invalid, -FAR).amax(0)


def make_elements(
    log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"] | None,
    dtype: torch.dtype,
) -> Elements:
    """The elements of some rows; ``dtype`` is the compute dtype.

    Invalid elements are selected away before any arithmetic, so that a NaN there reaches nothing.
    """
    valid = None if mask is None else (mask != 0).t()
    log_prob = log_prob.t().to(dtype)
    if len(log_prob) <= SHORT_ROW:
        log_prob = log_prob.contiguous()
        valid = None if valid is None else valid.contiguous()
    log_ratio = log_prob - rollout_log_prob.t().to(dtype)
    if valid is None:
        ones = torch.ones_like(log_ratio)
    else:
        ones = valid.to(dtype)
        zero = log_ratio.new_zeros(())
        log_prob = torch.where(valid, log_prob, zero)
        log_ratio = torch.where(valid, log_ratio, zero)
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    excess = torch.expm1(clamped)
    return Elements(log_prob, log_ratio, clamped, excess, _k3(clamped, excess), valid, ones)


def _k3(log_ratio: Float[Tensor, "T B"], excess: Float[Tensor, "T B"]) -> Float[Tensor, "T B"]:
    """``r - 1 - l``, given ``r - 1``."""
    difference = excess - log_ratio
    if difference.dtype == torch.float64:
        return difference
    # At |l| near 1e-5, where log-probs of SDE steps lie, one digit of the difference is left in float32. Its series,
    # l^2/2 + l^3/6 + l^4/24, costs a tenth of expm1 in float64.
    series = log_ratio.mul(1 / 24).add_(1 / 6).mul_(log_ratio).add_(1 / 2).mul_(log_ratio).mul_(log_ratio)
    return torch.where(log_ratio.abs() < NEAR_ONE, series, difference)


class Rows(NamedTuple):
    """Sums of elements along each row of a block, in float64."""

    names: tuple[str, ...]
    table: Float[Tensor, "K B"]
    """One sum of every row for each name."""
    sums: dict[str, Float[Tensor, " B"]]
    """The same by name; ``elements`` counts the valid ones."""
    divisor: Float[Tensor, " B"]
    """The number of valid elements, at least 1."""

    def mean(self, name: str) -> Float[Tensor, " B"]:
        """Over the row's valid elements; 0 for a row without one."""
        return self.sums[name] / self.divisor


class RowSums:
    """Collects what is to be summed along the rows of a block."""

    def __init__(self, x: Elements) -> None:
        steps, rows = x.log_ratio.shape
        self._together = steps <= SHORT_ROW and steps * rows <= SUMMED_TOGETHER
        self._dtype = x.log_ratio.dtype
        self._values: dict[str, Tensor] = {}
        self.add("elements", x.ones)

    def add(self, name: str, values: Shaped[Tensor, "T B"]) -> None:
        """Numbers or flags, 0 at invalid elements."""
        if not self._together:
            values = values.sum(0)
        elif values.dtype == torch.bool:
            values = values.to(self._dtype)
        self._values[name] = values

    def rows(self) -> Rows:
        """The sums of everything added."""
        names = tuple(self._values)
        table = torch.stack(list(self._values.values()))
        if self._together:
            table = table.sum(1)
        table = table.double()
        return Rows(names, table, dict(zip(names, table.unbind(), strict=True)), table[0].clamp(min=1.0))


def safe_exp(log: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``exp``, its argument clamped to the safety bound."""
    return log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
