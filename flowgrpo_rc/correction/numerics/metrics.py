"""Metrics as functions of moments, under verl's names (SPEC section 5, ``docs/rollout_correction.md``)."""

import math

from flowgrpo_rc.correction.numerics.moments import Moments
from flowgrpo_rc.correction.numerics.rejection import ELEMENT_SUMS, ROW_SUMS
from flowgrpo_rc.correction.numerics.weights import batch_divisor, divisor_sums
from flowgrpo_rc.correction.plan import SAFETY_BOUND, WEIGHT_MODES, Criterion, ImportanceSampling

PREFIX = "rollout_corr/"
Metrics = dict[str, float]


def metrics_from_moments(moments: Moments, prefix: str = PREFIX) -> Metrics:
    """Every metric that the moments' options give, as Python floats."""
    plan, total = moments.plan, moments.sums
    out: Metrics = {}
    if plan.importance is not None:
        out |= _importance(plan.importance, moments)
    for criterion in plan.criteria:
        out |= _criterion(criterion, moments)
    if plan.can_reject:
        out["rollout_rs_masked_fraction"] = total["rejected"] / total["elements"]
        out["rollout_rs_seq_masked_fraction"] = total["rows_rejected"] / total["rows"]
    if plan.log_veto is not None:
        out["rollout_is_veto_fraction"] = total["veto_rows"] / total["rows"]
        out["rollout_is_catastrophic_token_fraction"] = total["veto_elements"] / total["elements"]
    out |= _off_policy(moments)
    out |= _timestep_gaps(moments)
    return {prefix + name: value for name, value in out.items()}


def _off_policy(moments: Moments) -> Metrics:
    total, n = moments.sums, moments.count
    of_rows = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl")
    of_rows += ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")
    return {
        **{name: total[name] / total["rows"] for name in of_rows},
        "chi2_seq": total["row_ratio_squared"] / total["rows"] - 1.0,
        "log_ppl_diff_max": moments.maxima["log_ppl_diff"],
        "log_ppl_diff_min": moments.minima["log_ppl_diff"],
        "kl": -total["log_ratio"] / n,
        "k3_kl": total["k3"] / n,
        "chi2_token": (total["excess_squared"] + 2.0 * total["excess"]) / n,  # r^2 - 1
        "logprob_abs_diff_mean": total["log_ratio_abs"] / n,
        "logprob_abs_diff_max": max(moments.maxima["log_ratio"], -moments.minima["log_ratio"]),
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
    total, n, rows = moments.sums, moments.count, moments.sums["rows"]
    mean, second, variance = _weight_moments(moments, "is_", n)
    _, _, row_variance = _weight_moments(moments, "is_row_", rows)
    low, high = moments.minima, moments.maxima
    ratios, ratio_count = ("is", n) if spec.level == "token" else ("is_row", rows)
    out = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(variance) if n > 1 else 0.0,
        "rollout_is_min": low["is_weight"],
        "rollout_is_max": high["is_weight"],
        "rollout_is_eff_sample_size": mean * mean / second if second > 0.0 and mean > 0.0 else 0.0,
        "rollout_is_ratio_fraction_high": total[f"{ratios}_high"] / ratio_count,
        "rollout_is_ratio_fraction_low": total[f"{ratios}_low"] / ratio_count,
        "rollout_is_seq_mean": total["is_row_weight"] / rows,
        "rollout_is_seq_std": math.sqrt(row_variance * rows / (rows - 1.0)) if rows > 1 else 0.0,
        "rollout_is_seq_min": low["is_row_weight"],
        "rollout_is_seq_max": high["is_row_weight"],
        "rollout_is_seq_max_deviation": max(high["is_row_excess"], -low["is_row_excess"]),
        "rollout_is_seq_fraction_high": total["is_row_high"] / rows,
        "rollout_is_seq_fraction_low": total["is_row_low"] / rows,
    }
    outside = WEIGHT_MODES[spec.mode].outside_metric
    if outside is not None:
        out[outside] = (total["is_low"] + total["is_high"]) / n
    if spec.batch_normalize:
        out["rollout_is_batch_norm_factor"] = moments.divisor or batch_divisor(*divisor_sums(spec, total))
    return out


def _weight_moments(moments: Moments, start: str, count: float) -> tuple[float, float, float]:
    """Mean of ``w``, mean of ``w^2`` and variance of ``w``: from sums of ``w - 1`` near 1, else from those of ``w``."""
    weight, squared, excess, excess_squared = (
        moments.sums[f"{start}{name}"] / count for name in ("weight", "weight_squared", "excess", "excess_squared")
    )
    if weight <= 0.5:
        return weight, squared, max(squared - weight * weight, 0.0)
    return 1.0 + excess, 1.0 + 2.0 * excess + excess_squared, max(excess_squared - excess * excess, 0.0)


def _criterion(c: Criterion, moments: Moments) -> Metrics:
    element = {name: moments.sums[f"{c.name}/{name}"] / moments.count for name in ELEMENT_SUMS}
    count = moments.sums["rows"]
    row = {name: moments.sums[f"{c.name}/{name}"] / count for name in ROW_SUMS}
    row_low, row_high = moments.minima[f"{c.name}/row"], moments.maxima[f"{c.name}/row"]
    low, high, below, above = row_low, row_high, row["row_below"], row["row_above"]
    rows_rejected = below + above
    if c.aggregate == "token":
        low, high = _element_extremes(c, moments)
        below, above = element["below"], element["above"]
        rows_rejected = moments.sums[f"{c.name}/row_rejected"] / count
    row_below, row_above = row["row_below"], row["row_above"]
    if c.statistic == "k1" and not c.mirrored:  # k1 = -l: below its bounds are the large ratios
        below, above = above, below
        row_below, row_above = row_above, row_below
    variance = max(element["inside_squared"] - element["inside"] ** 2, 0.0)
    row_variance = max(row["row_squared"] - row["row"] ** 2, 0.0)
    out = {
        "max": high,
        "min": low,
        "mean": element["statistic"],
        "std": math.sqrt(variance) if moments.count > 1 else 0.0,
        "masked_fraction": element["below"] + element["above"],
        "fraction_high": above,
        "fraction_low": below,
        "seq_mean": row["row"],
        "seq_std": math.sqrt(row_variance * count / (count - 1.0)) if count > 1 else 0.0,
        "seq_max": row_high,
        "seq_min": row_low,
        "seq_max_deviation": max(abs(row_high), abs(row_low)),
        "seq_masked_fraction": rows_rejected,
        "seq_fraction_high": row_above,
    }
    if c.statistic == "k1":
        out["seq_fraction_low"] = row_below
    return {f"rollout_rs_{c.name}_{name}": value for name, value in out.items()}


def _element_extremes(c: Criterion, moments: Moments) -> tuple[float, float]:
    """Smallest and largest element statistic. k2 and k3 are convex: the largest is that of an extreme ``l``."""
    least = max(moments.minima["log_ratio"], -SAFETY_BOUND)
    most = min(moments.maxima["log_ratio"], SAFETY_BOUND)
    if c.statistic == "k1":
        return -most, -least
    if c.statistic == "k2":
        largest = max(least * least, most * most) / 2
    else:
        largest = max(math.expm1(least) - least, math.expm1(most) - most)
    return moments.minima[f"{c.name}/element"], largest
