"""One pass over a batch: weights and mask of a plan, and with ``run_plan`` all metrics in one transfer to the host."""

import itertools
import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics import metrics
from flowgrpo_rc.correction.numerics.log_ratios import LogRatios, log_ratios
from flowgrpo_rc.correction.numerics.moments import (
    BATCH_NORM_FACTOR,
    Moments,
    RolloutCorrection,
    metrics_from_moments,
)
from flowgrpo_rc.correction.numerics.reductions import BATCH_DIVISOR, batch_divisor
from flowgrpo_rc.correction.numerics.rejection import Rejection, by_element, rejection_mask
from flowgrpo_rc.correction.numerics.weights import ImportanceWeights, importance_weights
from flowgrpo_rc.correction.plan import CorrectionPlan


class NonFiniteLogProbError(ValueError):
    """A valid log-prob is NaN or infinite. The message counts them and names the first.

    Args:
        p, q: log-probs ``(B, T)`` of the policy being trained and of the rollout.
        m: the mask; None: all are valid.
    """

    def __init__(self, p: Tensor, q: Tensor, m: Tensor | None) -> None:
        bad = ~(torch.isfinite(p) & torch.isfinite(q) & torch.isfinite(p.double() - q.double()))
        if m is not None:
            bad &= m != 0
        positions = bad.nonzero()
        if len(positions) == 0:
            super().__init__("Log-probs are too large: the sum of their differences overflows.")
            return
        # The first position leads to the image or token at fault.
        row, column = positions[0].tolist()
        super().__init__(
            f"{len(positions)} of {p.numel()} positions have a NaN or infinite log-prob where the mask is valid; "
            f"the first is ({row}, {column}): log_prob={p[row, column].item()}, "
            f"rollout_log_prob={q[row, column].item()}."
        )


def run_plan(*log_probs_and_mask: Any, plan: CorrectionPlan, **options: Any) -> RolloutCorrection:
    """``correct_and_measure`` with its arguments, and the metrics as numbers."""
    weights, kept, moments = correct_and_measure(*log_probs_and_mask, plan=plan, **options)
    return RolloutCorrection(weights, kept, metrics_from_moments(moments), moments)


@torch.no_grad()
def correct_and_measure(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    plan: CorrectionPlan,
    row_bounds: Float[Tensor, "..."] | None = None,
    timesteps: Shaped[Tensor, "..."] | None = None,
    dp_group: Any = None,
) -> tuple[Float[Tensor, "..."] | None, Shaped[Tensor, "..."], Moments]:
    """Carries out a plan: weights, the mask times what is kept, and the moments of all metrics.

    Waits for the device once, for the moments.

    Args:
        row_bounds: ``(B,)``, for ``rollout_rs_threshold=auto`` alone: the rejection bound of every row, on the size of
            the aggregated log ratio for k1 and on the statistic for k2 and k3.

    Raises:
        TypeError, ValueError: as ``compute_rollout_correction_and_rejection_mask``; row bounds that are missing, of
            another shape, or not positive and finite.
    """
    _check(log_prob, rollout_log_prob, mask, timesteps)
    row_bounds = _check_row_bounds(row_bounds, log_prob) if plan.calibrated else None
    rows = (len(log_prob), -1)
    p = log_prob.reshape(rows)
    q = rollout_log_prob.reshape(rows)
    m = None if mask is None else mask.reshape(rows)
    x = log_ratios(p, q, m)
    importance, rejection = _correct(plan, x, row_bounds)
    table, of_criteria = _measure(plan, x, importance, rejection)
    sums = None
    if importance is not None and plan.importance is not None and plan.importance.batch_normalize:
        columns = metrics.normalization_columns(importance, x)
        table.add(BATCH_NORM_FACTOR, BATCH_DIVISOR, *columns)
        sums = torch.stack(columns).sum(1)
        # The mean covers the whole batch, which may be spread over ranks.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums, group=dp_group)
    times = None if timesteps is None else metrics.timestep_table(x, timesteps.reshape(rows))
    # Everything that the host needs crosses together: this is the one wait for the device.
    host = _to_host(table.totals(), of_criteria.totals(), sums, row_bounds, times)
    _check_bound_values(host[3])
    figures = table.figures(host[0]) | of_criteria.figures(host[1])
    moments = Moments(plan, figures, batch_divisor(*host[2]) if host[2] else None, metrics.gaps_by_timestep(host[4]))
    # Every NaN or infinite log-prob is in the sum of l, so that no element has to be looked at.
    if not math.isfinite(figures["kl"].numbers[1]):
        raise NonFiniteLogProbError(p, q, m)
    if moments.count == 0:
        raise ValueError("The mask has no valid element: there is nothing to correct.")
    weights = None if importance is None else importance.applied(x).view(log_prob.shape)
    if weights is not None and moments.divisor is not None:
        weights = weights / moments.divisor
    # In the mask's own dtype and with its values, which need not be 0 and 1.
    kept = rejection.keep if m is None else m.masked_fill(~rejection.keep, 0)
    return weights, kept.view(log_prob.shape), moments


