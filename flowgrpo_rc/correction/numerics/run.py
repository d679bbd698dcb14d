"""One pass over a batch: a plan's weights and rejection in blocks of rows, and one transfer of all figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.diagnostics import (
    add_off_policy_figures,
    add_off_policy_sums,
    gaps_by_timestep,
    timestep_table,
)
from flowgrpo_rc.correction.numerics.elements import Elements, RowSums, flags, make_elements
from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import FigureMoments, Moments, RowFigures, Totals, merge_blocks
from flowgrpo_rc.correction.numerics.rejection import (
    add_row_sums,
    judge_elements,
    judge_rows,
    veto_elements,
    veto_rows,
)
from flowgrpo_rc.correction.numerics.weights import (
    add_element_weight_figures,
    batch_divisor,
    element_weights,
    row_weights,
)
from flowgrpo_rc.correction.plan import CorrectionPlan, ImportanceSampling

HOST_BLOCK = 1 << 17
"""Elements of a block in host memory, where its tensors should stay in a core's cache."""
DEVICE_BLOCK = 1 << 19
"""Elements of a block on an accelerator, which larger blocks keep busy."""


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Result of one call; unpacks as ``weights, mask, metrics = result``. Nothing in it carries a gradient."""

    weights: Tensor | None
    """Importance weights, float32 (float64 for float64 input), 0 at invalid elements; None without ``rollout_is``."""
    mask: Tensor
    """``mask * keep`` in the mask's dtype (bool when no mask was given)."""
    metrics: dict[str, float]
    """Named figures, prefixed ``rollout_corr/``."""
    moments: Moments
    """What ``metrics`` derive from; ``MetricAccumulator`` merges it exactly over micro-batches and ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weights, self.mask, self.metrics))


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


class Block(NamedTuple):
    """What a plan makes of some rows."""

    weights: Float[Tensor, "T B"] | None
    keep: Float[Tensor, "T B"] | None
    """Flags of what nothing rejects; ``None`` without rejection."""
    totals: Totals
    sum_names: tuple[str, ...]
    figure_names: list[str]


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
    if plan.calibrated:
        row_bounds = _check_row_bounds(row_bounds, log_prob)
    p, q, m, t = (
        None if x is None else x.unsqueeze(1) if x.dim() == 1 else x
        for x in (log_prob, rollout_log_prob, mask, timesteps)
    )
    assert p is not None
    assert q is not None
    dtype = torch.float64 if torch.float64 in (p.dtype, q.dtype) else torch.float32
    weights = None if plan.importance is None else p.new_empty(p.shape, dtype=dtype)
    kept = p.new_ones(p.shape, dtype=torch.bool) if m is None else m.clone(memory_format=torch.contiguous_format)
    blocks: list[Block] = []
    rows_at_once = max(1, (HOST_BLOCK if p.device.type == "cpu" else DEVICE_BLOCK) // p.shape[1])
    for start in range(0, p.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        x = make_elements(p[rows], q[rows], None if m is None else m[rows], dtype)
        block = _correct_block(plan, x, None if row_bounds is None else row_bounds[rows])
        if weights is not None and block.weights is not None:
            weights[rows].copy_(block.weights.t())
        if block.keep is not None:
            kept[rows].masked_fill_(block.keep.t() == 0, 0)
        blocks.append(block._replace(weights=None, keep=None))  # copied: of large batches two would be many
    block = blocks[-1]  # its names are those of all
    total = merge_blocks([each.totals for each in blocks])
    parts = total._asdict()
    if plan.importance is not None and plan.importance.batch_normalize:
        parts["divisor"] = _sum_over_ranks(_divisor_sums(plan.importance, block, total), dp_group)
    if plan.calibrated and row_bounds is not None:
        parts["row_bounds"] = row_bounds
    if t is not None:
        parts["timesteps"] = timestep_table(p, q, m, t)
    host = _to_host(parts)
    _check_bound_values(host.get("row_bounds", []))
    figures = len(block.figure_names)
    columns = [host[name][i : i + figures] for name in ("figure_sums", "figure_squares") for i in (0, figures)]
    columns += [host["smallest"], host["largest"]]
    moments = Moments(
        plan,
        dict(zip(block.sum_names, host["element_sums"], strict=True)),
        dict(zip(block.figure_names, map(FigureMoments, *columns), strict=True)),
        batch_divisor(*host["divisor"]) if "divisor" in host else None,
        gaps_by_timestep(host.get("timesteps", [])),
    )
    if not moments.finite:
        raise NonFiniteLogProbError(p, q, m)
    if moments.count == 0:
        raise ValueError("The mask has no valid element: there is nothing to correct.")
    if weights is not None:
        if moments.divisor is not None:
            weights.div_(moments.divisor)
        weights = weights.view(log_prob.shape)
    return RolloutCorrection(weights, kept.view(log_prob.shape), metrics_from_moments(moments), moments)


def _correct_block(plan: CorrectionPlan, x: Elements, row_bounds: Float[Tensor, " B"] | None) -> Block:
    """Weights, rejection and figures of some rows: what elements decide, then their sums, then what rows decide."""
    importance = plan.importance
    log_veto = plan.log_veto
    of_elements = [c for c in plan.criteria if c.aggregate == "token"]
    of_rows = [c for c in plan.criteria if c.aggregate != "token"]
    figures = RowFigures()
    sums = RowSums(x)
    weights = None

    add_off_policy_sums(x, sums)
    if importance is not None and importance.level == "token":
        weights = element_weights(importance, x, sums)
    rejections = [judge_elements(criterion, x, sums, figures) for criterion in of_elements]
    add_row_sums(of_rows, x, sums)
    if log_veto is not None:
        veto_elements(log_veto, x, sums)

    rows = sums.rows()
    add_off_policy_figures(rows, figures)
    if importance is None or weights is None:
        figures.add(("least_log_ratio", "largest_log_ratio"), x.extremes(x.log_ratio))
    else:
        names = ("least_log_ratio", "is_smallest", "largest_log_ratio", "is_largest")
        figures.add(names, x.extremes(x.log_ratio, weights.values))
        add_element_weight_figures(importance, rows, figures)
    if importance is not None and weights is None:
        weights = row_weights(importance, x, rows, figures)
    if plan.criteria:
        rejections.append(judge_rows([*of_elements, *of_rows], x, rows, row_bounds, figures))
    if log_veto is not None:
        rejections.append(veto_rows(rows, figures))
    if importance is not None and weights is not None and importance.rejects:
        rejections.append(weights.outside)
    keep = None
    if rejections:
        rejected = sum(rejections[1:], rejections[0])
        keep = flags(torch.eq, rejected, 0).to(x.ones.dtype).expand_as(x.ones)
        count = rows.sum("elements") - x.zero_invalid(keep).sum(0)
        figures.add(("rejected", "any_rejected"), torch.stack([count, count.clamp(max=1.0)]))
    totals = figures.totals(rows, masked=x.away is not None)
    return Block(None if weights is None else weights.values, keep, totals, rows.names, figures.names)


def _divisor_sums(spec: ImportanceSampling, block: Block, total: Totals) -> Float[Tensor, "3"]:
    """Sums of ``w``, of ``w - 1`` and of 1 for batch normalisation: over elements ("token"), else over rows."""
    if spec.level == "token":
        sums = dict(zip(block.sum_names, total.element_sums.unbind(), strict=True))
        return torch.stack([sums["is_weight"], sums["is_excess"], sums["elements"]])
    sums = dict(zip(block.figure_names, total.figure_sums[0].unbind(), strict=True))
    return torch.stack([sums["is_weight"], sums["is_excess"], sums["rows"]])


def _sum_over_ranks(values: Float[Tensor, " sums"], dp_group: Any) -> Float[Tensor, " sums"]:
    """Sums of every rank's values, where there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values, group=dp_group)
    return values


def _to_host(parts: dict[str, Tensor]) -> dict[str, list[float]]:
    """The one transfer: every part flat, as Python floats."""
    flat = [part.double().flatten() for part in parts.values()]
    host = torch.cat(flat).to("cpu").split([len(part) for part in flat])
    return {name: part.tolist() for name, part in zip(parts, host, strict=True)}


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
