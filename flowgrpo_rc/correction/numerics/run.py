"""One pass over a batch: a plan's weights and rejection in blocks of rows, and one transfer of all figures."""

import functools
import math
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics import diagnostics, rejection
from flowgrpo_rc.correction.numerics import weights as importance_sampling
from flowgrpo_rc.correction.numerics.elements import Elements, make_elements
from flowgrpo_rc.correction.numerics.figures import Figures
from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import Moments, RolloutCorrection
from flowgrpo_rc.correction.plan import CorrectionPlan

HOST_BLOCK = 1 << 17
"""Elements of a block in host memory, where its tensors should stay in a core's cache."""
DEVICE_BLOCK = 1 << 19
"""Elements of a block on an accelerator, which larger blocks keep busy."""


class NonFiniteLogProbError(ValueError):
    """Some valid log-prob is NaN or infinite; says how many are, and where the first is.

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
        row, column = positions[0].tolist()
        super().__init__(
            f"{len(positions)} of {p.numel()} positions have a NaN or infinite log-prob where the mask is valid; "
            f"the first is ({row}, {column}): log_prob={p[row, column].item()}, "
            f"rollout_log_prob={q[row, column].item()}."
        )


@torch.no_grad()
def run_plan(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None = None,
    *,
    plan: CorrectionPlan,
    row_bounds: Float[Tensor, "..."] | None = None,
    timesteps: Shaped[Tensor, "..."] | None = None,
    dp_group: Any = None,
) -> RolloutCorrection:
    """Executes a plan.

    Args:
        row_bounds: ``(B,)``, for ``rollout_rs_threshold=auto`` alone: the rejection bound of every row, on the size of
            the aggregated log ratio for k1 and on the statistic for k2 and k3.

    Raises:
        TypeError, ValueError: as ``compute_rollout_correction_and_rejection_mask``; row bounds that are missing, of
            another shape, or not positive and finite.
    """
    _check(log_prob, rollout_log_prob, mask, timesteps)
    row_bounds = _check_row_bounds(row_bounds, log_prob) if plan.calibrated else None
    p, q, m, t = (
        None if x is None else x.unsqueeze(1) if x.dim() == 1 else x
        for x in (log_prob, rollout_log_prob, mask, timesteps)
    )
    assert p is not None
    assert q is not None
    weights, kept, totals, names = _correct(plan, p, q, m, row_bounds)
    numbers = [part.flatten() for total in totals for part in total]
    more: dict[str, Tensor] = {}
    if plan.importance is not None and plan.importance.batch_normalize:
        sums = torch.stack([sums for sums, _, _ in totals]).sum(0)
        by_name = (dict(zip(names, line, strict=True)) for line in sums)
        more["divisor"] = torch.stack(importance_sampling.weight_sums(plan.importance, *by_name))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(more["divisor"], group=dp_group)
    if row_bounds is not None:
        more["row_bounds"] = row_bounds.double()
    if t is not None:
        more["timesteps"] = diagnostics.timestep_table(p, q, m, t)
    host = iter(torch.cat([*numbers, *more.values()]).to("cpu").tolist())  # the one transfer
    moments = functools.reduce(Moments.merge, [Moments.read(plan, names, host) for _ in totals])
    rest = {name: list(islice(host, len(values))) for name, values in more.items()}
    _check_bound_values(rest.get("row_bounds", []))
    if rest:
        moments = replace(
            moments,
            divisor=importance_sampling.batch_divisor(*rest["divisor"]) if "divisor" in rest else None,
            timesteps=diagnostics.gaps_by_timestep(rest.get("timesteps", [])),
        )
    if not moments.finite:
        raise NonFiniteLogProbError(p, q, m)
    if moments.count == 0:
        raise ValueError("The mask has no valid element: there is nothing to correct.")
    if weights is not None and moments.divisor is not None:
        weights.div_(moments.divisor)
    if log_prob.dim() == 1:
        weights = None if weights is None else weights.squeeze(1)
        kept = kept.squeeze(1)
    return RolloutCorrection(weights, kept, metrics_from_moments(moments), moments)


@torch.no_grad()
def weights_and_mask(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    *,
    plan: CorrectionPlan,
    row_bounds: Float[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "..."] | None, Bool[Tensor, "..."]]:
    """The weights and the mask of ``run_plan``, and nothing that is measured: it does not wait for the device.

    What is not finite is not refused here; weights are not normalised over the batch.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices, as ``run_plan``.
    """
    _check(log_prob, rollout_log_prob, None, None)
    row_bounds = _check_row_bounds(row_bounds, log_prob) if plan.calibrated else None
    two_dimensional = (len(log_prob), -1)
    weights, kept, _, _ = _correct(
        plan, log_prob.reshape(two_dimensional), rollout_log_prob.reshape(two_dimensional), None, row_bounds
    )
    return None if weights is None else weights.view_as(log_prob), kept.view_as(log_prob)


def _correct(
    plan: CorrectionPlan, p: Tensor, q: Tensor, m: Tensor | None, row_bounds: Tensor | None
) -> tuple[Tensor | None, Tensor, list[tuple[Tensor, Tensor, Tensor]], list[str]]:
    """Weights and mask of a whole batch, both where its log-probs are, and each block's figures with their names."""
    dtype = torch.float64 if torch.float64 in (p.dtype, q.dtype) else torch.float32
    weights = None if plan.importance is None else p.new_empty(p.shape, dtype=dtype)
    kept = p.new_ones(p.shape, dtype=torch.bool) if m is None else m.clone(memory_format=torch.contiguous_format)
    totals: list[tuple[Tensor, Tensor, Tensor]] = []
    names: list[str] = []
    rows_at_once = max(1, (HOST_BLOCK if p.device.type == "cpu" else DEVICE_BLOCK) // p.shape[1])
    with torch.inference_mode():  # operations cost less in it; the tensors that are returned are from outside
        for start in range(0, p.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            x = make_elements(p[rows], q[rows], None if m is None else m[rows], dtype)
            figures = Figures(x)
            made, rejected = _correct_block(plan, x, None if row_bounds is None else row_bounds[rows], figures)
            if weights is not None and made is not None:
                weights[rows].copy_(made.t())
            if rejected is not None:
                kept[rows].masked_fill_(rejected.t() != 0, 0)
            totals.append(figures.totals())
            names = figures.names  # the same for every block
    return weights, kept, totals, names


def _correct_block(
    plan: CorrectionPlan, x: Elements, row_bounds: Float[Tensor, " B"] | None, figures: Figures
) -> tuple[Float[Tensor, "T B"] | None, Float[Tensor, "T B"] | None]:
    """Weights of some rows, and flags of what is rejected; None without weights, or without rejection.

    What elements decide comes first, then their sums, then what rows decide.
    """
    importance = plan.importance
    weights = None
    rejections: list[Tensor] = []
    extremes = {"log_ratio": x.log_ratio}
    diagnostics.add_elements(x, figures)
    if importance is not None and importance.level == "token":
        weights = importance_sampling.weigh_elements(importance, x, figures)
        extremes["is/weight"] = weights.values
    values = rejection.element_statistics(plan.criteria, x, figures)
    for criterion in plan.criteria:
        if criterion.aggregate == "token":
            rejections.append(rejection.judge_elements(criterion, values[criterion.statistic], x, figures))
            if criterion.statistic != "k1":  # whose extremes are those of the log ratio
                extremes[criterion.statistic] = values[criterion.statistic]
    if plan.log_veto is not None:
        rejection.veto_elements(plan.log_veto, x, figures)

    figures.average()
    figures.add_extremes(extremes)
    diagnostics.add_rows(figures)
    if importance is not None and weights is not None:
        importance_sampling.average_weights(importance, figures)
    elif importance is not None:
        weights = importance_sampling.weigh_rows(importance, x, figures)
    if plan.criteria:
        rejections += rejection.judge_rows(plan.criteria, values, row_bounds, figures)
    if plan.log_veto is not None:
        rejections.append(rejection.veto_rows(figures))
    if importance is not None and weights is not None and importance.rejects:
        rejections += [weights.low, weights.high]
    rejected = None
    if rejections:
        rejected = sum(rejections[1:], rejections[0]).clamp(max=1.0)
        if rejected.dim() == 1:
            rejected = rejected.to(x.valid.dtype).expand_as(x.valid)
        count = x.zero_invalid(rejected).sum(0)
        figures.add_rows(("rejected", "any_rejected"), torch.stack([count, count.clamp(max=1.0)]))
    if weights is None:
        return None, rejected
    values = weights.values
    if values.dim() == 1:
        values = x.zero_invalid(values.to(x.valid.dtype).expand_as(x.valid))
    return values, rejected


def _check(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor | None, timesteps: Tensor | None) -> None:
    if not (log_prob.is_floating_point() and rollout_log_prob.is_floating_point()):
        raise TypeError(
            f"log-probs must be floating point, got log_prob {log_prob.dtype} and "
            f"rollout_log_prob {rollout_log_prob.dtype}."
        )
    shape = log_prob.shape
    if len(shape) not in (1, 2):
        raise ValueError(f"log_prob must be (B,) or (B, T), got shape {tuple(shape)}.")
    for name, other in (
        ("log_prob", log_prob),
        ("rollout_log_prob", rollout_log_prob),
        ("mask", mask),
        ("timesteps", timesteps),
    ):
        if other is None:
            continue
        if other.shape != shape:
            raise ValueError(f"log_prob has shape {tuple(shape)}, but {name} has shape {tuple(other.shape)}.")
        if other.device != log_prob.device:
            raise ValueError(f"log_prob is on {log_prob.device}, but {name} is on {other.device}; move one.")
        if other.is_meta or (type(other) is not Tensor and other.untyped_storage().device.type == "meta"):
            raise ValueError(f"{name} is a tensor without memory (fake or meta); give one with data.")
    if log_prob.numel() == 0:
        raise ValueError(f"The batch is empty: log_prob has shape {tuple(shape)}.")


def _check_row_bounds(bounds: Tensor | None, log_prob: Tensor) -> Tensor:
    """The bounds where the log-probs are: a trainer measures them on the host."""
    if bounds is None:
        raise ValueError(
            "rollout_rs_threshold='auto' needs the rejection bound of every row (rollout_rs_bounds in the batch, which "
            "the trainer measures). Outside of it, give numbers."
        )
    if bounds.shape != log_prob.shape[:1]:
        raise ValueError(f"rollout_rs_bounds has shape {tuple(bounds.shape)}, expected {tuple(log_prob.shape[:1])}.")
    return bounds.to(log_prob.device, non_blocking=True)


def _check_bound_values(bounds: list[float]) -> None:
    for row, bound in enumerate(bounds):
        if not 0 < bound < math.inf:
            raise ValueError(f"rollout_rs_bounds: row {row} has {bound}; give positive, finite numbers.")
