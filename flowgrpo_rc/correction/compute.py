"""Rollout correction of a batch: the public functions. See `docs/rollout_correction.md` for the mathematics.

Ratios are train over rollout everywhere: `l = log_prob - rollout_log_prob`, `r = exp(l)`. `log_prob` belongs to the
policy being trained (pi_old in decoupled mode, pi_theta in bypass mode), `rollout_log_prob` to the behaviour policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.kernel import Block
from flowgrpo_rc.correction.metrics import PREFIX, metrics_from_moments
from flowgrpo_rc.correction.moments import Moments, reduce_rows
from flowgrpo_rc.correction.thresholds import CorrectionPlan, ImportanceSampling, ThresholdSpec, make_plan

if TYPE_CHECKING:
    from flowgrpo_rc.correction.config import RolloutCorrectionConfig

# Elements per block: on a CPU, what stays in a core's cache; on a GPU, what keeps it busy at bounded memory.
_BLOCK_ELEMENTS = {"cpu": 32768, "cuda": 1 << 20}
# Rows up to this long are handled transposed, so that reductions run along the rows' index (contiguous memory).
_TRANSPOSED_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Result of one call; unpacks as `weights, mask, metrics = result`. Nothing in it carries a gradient."""

    weights: Tensor | None
    """Importance weights, float32 (float64 for float64 input), 0 at invalid elements; None without `rollout_is`."""
    mask: Tensor
    """`mask * keep` in the mask's dtype (bool when no mask was given)."""
    metrics: dict[str, float]
    """Named figures, prefixed `rollout_corr/`."""
    moments: Moments
    """What `metrics` derive from; `MetricAccumulator` merges it exactly over micro-batches and ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weights, self.mask, self.metrics))


def compute_rollout_correction_and_rejection_mask(
    log_prob: Float[Tensor, "*batch"],
    rollout_log_prob: Float[Tensor, "*batch"],
    mask: Shaped[Tensor, "*batch"] | None = None,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_is_mode: str | None = None,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
    rollout_token_veto_threshold: float | None = None,
    timesteps: Shaped[Tensor, "*batch"] | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """Importance weights, rejection mask and diagnostics in one pass and one device-to-host transfer.

    Weights: `w = exp(l)` per element ("token"), `exp(sum l)` ("sequence") or `exp(mean l)` ("geometric") per row, the
    exponent clamped to +-20, then truncated, zeroed, clipped or left alone by `rollout_is_mode`. Rejection: every
    criterion of `rollout_rs`, and the veto `l < log(rollout_token_veto_threshold)`, must pass.

    Args:
        log_prob: log-probs under the training policy, `(B, T)`, `(B, W)` or `(B,)`; `(B,)` counts as `(B, 1)`.
        rollout_log_prob: log-probs under the rollout policy.
        mask: non-zero where an element counts; None when all do. Bool, integer or float.
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_is_mode, rollout_rs,
        rollout_rs_threshold, rollout_token_veto_threshold: as in `RolloutCorrectionConfig`.
        timesteps: adds `logprob_abs_diff/ts_{t}`, one mean per distinct value (for SDE steps, not for tokens).
        dp_group: ranks over which batch normalisation averages; None means all of them when `torch.distributed`
            is initialised. `metrics` describe this rank's shard; `MetricAccumulator` merges ranks.

    Raises:
        ValueError: shapes differ or are not 1-D or 2-D, the batch is empty, no element is valid, a valid
            log-prob is NaN or infinite, or an option is invalid.
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
    log_prob: Float[Tensor, "*batch"],
    rollout_log_prob: Float[Tensor, "*batch"],
    mask: Shaped[Tensor, "*batch"] | None = None,
    *,
    config: "RolloutCorrectionConfig",
    timesteps: Shaped[Tensor, "*batch"] | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """`compute_rollout_correction_and_rejection_mask` with the options of a configuration."""
    return run_plan(log_prob, rollout_log_prob, mask, plan=config.plan(), timesteps=timesteps, dp_group=dp_group)


def compute_rollout_correction_weights(
    log_prob: Float[Tensor, "*batch"],
    rollout_log_prob: Float[Tensor, "*batch"],
    mask: Shaped[Tensor, "*batch"] | None = None,
    *,
    rollout_is: str = "token",
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_is_mode: str | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """The importance-sampling part alone; only `rollout_is_mode="mask"` changes the mask."""
    plan = make_plan(rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_is_mode)
    return run_plan(log_prob, rollout_log_prob, mask, plan=plan, dp_group=dp_group)


def compute_rollout_rejection_mask(
    log_prob: Float[Tensor, "*batch"],
    rollout_log_prob: Float[Tensor, "*batch"],
    mask: Shaped[Tensor, "*batch"] | None = None,
    *,
    rollout_rs: str | None = "token_k1",
    rollout_rs_threshold: ThresholdSpec = None,
    rollout_token_veto_threshold: float | None = None,
) -> RolloutCorrection:
    """The rejection part alone; `weights` is None."""
    plan = make_plan(
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
    )
    return run_plan(log_prob, rollout_log_prob, mask, plan=plan)


def compute_offpolicy_metrics(
    log_prob: Float[Tensor, "*batch"],
    rollout_log_prob: Float[Tensor, "*batch"],
    mask: Shaped[Tensor, "*batch"] | None = None,
    *,
    timesteps: Shaped[Tensor, "*batch"] | None = None,
) -> dict[str, float]:
    """The diagnostics alone: perplexities, KL, chi-squared, mean and largest `|l|`; prefixed `rollout_corr/`."""
    return run_plan(log_prob, rollout_log_prob, mask, plan=CorrectionPlan(), timesteps=timesteps).metrics


@torch.no_grad()
def run_plan(
    log_prob: Float[Tensor, "*batch"],
    rollout_log_prob: Float[Tensor, "*batch"],
    mask: Shaped[Tensor, "*batch"] | None = None,
    *,
    plan: CorrectionPlan,
    timesteps: Shaped[Tensor, "*batch"] | None = None,
    dp_group: Any = None,
    count_empty_rows: bool = False,
) -> RolloutCorrection:
    """Executes a plan. `count_empty_rows` averages rows without a valid element as zeros, as verl does."""
    _check(log_prob, rollout_log_prob, mask, timesteps)
    shape = log_prob.shape
    columns = 1 if log_prob.dim() == 1 else shape[1]
    grid = (shape[0], columns)
    p, q = log_prob.detach().view(grid) if log_prob.is_contiguous() else log_prob.detach().reshape(grid), (
        rollout_log_prob.detach().reshape(grid)
    )
    m = None if mask is None else mask.reshape(grid)
    weights, kept, names, table = _run_blocks(p, q, m, plan)
    normaliser = _normalise(weights, table, names, plan.importance, dp_group)
    transfer = [table]
    moments = reduce_rows(
        names, table, plan, masked=m is not None, count_empty_rows=count_empty_rows, normaliser=normaliser,
        timestep_parts=None if timesteps is None else (p, q, m, timesteps.reshape(grid)),
    )
    moments.check(log_prob, rollout_log_prob, mask)
    return RolloutCorrection(
        None if weights is None else weights.view(shape), kept.view(shape), metrics_from_moments(moments), moments
    )
