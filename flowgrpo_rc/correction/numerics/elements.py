"""From the elements of a block of rows to sums along the rows: what weights, rejection and diagnostics have in common.

Notation of this folder, for one element: ``l = log_prob - rollout_log_prob`` (train over rollout), ``r = exp(l)``. An
element is one token or one SDE step; a row is one sequence, or one image's window of steps.

Blocks are held transposed, as ``(T, B)``: a figure ``(B,)`` of rows broadcasts to its elements as it is, and the sums
of many short rows run over contiguous memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND

FAR = 1e38
"""Beyond any value, to keep invalid elements out of minima and maxima; its square is finite in float64."""
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
    ones: Float[Tensor, "T B"]
    """1 at valid elements."""
    away: Float[Tensor, "T B"] | None
    """``FAR`` at invalid elements and 0 at valid ones; ``None`` when all are valid."""

    def zero_invalid(self, values: Float[Tensor, "T B"]) -> Float[Tensor, "T B"]:
        """Finite values, with 0 at invalid elements."""
        return values if self.away is None else values * self.ones

    def beyond(
        self, values: Float[Tensor, "T B"], lower: float, upper: float
    ) -> tuple[Float[Tensor, "T B"], Float[Tensor, "T B"]]:
        """Flags of the valid elements below and above bounds, which are rounded to the compute dtype.

        The values are 0 at invalid elements.
        """
        below = flags(torch.lt, values, lower)
        above = flags(torch.gt, values, upper)
        if lower <= 0.0 <= upper:
            return below, above
        return self.zero_invalid(below), self.zero_invalid(above)

    def extremes(self, *values: Float[Tensor, "T B"]) -> Float[Tensor, "two_each B"]:
        """Smallest of each of the values in each row's valid elements, then largest, in float64.

        For a row without a valid element they are beyond any value.
        """
        away = self.away
        smallest = [(each if away is None else each + away).amin(0) for each in values]
        largest = [(each if away is None else each - away).amax(0) for each in values]
        return torch.stack(smallest + largest).double()


def flags(compare: Callable[..., Tensor], values: Float[Tensor, "*shape"], bound: Any) -> Float[Tensor, "*shape"]:
    """1 where a comparison holds, else 0, in the values' dtype; on a CPU bools are slower to make and to sum."""
    return compare(values, bound, out=torch.empty_like(values))


def make_elements(
    log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"] | None,
    dtype: torch.dtype,
) -> Elements:
    """The elements of some rows; ``dtype`` is the compute dtype."""
    log_prob = log_prob.t().to(dtype).resolve_neg()
    if len(log_prob) <= SHORT_ROW:
        log_prob = log_prob.contiguous()
    log_ratio = log_prob - rollout_log_prob.t().to(dtype)
    ones = torch.ones_like(log_ratio)
    away = None
    if mask is not None:
        torch.ne(mask.t(), 0, out=ones)
    if mask is not None and not is_known_whole(ones):
        away = (1.0 - ones) * FAR
        bits = -ones.to(_INTEGERS[dtype])
        log_prob = _select(log_prob, bits)
        log_ratio = _select(log_ratio, bits)
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    # In float32 the difference of r - 1 and l would be rounding noise at |l| near 1e-4, where SDE steps are.
    exact = clamped.double()
    excess = torch.expm1(exact)
    k3 = (excess - exact).to(dtype)
    return Elements(log_prob, log_ratio, clamped, excess.to(dtype), k3, ones, away)


def is_known_whole(ones: Float[Tensor, "T B"]) -> bool:
    """Whether every element is known to be valid, which saves most of what a mask costs.

    That is looked up in host memory alone: on an accelerator looking would be a transfer.
    """
    return ones.device.type == "cpu" and bool(ones.sum() == ones.numel())


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _select(values: Float[Tensor, "T B"], bits: Int[Tensor, "T B"]) -> Float[Tensor, "T B"]:
    """The values where all bits are set, and 0 where none is, also of NaN; ``torch.where`` is far slower on a CPU."""
    return (values.view(bits.dtype) & bits).view(values.dtype)


class Rows(NamedTuple):
    """Sums of elements along each row of a block, in float64."""

    names: tuple[str, ...]
    sums: Float[Tensor, "K B"]
    """A line for each name; the first, ``elements``, counts the valid ones."""
    means: Float[Tensor, "K B"]
    """The same over the row's valid elements; 0 for a row without one."""

    def sum(self, name: str) -> Float[Tensor, " B"]:
        """One line of the sums."""
        return self.sums[self.names.index(name)]

    def mean(self, name: str) -> Float[Tensor, " B"]:
        """One line of the means."""
        return self.means[self.names.index(name)]


class RowSums:
    """Collects what is to be summed along the rows of a block."""

    def __init__(self, x: Elements) -> None:
        steps, rows = x.log_ratio.shape
        self._together = steps <= SHORT_ROW and steps * rows <= SUMMED_TOGETHER
        self._values: dict[str, Tensor] = {}
        self.add("elements", x.ones)

    def add(self, name: str, values: Float[Tensor, "T B"]) -> None:
        """Numbers or flags, 0 at invalid elements."""
        self._values[name] = values if self._together else values.sum(0)

    def rows(self) -> Rows:
        """The sums of everything added."""
        names = tuple(self._values)
        table = torch.stack(list(self._values.values()))
        if self._together:
            table = table.sum(1)
        table = table.double()
        return Rows(names, table, table / table[0].clamp(min=1.0))


def safe_exp(log: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``exp``, its argument clamped to the safety bound."""
    return log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
