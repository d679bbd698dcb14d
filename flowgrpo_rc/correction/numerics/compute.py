"""Rollout correction of a batch: the public functions. See ``docs/rollout_correction.md`` for the mathematics.

Ratios are train over rollout everywhere: ``l = log_prob - rollout_log_prob``, ``r = exp(l)``. ``log_prob`` belongs to
the policy being trained (pi_old in decoupled mode, pi_theta in bypass mode), ``rollout_log_prob`` to the behaviour
policy.
"""

from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.moments import RolloutCorrection
from flowgrpo_rc.correction.numerics.run import NonFiniteLogProbError, run_plan
from flowgrpo_rc.correction.plan import CorrectionPlan, ThresholdSpec, make_plan

if TYPE_CHECKING:
    from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig

__all__ = [
    "NonFiniteLogProbError",
    "RolloutCorrection",
    "compute_offpolicy_metrics",
    "compute_rollout_correction",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "run_plan",
]


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
    plan = config.plan()
    # A batch may carry bounds that this configuration does not use.
    bounds = rs_bounds if plan.calibrated else None
    return run_plan(
        log_prob, rollout_log_prob, mask, plan=plan, row_bounds=bounds, timesteps=timesteps, dp_group=dp_group
    )


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
