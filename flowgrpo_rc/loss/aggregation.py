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
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

SEQUENCE_MODES = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    loss: Float[Tensor, "B T"], keep: Bool[Tensor, "B T"], mode: str, scale_factor: float | None = None
) -> Float[Tensor, ""]:
    """The mode's sum; ``loss`` is 0 where nothing is kept."""
    _check(mode)
    if mode == "seq-mean-token-mean":
        return (loss.sum(1) / keep.sum(1).clamp(min=1)).sum()
    if mode == "seq-mean-token-sum-norm":
        return loss.sum() / (loss.shape[1] if scale_factor is None else scale_factor)
    return loss.sum()


def count(keep: Bool[Tensor, "B T"], mode: str) -> Int[Tensor, ""]:
    """The mode's denominator: kept tokens, or sequences with one."""
    _check(mode)
    return (keep.any(1) if mode in SEQUENCE_MODES else keep).sum()


def _check(mode: str) -> None:
    modes = ("token-mean", *SEQUENCE_MODES)
    if mode not in modes:
        raise ValueError(f"loss_agg_mode: got {mode!r}; choose one of {', '.join(modes)}")
