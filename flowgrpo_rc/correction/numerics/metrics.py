"""Metrics as functions of moments, under verl's names (SPEC section 5, ``docs/rollout_correction.md``)."""

import math

from flowgrpo_rc.correction.numerics.moments import Moments
from flowgrpo_rc.correction.numerics.weights import batch_divisor
from flowgrpo_rc.correction.plan import SAFETY_BOUND, WEIGHT_MODES, Criterion, ImportanceSampling

PREFIX = "rollout_corr/"
Metrics = dict[str, float]


def metrics_from_moments(moments: Moments, prefix: str = PREFIX) -> Metrics:
    """Every metric that the moments' options give, as Python floats."""
    plan = moments.plan
    n = moments.count
    rows = moments.rows
    out: Metrics = {}
    if plan.importance is not None:
        out |= _importance(plan.importance, moments)
    for criterion in plan.criteria:
        out |= _criterion(criterion, moments)
    if plan.can_reject:
        out["rollout_rs_masked_fraction"] = moments.figures["rejected"].sum / n
        out["rollout_rs_seq_masked_fraction"] = moments.figures["any_rejected"].sum / rows
    if plan.log_veto is not None:
        out["rollout_is_veto_fraction"] = moments.figures["veto"].sum / rows
        out["rollout_is_catastrophic_token_fraction"] = moments.sums["veto"] / n
    out |= _off_policy(moments)
    out |= _timestep_gaps(moments)
    return {prefix + name: value for name, value in out.items()}


def _off_policy(moments: Moments) -> Metrics:
    total = moments.sums
    figures = moments.figures
    n = moments.count
    rows = moments.rows
    averaged = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl")
    averaged += ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")
    return {
        **{name: figures[name].sum / rows for name in averaged},
        "chi2_seq": figures["row_ratio"].square / rows - 1.0,
        "log_ppl_diff_max": figures["log_ppl_diff"].largest,
        "log_ppl_diff_min": figures["log_ppl_diff"].smallest,
        "kl": -total["log_ratio"] / n,
        "k3_kl": total["k3"] / n,
        "chi2_token": (total["excess_squared"] + 2.0 * total["excess"]) / n,  # r^2 - 1
        "logprob_abs_diff_mean": total["log_ratio_abs"] / n,
        "logprob_abs_diff_max": max(figures["largest_log_ratio"].largest, -figures["least_log_ratio"].smallest),
    }


def _timestep_gaps(moments: Moments) -> Metrics:
    """Mean ``|l|`` by the timestep's name; values that six digits do not tell apart share one."""
    sums: dict[str, tuple[float, float]] = {}
    for t, (gap, count) in moments.timesteps.items():
        name = f"logprob_abs_diff/ts_{t:.6g}"
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + gap, before[1] + count)
    return {name: gap / count for name, (gap, count) in sums.items()}


def _importance(spec: ImportanceSampling, moments: Moments) -> Metrics:
    n = moments.count
    rows = moments.rows
    figures = moments.figures
    row_weight, row_excess, row_low, row_high = (figures[f"is_{name}"] for name in ("weight", "excess", "low", "high"))
    of_elements = (
        method(f"is_{name}") / n
        for name in ("weight", "excess")
        for method in (moments.element_sum, moments.element_square)
    )
    mean, second, variance = _weight_moments(*of_elements)
    _, _, row_variance = _weight_moments(
        row_weight.sum / rows, row_weight.square / rows, row_excess.sum / rows, row_excess.square / rows
    )
    low = moments.element_sum("is_low") / n
    high = moments.element_sum("is_high") / n
    if spec.level == "token":
        smallest = figures["is_smallest"].smallest
        largest = figures["is_largest"].largest
        ratio_low = low
        ratio_high = high
    else:
        smallest = figures["is_ratio"].smallest
        largest = figures["is_ratio"].largest
        ratio_low = row_low.sum / rows
        ratio_high = row_high.sum / rows
    out = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(variance) if n > 1 else 0.0,
        "rollout_is_min": smallest,
        "rollout_is_max": largest,
        "rollout_is_eff_sample_size": mean * mean / second if second > 0.0 and mean > 0.0 else 0.0,
        "rollout_is_ratio_fraction_high": ratio_high,
        "rollout_is_ratio_fraction_low": ratio_low,
        "rollout_is_seq_mean": row_weight.sum / rows,
        "rollout_is_seq_std": math.sqrt(row_variance * rows / (rows - 1.0)) if rows > 1 else 0.0,
        "rollout_is_seq_min": row_weight.smallest,
        "rollout_is_seq_max": row_weight.largest,
        "rollout_is_seq_max_deviation": max(row_excess.largest, -row_excess.smallest),
        "rollout_is_seq_fraction_high": row_high.sum / rows,
        "rollout_is_seq_fraction_low": row_low.sum / rows,
    }
    outside = WEIGHT_MODES[spec.mode].outside_metric
    if outside is not None:
        out[outside] = low + high
    if spec.batch_normalize:
        out["rollout_is_batch_norm_factor"] = moments.divisor or _merged_divisor(spec, moments)
    return out


