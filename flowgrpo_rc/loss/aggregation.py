"""Reduce losses of tokens ``(B, T)`` to a sum and its denominator.

``keep`` is the *modified* mask: valid tokens (``response_mask``) that rejection kept. All others leave the sum and the
denominator. With ``l`` the loss of a kept token, ``n_i`` the number of kept tokens of sequence ``i`` and ``S`` the
number of sequences with ``n_i > 0``:

=========================== ========================= =============
mode                        sum                       denominator
=========================== ========================= =============
``token-mean``              ``sum_i sum_t l``         ``sum_i n_i``
``seq-mean-token-sum``      ``sum_i sum_t l``         ``S``
``seq-mean-token-mean``     ``sum_i (sum_t l) / n_i`` ``S``
``seq-mean-token-sum-norm`` ``sum_i (sum_t l) / L``   ``S``
=========================== ========================= =============

``L`` is ``scale_factor``, or by default ``T``, the padded length. Set it if micro-batches are padded to different
lengths. A micro-batch holds whole sequences, so sums and denominators add up exactly over micro-batches and ranks. The
names are verl's, and the values equal its ``agg_loss`` on one whole batch.

The configuration validates ``loss_agg_mode`` against ``AGGREGATIONS``, so importing this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """One mode: the sum over elements and its denominator."""

    over_sequences: bool = False
    """The denominator counts sequences with a kept element, not elements."""
    counts_rejected: bool = False
    """The denominator counts rejected elements too."""
    token_mean: bool = False
    """Each sequence adds the mean of its losses."""
    scaled: bool = False
    """Each sequence adds the sum of its losses divided by ``L``."""

    def loss_sum(self, loss: Tensor, keep: Tensor, scale_factor: float | None) -> Tensor:
        """The sum of losses ``(B, T)``; they are 0 outside ``keep`` ``(B, T)``."""
        if self.token_mean:
            # A sequence without a kept token has a sum of 0, so any divisor above 0 will do.
            return (loss.sum(1) / keep.sum(1).clamp(min=1)).sum()
        if self.scaled:
            return loss.sum() / (loss.shape[1] if scale_factor is None else scale_factor)
        return loss.sum()

    def denominator(self, keep: Tensor) -> Tensor:
        """The divisor of the sum over ``keep`` ``(B, T)``."""
        # A sequence without any kept token counts nowhere, as in verl.
        counted = keep.new_ones(keep.shape) if self.counts_rejected else keep
        return (counted.any(1) if self.over_sequences else counted).sum()


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": Aggregation(),
    "seq-mean-token-sum": Aggregation(over_sequences=True),
    "seq-mean-token-mean": Aggregation(over_sequences=True, token_mean=True),
    "seq-mean-token-sum-norm": Aggregation(over_sequences=True, scaled=True),
}
"""Every ``loss_agg_mode``."""

ALL_STEPS = Aggregation(counts_rejected=True)
"""Mean over all SDE steps: a rejection shrinks the gradient (``rejection_normalization=all``)."""
KEPT_STEPS = Aggregation()
"""Mean over the kept SDE steps (``rejection_normalization=kept``)."""
