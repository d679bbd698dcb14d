"""Rejection with bounds that come with every row: `rollout_rs_threshold=auto`.

A trainer measures the gap between rollout engine and actor and gives every image the bound of its own timesteps
(`rollout_rs_bounds`). Rows of one bound are corrected together; the parts' moments merge exactly.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.compute import NonFiniteLogProbError, RolloutCorrection, run_plan
from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import merge_all
from flowgrpo_rc.correction.plan import CorrectionPlan, Criterion


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """What a row criterion bounds: the size of the sum or mean of `l` for k1; sum, mean or maximum of k2 or k3."""
    l = log_ratio.double()  # noqa: E741
    if criterion.statistic == "k2":
        l = l.square() / 2  # noqa: E741
    elif criterion.statistic == "k3":
        l = torch.expm1(l) - l  # noqa: E741
    rows = {"seq_sum": l.sum(1), "seq_mean": l.mean(1), "seq_max": l.amax(1)}[criterion.aggregate]
    return rows.abs()


def with_bound(plan: CorrectionPlan, bound: float) -> CorrectionPlan:
    """The plan with numbers in place of `auto`: k1 keeps `|aggregate of l| <= bound`, k2 and k3 `<= bound`."""
    fixed = [
        replace(c, upper=bound, lower=-bound if c.statistic == "k1" else c.lower, calibrated=False)
        if c.calibrated
        else c
        for c in plan.criteria
    ]
    return replace(plan, criteria=tuple(fixed))


def run_calibrated(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    mask: Shaped[Tensor, "..."] | None,
    *,
    plan: CorrectionPlan,
    bounds: Float[Tensor, "..."],
    timesteps: Shaped[Tensor, "..."] | None = None,
) -> RolloutCorrection:
    """`run_plan`, with the bound of each row from `bounds`: log ratios for k1, values of the statistic for k2 and k3.

    Raises:
        ValueError: not one bound for each row, or one that is not positive and finite; as `run_plan`.
    """
    if bounds.shape != log_prob.shape[:1]:
        raise ValueError(f"rollout_rs_bounds has shape {tuple(bounds.shape)}, expected {tuple(log_prob.shape[:1])}.")
    groups: dict[float, list[int]] = {}
    for row, bound in enumerate(bounds.tolist()):
        if not 0 < bound < math.inf:
            raise ValueError(f"rollout_rs_bounds: row {row} has {bound}; give positive, finite numbers.")
        groups.setdefault(bound, []).append(row)
    parts: list[tuple[Tensor, RolloutCorrection]] = []
    for bound, members in groups.items():
        rows = torch.tensor(members, device=log_prob.device)
        m, t = (None if x is None else x[rows] for x in (mask, timesteps))
        if m is not None and not (m != 0).any():
            continue  # nothing to correct in these rows, if there is elsewhere
        try:
            part = run_plan(log_prob[rows], rollout_log_prob[rows], m, plan=with_bound(plan, bound), timesteps=t)
        except NonFiniteLogProbError:  # it names a row of the part
            raise NonFiniteLogProbError(log_prob, rollout_log_prob, mask) from None
        parts.append((rows, part))
    if not parts:
        raise ValueError("The mask has no valid element: there is nothing to correct.")
    return _together(log_prob, mask, plan, parts)


def _together(
    log_prob: Tensor, mask: Tensor | None, plan: CorrectionPlan, parts: list[tuple[Tensor, RolloutCorrection]]
) -> RolloutCorrection:
    first: Any = parts[0][1]
    kept = torch.zeros_like(log_prob, dtype=first.mask.dtype) if mask is None else torch.zeros_like(mask)
    weights = None if first.weights is None else torch.zeros_like(log_prob, dtype=first.weights.dtype)
    for rows, part in parts:
        kept[rows] = part.mask
        if weights is not None and part.weights is not None:
            weights[rows] = part.weights
    moments = merge_all(replace(part.moments, plan=plan) for _, part in parts)
    return RolloutCorrection(weights, kept, metrics_from_moments(moments), moments)
