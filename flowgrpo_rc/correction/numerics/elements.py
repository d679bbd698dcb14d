"""The elements of a block of rows: what weights, rejection and diagnostics have in common.

Notation of this folder, for one element: ``l = log_prob - rollout_log_prob`` (train over rollout), ``r = exp(l)``. An
element is one token or one SDE step; a row is one sequence, or one image's window of steps.

Blocks are held transposed, as ``(T, B)``: a figure ``(B,)`` of rows broadcasts to its elements as it is, and the sums
of many short rows run over contiguous memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND

SHORT_ROW = 64
"""Length up to which rows are laid out anew, steps first in memory; longer ones stay as they lie."""


class Elements(NamedTuple):
    """Log ratios of a block, in the compute dtype. Invalid elements hold 0 in every tensor."""

    log_prob: Float[Tensor, "T B"]
    """Log-probs of the policy being trained."""
    rollout_log_prob: Float[Tensor, "T B"]
    """Log-probs of the behaviour policy."""
    log_ratio: Float[Tensor, "T B"]
    """``l``, not clamped."""
    clamped: Float[Tensor, "T B"]
    """``l`` within the safety bound."""
    excess: Float[Tensor, "T B"]
    """``r - 1`` of the clamped ``l``: near ``l = 0`` it keeps the digits that ``exp(l)`` rounds away."""
    k3: Float[Tensor, "T B"]
    """``r - 1 - l`` of the clamped ``l``."""
    valid: Float[Tensor, "T B"]
    """1 at valid elements."""
    whole: bool
    """Whether all elements are known to be valid."""

    def zero_invalid(self, values: Float[Tensor, "T B"]) -> Float[Tensor, "T B"]:
        """Finite values, with 0 at invalid elements."""
        return values if self.whole else values * self.valid


def make_elements(
    log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"] | None,
    dtype: torch.dtype,
) -> Elements:
    """The elements of some rows; ``dtype`` is the compute dtype."""
    log_prob = log_prob.t().to(dtype).resolve_neg()
    rollout_log_prob = rollout_log_prob.t().to(dtype).resolve_neg()
    if len(log_prob) <= SHORT_ROW:
        log_prob = log_prob.contiguous()
        rollout_log_prob = rollout_log_prob.contiguous()
    valid = torch.ones_like(log_prob) if mask is None else flags(torch.ne, mask.t(), 0, like=log_prob)
    whole = mask is None or is_known_whole(valid)
    if not whole:
        bits = -valid.to(_INTEGERS[dtype])
        log_prob = _select(log_prob, bits)
        rollout_log_prob = _select(rollout_log_prob, bits)
    log_ratio = log_prob - rollout_log_prob
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    # In float32 the difference of r - 1 and l would be rounding noise at |l| near 1e-4, where SDE steps are.
    exact = clamped.double()
    excess = torch.expm1(exact)
    k3 = excess - exact
    return Elements(log_prob, rollout_log_prob, log_ratio, clamped, excess.to(dtype), k3.to(dtype), valid, whole)


def flags(
    compare: Callable[..., Tensor], values: Shaped[Tensor, "*shape"], bound: Any, like: Tensor | None = None
) -> Float[Tensor, "*shape"]:
    """1 where a comparison holds, else 0, in the dtype of the values or of ``like``.

    On a CPU bools would be slower to make and to sum.
    """
    return compare(values, bound, out=torch.empty_like(values if like is None else like))


def is_known_whole(valid: Float[Tensor, "T B"]) -> bool:
    """Whether every element is known to be valid, which saves most of what a mask costs.

    That is looked up in host memory alone: on an accelerator looking would be a transfer.
    """
    return valid.device.type == "cpu" and valid.sum().item() == valid.numel()


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _select(values: Float[Tensor, "T B"], bits: Int[Tensor, "T B"]) -> Float[Tensor, "T B"]:
    """The values where all bits are set, and 0 where none is, also of NaN; ``torch.where`` is far slower on a CPU."""
    return (values.view(bits.dtype) & bits).view(values.dtype)


def safe_exp(log: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``exp``, its argument clamped to the safety bound."""
    return log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
