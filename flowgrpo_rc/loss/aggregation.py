"""From losses of tokens ``(B, T)`` to one number, as a sum and its denominator.

``keep`` is the *modified* mask: valid tokens (``response_mask``) that rejection kept. What is not kept leaves the sum
and the denominator. With ``l`` the loss of a kept token, ``n_i`` the kept tokens of sequence ``i`` and ``S`` the number
of sequences with ``n_i > 0`` (a sequence of which nothing is kept counts nowhere):

=========================== ========================= =============
mode                        sum                       denominator
=========================== ========================= =============
``token-mean``              ``sum_i sum_t l``         ``sum_i n_i``
``seq-mean-token-sum``      ``sum_i sum_t l``         ``S``
``seq-mean-token-mean``     ``sum_i (sum_t l) / n_i`` ``S``
``seq-mean-token-sum-norm`` ``sum_i (sum_t l) / L``   ``S``
=========================== ========================= =============

``L`` is ``scale_factor``, or ``T``, the padded length, when that is ``None``; give it where micro-batches are padded to
different lengths. A sequence lies whole in one micro-batch, so sums and denominators add up exactly over micro-batches
and ranks. The names are verl's; the values are those of its ``agg_loss`` on one whole batch.

The configuration validates ``loss_agg_mode`` against ``AGGREGATIONS``, so importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Aggregation:
    """One mode: how it sums losses of tokens, and what it divides the sum by."""

    loss_sum: Callable[[Tensor, Tensor, float | None], Tensor]
    """From losses ``(B, T)``, which are 0 where nothing is kept, ``keep`` ``(B, T)`` and ``scale_factor``."""
    denominator: Callable[[Tensor], Tensor]
    """From ``keep`` ``(B, T)``."""


def plain_sum(loss: Tensor, keep: Tensor, scale_factor: float | None) -> Tensor:
    """``sum_i sum_t l``."""
    return loss.sum()


def sum_of_sequence_means(loss: Tensor, keep: Tensor, scale_factor: float | None) -> Tensor:
    """``sum_i (sum_t l) / n_i``."""
    # A sequence without a kept token has a sum of 0, whatever divides it.
    return (loss.sum(1) / keep.sum(1).clamp(min=1)).sum()


def scaled_sum(loss: Tensor, keep: Tensor, scale_factor: float | None) -> Tensor:
    """``sum_i (sum_t l) / L``."""
    return loss.sum() / (loss.shape[1] if scale_factor is None else scale_factor)


def all_elements(keep: Tensor) -> Tensor:
    """Kept or not."""
    return keep.new_ones(keep.shape).sum()


def kept_elements(keep: Tensor) -> Tensor:
    """``sum_i n_i``."""
    return keep.sum()


def sequences_with_kept_elements(keep: Tensor) -> Tensor:
    """``S``."""
    return keep.any(1).sum()


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": Aggregation(plain_sum, kept_elements),
    "seq-mean-token-sum": Aggregation(plain_sum, sequences_with_kept_elements),
    "seq-mean-token-mean": Aggregation(sum_of_sequence_means, sequences_with_kept_elements),
    "seq-mean-token-sum-norm": Aggregation(scaled_sum, sequences_with_kept_elements),
}
"""Every ``loss_agg_mode``."""

ALL_STEPS = Aggregation(plain_sum, all_elements)
"""Mean over all SDE steps, so that a rejection shrinks the gradient: ``rejection_normalization=all``."""
KEPT_STEPS = Aggregation(plain_sum, kept_elements)
"""Mean over the SDE steps that rejection kept: ``rejection_normalization=kept``."""


def aggregation(mode: str) -> Aggregation:
    """The record of ``mode``.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode: got {mode!r}; choose one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[mode]