@torch.no_grad()
def weights_and_mask(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    *,
    plan: CorrectionPlan,
    row_bounds: Float[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "..."] | None, Bool[Tensor, "..."]]:
    """Weights and mask without metrics, and without waiting for the device.

    Values that are not finite are not refused here; weights are not normalised over the batch.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices, as ``run_plan``.
    """
    _check(log_prob, rollout_log_prob, None, None)
    row_bounds = _check_row_bounds(row_bounds, log_prob) if plan.calibrated else None
    rows = (len(log_prob), -1)
    x = log_ratios(log_prob.reshape(rows), rollout_log_prob.reshape(rows))
    importance, rejection = _correct(plan, x, row_bounds)
    weights = None if importance is None else importance.applied(x).view_as(log_prob)
    return weights, rejection.keep.view_as(log_prob)


def _correct(
    plan: CorrectionPlan, x: LogRatios, row_bounds: Float[Tensor, " B"] | None
) -> tuple[ImportanceWeights | None, Rejection]:
    """Weights, and a rejection that includes that of ``rollout_is_mode=mask``."""
    rejection = rejection_mask(x.log_ratio, x.valid, plan.criteria, log_veto=plan.log_veto, row_bounds=row_bounds)
    if plan.importance is None:
        return None, rejection
    # Of the unmasked ratio: weights and rejection do not depend on each other.
    importance = importance_weights(x.log_ratio, x.valid, plan.importance)
    if plan.importance.rejects:
        inside = by_element(~(importance.low | importance.high))
        rejection = rejection._replace(keep=rejection.keep & inside)
    return importance, rejection


@torch.inference_mode()  # cheaper operations; no tensor of the tables reaches a caller
def _measure(
    plan: CorrectionPlan, x: LogRatios, importance: ImportanceWeights | None, rejection: Rejection
) -> tuple[metrics.MetricTable, metrics.MetricTable]:
    """Every metric of a plan; those of single criteria in a table of their own."""
    # verl leaves rows without a valid element out of a criterion's metrics and counts them in all others.
    nonempty = x.sizes > 0
    of_criteria = metrics.MetricTable(x.valid, x.sizes, nonempty)
    table = metrics.MetricTable(x.valid, x.sizes, torch.ones_like(nonempty) if plan.counts_empty_rows else nonempty)
    for verdict in rejection.verdicts:
        metrics.criterion_metrics(of_criteria, verdict, x)
    if plan.importance is not None and importance is not None:
        metrics.weight_metrics(table, plan.importance, importance, x)
    if plan.can_reject:
        metrics.rejection_metrics(table, rejection, x)
    metrics.diagnostics(table, x)
    return table, of_criteria


def _to_host(*parts: Tensor | None) -> list[list[float]]:
    """The numbers of each part, none for None, in the one transfer of a call."""
    rest = iter(torch.cat([part.double().flatten() for part in parts if part is not None]).to("cpu").tolist())
    return [[] if part is None else list(itertools.islice(rest, part.numel())) for part in parts]


def _check(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor | None, timesteps: Tensor | None) -> None:
    if not (log_prob.is_floating_point() and rollout_log_prob.is_floating_point()):
        raise TypeError(
            f"log-probs must be floating point, got log_prob {log_prob.dtype} and "
            f"rollout_log_prob {rollout_log_prob.dtype}."
        )
    shape = log_prob.shape
    if len(shape) not in (1, 2):
        raise ValueError(f"log_prob must be (B,) or (B, T), got shape {tuple(shape)}.")
    named = {"log_prob": log_prob, "rollout_log_prob": rollout_log_prob, "mask": mask, "timesteps": timesteps}
    for name, other in named.items():
        if other is None:
            continue
        if other.shape != shape:
            raise ValueError(f"log_prob has shape {tuple(shape)}, but {name} has shape {tuple(other.shape)}.")
        # Moving it here would be a silent transfer at every step.
        if other.device != log_prob.device:
            raise ValueError(f"log_prob is on {log_prob.device}, but {name} is on {other.device}; move one.")
    if log_prob.numel() == 0:
        raise ValueError(f"The batch is empty: log_prob has shape {tuple(shape)}.")


def _check_row_bounds(bounds: Tensor | None, log_prob: Tensor) -> Tensor:
    """The bounds on the device of the log-probs; a trainer measures them on the host."""
    if bounds is None:
        raise ValueError(
            "rollout_rs_threshold='auto' needs the rejection bound of every row (rollout_rs_bounds in the batch, which "
            "the trainer measures). Outside of it, give numbers."
        )
    if bounds.shape != log_prob.shape[:1]:
        raise ValueError(f"rollout_rs_bounds has shape {tuple(bounds.shape)}, expected {tuple(log_prob.shape[:1])}.")
    # Their values are checked on the host, with the one transfer.
    return bounds.to(log_prob.device, non_blocking=True)


def _check_bound_values(bounds: list[float]) -> None:
    for row, bound in enumerate(bounds):
        if not 0 < bound < math.inf:
            raise ValueError(f"rollout_rs_bounds: row {row} has {bound}; give positive, finite numbers.")
