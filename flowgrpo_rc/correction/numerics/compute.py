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

from flowgrpo_rc.correction.numerics.blocks import run_blocks
from flowgrpo_rc.correction.numerics.layout import Layout, make_layout
from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import Moments, moments_of_table
from flowgrpo_rc.correction.plan import CorrectionPlan, ThresholdSpec, make_plan

if TYPE_CHECKING:
    from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig


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


class NonFiniteLogProbError(ValueError):
    """Some valid log-prob is NaN or infinite; says how many are, and where the first is.

    Args:
        p, q: log-probs `(B, T)` or `(B,)` of the policy being trained and of the rollout.
        m: the mask; None: all are valid.
    """

    def __init__(self, p: Tensor, q: Tensor, m: Tensor | None) -> None:
        if p.dim() == 1:
            p, q, m = p[:, None], q[:, None], None if m is None else m[:, None]
        bad = ~(torch.isfinite(p) & torch.isfinite(q) & torch.isfinite(p.double() - q.double()))
        if m is not None:
            bad &= m != 0
        positions = bad.nonzero()
        if len(positions) == 0:
            super().__init__("Log-probs are too large: the sum of their differences overflows.")
            return
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
    """`compute_rollout_correction_and_rejection_mask` with the options of a configuration.

    `rs_bounds` `(B,)` is read with `rollout_rs_threshold=auto` alone: the rejection bound of every row (`calibrated`).
    """
    plan = config.plan()
    if plan.calibrated and rs_bounds is not None:
        from flowgrpo_rc.correction.numerics.calibrated import run_calibrated

        return run_calibrated(log_prob, rollout_log_prob, mask, plan=plan, bounds=rs_bounds, timesteps=timesteps)
    return run_plan(log_prob, rollout_log_prob, mask, plan=plan, timesteps=timesteps, dp_group=dp_group)


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
    """The importance-sampling part alone; only `rollout_is_mode="mask"` changes the mask."""
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
    """The rejection part alone; `weights` is None."""
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
    """The diagnostics alone: perplexities, KL, chi-squared, mean and largest `|l|`; prefixed `rollout_corr/`."""
    return run_plan(log_prob, rollout_log_prob, mask, plan=CorrectionPlan(), timesteps=timesteps).metrics


def run_plan(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    plan: CorrectionPlan,
    timesteps: Shaped[Tensor, "..."] | None = None,
    dp_group: Any = None,
    count_empty_rows: bool = False,
) -> RolloutCorrection:
    """Executes a plan. `count_empty_rows` averages rows without a valid element as zeros, as verl does."""
    if plan.calibrated:
        raise ValueError(
            "rollout_rs_threshold='auto' needs the rejection bound of every row (rollout_rs_bounds in the batch, which "
            "the trainer measures). Outside of it, give numbers."
        )
    _check(log_prob, rollout_log_prob, mask, timesteps)
    shape = log_prob.shape
    flat = log_prob.dim() == 1
    p, q = (log_prob.unsqueeze(1), rollout_log_prob.unsqueeze(1)) if flat else (log_prob, rollout_log_prob)
    m = mask.unsqueeze(1) if flat and mask is not None else mask
    layout = make_layout(plan, torch.float64 if torch.float64 in (p.dtype, q.dtype) else torch.float32)
    weights, kept, table = run_blocks(p, q, m, layout)
    parts = [table.flatten()]
    if weights is not None and plan.importance is not None and plan.importance.batch_normalize:
        parts.append(_normalise(weights, layout, table, dp_group))
    if timesteps is not None:
        parts.extend(_timestep_parts(p, q, m, timesteps))
    moments = moments_of_table(
        layout, _to_host(parts), rows=shape[0], masked=m is not None, count_empty_rows=count_empty_rows
    )
    if not moments.finite:
        raise NonFiniteLogProbError(p, q, m)
    if moments.count == 0:
        raise ValueError("The mask has no valid element: there is nothing to correct.")
    weights = weights.view(shape) if flat and weights is not None else weights
    kept = kept.view(shape) if flat else kept
    return RolloutCorrection(weights, kept, metrics_from_moments(moments), moments)


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
        if other is not None and other.device != log_prob.device:
            raise ValueError(f"log_prob is on {log_prob.device}, but {name} is on {other.device}; move one.")
    if log_prob.numel() == 0:
        raise ValueError(f"The batch is empty: log_prob has shape {tuple(shape)}.")


def _normalise(weights: Tensor, layout: Layout, table: Float[Tensor, "K B"], dp_group: Any) -> Float[Tensor, "1"]:
    """Divides `weights` by their mean over all ranks, in place, and returns the divisor.

    The mean is over valid elements ("token") or over rows with one ("sequence", "geometric"); at 1e-8 or less
    the weights stay as they are and the divisor is 1. Of elements the table has the sums of `w` and of `d = w - 1`:
    near 1 the latter is the more exact, near 0 the former. Every rank takes the same of the two, by the mean of all.
    """
    row = dict(zip(layout.table, table, strict=True))
    n = row["n"].double()
    if "d" in layout.sums:
        total = torch.stack((row["w"].double().sum(), n.sum(), row["d"].double().sum()))
    else:
        rows = (n > 0).double()
        total = torch.stack(((row["is_row_weight"] * rows).sum(), rows.sum()))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total, group=dp_group)
    count = total[1].clamp(min=1.0)
    mean = total[0] / count
    if "d" in layout.sums:
        mean = torch.where(mean < 0.5, mean, 1.0 + total[2] / count)
    divisor = torch.where(mean > 1e-8, mean, torch.ones_like(mean))
    weights.div_(divisor)
    return divisor.reshape(1)


@torch.no_grad()
def _timestep_parts(p: Tensor, q: Tensor, m: Tensor | None, timesteps: Tensor) -> list[Tensor]:
    """`|l|`, validity and timestep of every element, flat, for grouping on the host."""
    gap = p.double() - q.double()
    valid = torch.ones_like(gap) if m is None else (m != 0).double()
    gap = torch.where(valid > 0, gap.abs(), 0.0)
    return [gap.flatten(), valid.flatten(), timesteps.detach().double().flatten()]


def _to_host(parts: list[Tensor]) -> Float[Tensor, " figures"]:
    """The one transfer: everything the host needs, as one vector."""
    flat = parts[0] if len(parts) == 1 else torch.cat([part.double() for part in parts])
    return flat.to("cpu")