def _weight_moments(
    weight: float, weight_square: float, excess: float, excess_square: float
) -> tuple[float, float, float]:
    """Mean of ``w``, mean of ``w^2`` and variance of ``w``, from means: near 1 from those of ``w - 1``."""
    if weight <= 0.5:
        return weight, weight_square, max(weight_square - weight * weight, 0.0)
    return 1.0 + excess, 1.0 + 2.0 * excess + excess_square, max(excess_square - excess * excess, 0.0)


def _merged_divisor(spec: ImportanceSampling, moments: Moments) -> float:
    if spec.level == "token":
        return batch_divisor(moments.sums["is_weight"], moments.sums["is_excess"], moments.count)
    return batch_divisor(moments.figures["is_weight"].sum, moments.figures["is_excess"].sum, moments.rows)


def _criterion(c: Criterion, moments: Moments) -> Metrics:
    n = moments.count
    rows = moments.rows
    figures = moments.figures
    row = figures[f"{c.name}/statistic"]
    row_below = figures[f"{c.name}/below"].sum / rows
    row_above = figures[f"{c.name}/above"].sum / rows
    element_below = moments.element_sum(f"{c.name}/below") / n
    element_above = moments.element_sum(f"{c.name}/above") / n
    inside = moments.element_sum(f"{c.name}/inside") / n
    variance = moments.element_square(f"{c.name}/inside") / n - inside * inside
    if c.aggregate == "token":
        smallest, largest = _element_extremes(c, moments)
        below = element_below
        above = element_above
        rows_rejected = figures[f"{c.name}/rejected"].sum / rows
    else:
        smallest = row.smallest
        largest = row.largest
        below = row_below
        above = row_above
        rows_rejected = below + above
    if c.statistic == "k1" and not c.mirrored:  # k1 = -l: below its bounds are the large ratios
        below, above = above, below
        row_below, row_above = row_above, row_below
    row_mean = row.sum / rows
    row_variance = max(row.square / rows - row_mean * row_mean, 0.0)
    out = {
        "max": largest,
        "min": smallest,
        "mean": moments.element_sum(f"{c.name}/statistic") / n,
        "std": math.sqrt(max(variance, 0.0)) if n > 1 else 0.0,
        "masked_fraction": element_below + element_above,
        "fraction_high": above,
        "fraction_low": below,
        "seq_mean": row_mean,
        "seq_std": math.sqrt(row_variance * rows / (rows - 1.0)) if rows > 1 else 0.0,
        "seq_max": row.largest,
        "seq_min": row.smallest,
        "seq_max_deviation": max(abs(row.largest), abs(row.smallest)),
        "seq_masked_fraction": rows_rejected,
        "seq_fraction_high": row_above,
    }
    if c.statistic == "k1":
        out["seq_fraction_low"] = row_below
    return {f"rollout_rs_{c.name}_{name}": value for name, value in out.items()}


def _element_extremes(c: Criterion, moments: Moments) -> tuple[float, float]:
    """Smallest and largest statistic of an element."""
    if c.statistic != "k1":
        return moments.figures[f"{c.name}/smallest"].smallest, moments.figures[f"{c.name}/largest"].largest
    ends = (moments.figures["least_log_ratio"].smallest, moments.figures["largest_log_ratio"].largest)
    least, most = (min(max(end, -SAFETY_BOUND), SAFETY_BOUND) for end in ends)
    return -most, -least
