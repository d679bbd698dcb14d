"""Rollout correction of a batch: the public functions. See ``docs/rollout_correction.md`` for the mathematics.

Ratios are train over rollout everywhere: ``l = log_prob - rollout_log_prob``, ``r = exp(l)``. ``log_prob`` belongs to
the policy being trained (pi_old in decoupled mode, pi_theta in bypass mode), ``rollout_log_prob`` to the behaviour
policy.
"""

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics import metrics
from flowgrpo_rc.correction.numerics.moments import Moments, RolloutCorrection, metrics_from_moments
from flowgrpo_rc.correction.numerics.rejection import Rejection, by_element, rejection_mask
from flowgrpo_rc.correction.numerics.weights import ImportanceWeights, LogRatios, importance_weights
from flowgrpo_rc.correction.plan import CorrectionPlan, ThresholdSpec, make_plan

if TYPE_CHECKING:
    from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig


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


def compute_rollout_correction_and_rejection_mask(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_is_mode: str | None = None,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
    rollout_token_veto_threshold: ThresholdSpec = None,
    timesteps: Shaped[Tensor, "..."] | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """Importance weights, rejection mask and diagnostics in one pass and one device-to-host transfer.

    Weights: ``w = exp(l)`` per element ("token"), ``exp(sum l)`` ("sequence") or ``exp(mean l)`` ("geometric") per row,
    the exponent clamped to +-20, then truncated, zeroed, clipped or left alone by ``rollout_is_mode``. Rejection: every
    criterion of ``rollout_rs``, and the veto ``l < log(rollout_token_veto_threshold)``, must pass.

    Args:
        log_prob: log-probs under the training policy, ``(B, T)``, ``(B, W)`` or ``(B,)``, which counts as ``(B, 1)``.
        rollout_log_prob: log-probs under the rollout policy.
        mask: non-zero where an element counts; None when all do. Bool, integer or float.
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_is_mode, rollout_rs,
        rollout_rs_threshold, rollout_token_veto_threshold: as in ``RolloutCorrectionConfig``.
        timesteps: adds ``logprob_abs_diff/ts_{t}``, one mean per distinct value (for SDE steps, not for tokens).
        dp_group: ranks over which batch normalisation averages; None means all of them when ``torch.distributed``
            is initialised. ``metrics`` describe this rank's shard; ``MetricAccumulator`` merges ranks.

    Raises:
        ValueError: shapes or devices differ, shapes are not 1-D or 2-D, the batch is empty, no element is valid,
            a valid log-prob or its timestep is NaN or infinite, or an option is invalid.
        TypeError: a log-prob that is not floating point, or a threshold of the wrong type.

    Source: Liu et al. 2025, "When Speed Kills Stability"; Yao et al. 2025 (truncated IS); verl's rollout correction.
    """
    plan = make_plan(
        rollout_is,
        rollout_is_threshold,
        rollout_is_batch_normalize,
        rollout_is_mode,
        rollout_rs,
        rollout_rs_threshold,
        rollout_token_veto_threshold,
    )
    return run_plan(log_prob, rollout_log_prob, mask, plan=plan, timesteps=timesteps, dp_group=dp_group)


def compute_rollout_correction(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    config: "RolloutCorrectionConfig",
    timesteps: Shaped[Tensor, "..."] | None = None,
    rs_bounds: Float[Tensor, "..."] | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """``compute_rollout_correction_and_rejection_mask`` with the options of a configuration.

    ``rs_bounds`` ``(B,)`` is read with ``rollout_rs_threshold=auto`` alone: the rejection bound of every row, on the
    size of the aggregated log ratio for k1 and on the statistic for k2 and k3.
    """
    options = {"row_bounds": rs_bounds, "timesteps": timesteps, "dp_group": dp_group}
    return run_plan(log_prob, rollout_log_prob, mask, plan=config.plan(), **options)


def compute_rollout_correction_weights(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    rollout_is: str = "token",
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_is_mode: str | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """The importance-sampling part alone; only ``rollout_is_mode="mask"`` changes the mask."""
    plan = make_plan(rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_is_mode)
    return run_plan(log_prob, rollout_log_prob, mask, plan=plan, dp_group=dp_group)


def compute_rollout_rejection_mask(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    rollout_rs: str | None = "token_k1",
    rollout_rs_threshold: ThresholdSpec = None,
    rollout_token_veto_threshold: ThresholdSpec = None,
) -> RolloutCorrection:
    """The rejection part alone; ``weights`` is None."""
    plan = make_plan(
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
    )
    return run_plan(log_prob, rollout_log_prob, mask, plan=plan)


def compute_offpolicy_metrics(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    timesteps: Shaped[Tensor, "..."] | None = None,
) -> dict[str, float]:
    """The diagnostics alone: perplexities, KL, chi-squared, mean and largest ``|l|``; prefixed ``rollout_corr/``."""
    return run_plan(log_prob, rollout_log_prob, mask, plan=CorrectionPlan(), timesteps=timesteps).metrics


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
    found = correct(log_prob, rollout_log_prob, mask, timesteps, plan=plan, row_bounds=row_bounds)
    x = found.log_ratios
    table, of_criteria = _measure(plan, found)
    sums = None
    if plan.importance is not None and plan.importance.batch_normalize:
        sums = table.sums(metrics.BATCH_NORM_FACTOR)
        # The mean covers the whole batch, which may be spread over ranks.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums, group=dp_group)
    gaps = None if timesteps is None else (x.log_prob.double() - x.rollout_log_prob.double()).abs()
    valid = None if timesteps is None else x.valid
    # Everything that the host needs crosses together: this is the one wait for the device.
    parts = (table.totals(), of_criteria.totals(), sums, found.row_bounds, gaps, valid, timesteps)
    totals, criterion_totals, sums, bounds, *of_elements = _to_host(*parts)
    for row, bound in enumerate(bounds):
        if not 0 < bound < math.inf:
            raise ValueError(f"rollout_rs_bounds: row {row} has {bound}; give positive, finite numbers.")
    figures = table.figures(totals) | of_criteria.figures(criterion_totals) | metrics.gaps_by_timestep(*of_elements)
    elements, log_ratio_sum = figures["kl"].numbers
    # Every NaN or infinite log-prob is in the sum of l, so that no element has to be looked at.
    if not math.isfinite(log_ratio_sum):
        m = None if mask is None else _by_row(mask)
        raise NonFiniteLogProbError(_by_row(log_prob), _by_row(rollout_log_prob), m)
    if elements == 0:
        raise ValueError("The mask has no valid element: there is nothing to correct.")
    weights = found.weights
    if weights is not None and sums:
        figures[metrics.BATCH_NORM_FACTOR] = metrics.Figure(metrics.batch_divisor, tuple(sums))
        weights = weights / figures[metrics.BATCH_NORM_FACTOR].value
    # In the mask's own dtype and with its values, which need not be 0 and 1.
    kept = found.keep if mask is None else mask.masked_fill(~found.keep, 0)
    return weights, kept, Moments(plan, figures)


class Corrected(NamedTuple):
    """Weights and rejection of a batch before anything is measured, in the shape of its log-probs."""

    weights: Float[Tensor, "..."] | None
    """Not normalised over the batch; ``None`` without ``rollout_is``."""
    keep: Bool[Tensor, "..."]
    log_ratios: LogRatios
    importance: ImportanceWeights | None
    rejection: Rejection
    row_bounds: Float[Tensor, " B"] | None


@torch.no_grad()
def correct(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    timesteps: Shaped[Tensor, "..."] | None = None,
    *,
    plan: CorrectionPlan,
    row_bounds: Float[Tensor, "..."] | None = None,
) -> Corrected:
    """Weights, and a rejection that includes that of ``rollout_is_mode=mask``, without waiting for the device.

    Values that are not finite are not refused here.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices, as ``run_plan``.
    """
    _check(log_prob, rollout_log_prob, mask, timesteps)
    row_bounds = _check_row_bounds(row_bounds, log_prob) if plan.calibrated else None
    x = LogRatios(_by_row(log_prob), _by_row(rollout_log_prob), None if mask is None else _by_row(mask))
    rejection = rejection_mask(x, plan, row_bounds)
    importance = weights = None
    if plan.importance is not None:
        # Of the unmasked ratio: weights and rejection do not depend on each other.
        importance = importance_weights(x, plan.importance)
        weights = importance.weight
        # In the compute dtype; multiplied by the mask, as weights of rows are finite.
        if weights.dim() == 1:
            weights = weights.to(x.log_ratio.dtype).unsqueeze(1) * x.valid
        weights = weights.view_as(log_prob)
        if plan.importance.rejects:
            inside = by_element(~(importance.low | importance.high))
            rejection = rejection._replace(keep=rejection.keep & inside)
    return Corrected(weights, rejection.keep.view_as(log_prob), x, importance, rejection, row_bounds)


@torch.inference_mode()  # cheaper operations; no tensor of the tables reaches a caller
def _measure(plan: CorrectionPlan, found: Corrected) -> tuple[metrics.MetricTable, metrics.MetricTable]:
    """Every metric of a plan; those of single criteria in a table of their own."""
    x = found.log_ratios
    # verl leaves rows without a valid element out of a criterion's metrics and counts them in all others.
    nonempty = x.sizes > 0
    of_criteria = metrics.MetricTable(x.valid, x.sizes, nonempty)
    table = metrics.MetricTable(x.valid, x.sizes, torch.ones_like(nonempty) if plan.counts_empty_rows else nonempty)
    for verdict in found.rejection.verdicts:
        metrics.criterion_metrics(of_criteria, verdict, x)
    if plan.importance is not None and found.importance is not None:
        metrics.weight_metrics(table, plan.importance, found.importance, x)
    if plan.can_reject:
        metrics.rejection_metrics(table, found.rejection, x)
    metrics.diagnostics(table, x)
    return table, of_criteria


def _by_row(values: Tensor) -> Tensor:
    """``(B,)`` as ``(B, 1)``."""
    return values.reshape(len(values), -1)


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
    for name, other in (("rollout_log_prob", rollout_log_prob), ("mask", mask), ("timesteps", timesteps)):
        if other is not None and other.shape != shape:
            raise ValueError(f"log_prob has shape {tuple(shape)}, but {name} has shape {tuple(other.shape)}.")
        # Moving it here would be a silent transfer at every step.
        if other is not None and other.device != log_prob.device:
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
