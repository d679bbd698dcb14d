"""Metrics as functions of moments, under verl's names (and slime's on request)."""

import math
from functools import lru_cache
from typing import Any

from flowgrpo_rc.correction.numerics.moments import Moments
from flowgrpo_rc.correction.plan import SAFETY_BOUND, Criterion, ImportanceSampling

PREFIX = "rollout_corr/"
Figures = dict[str, float]


def metrics_from_moments(moments: Moments, prefix: str = PREFIX) -> Figures:
    """Every metric that the moments' options give, as Python floats."""
    total = dict(zip(moments.names, moments.sums, strict=True))
    low = dict(zip(moments.ranged, moments.minima, strict=True))
    high = dict(zip(moments.ranged, moments.maxima, strict=True))
    out: Figures = {}
    spec = moments.plan.importance
    if spec is not None:
        out.update(_importance(spec, total, low, high, moments.divisor))
    for criterion in moments.plan.criteria:
        out.update(_criterion(criterion, total, low, high))
    if "kept" in total:
        out["rollout_rs_masked_fraction"] = 1.0 - total["kept"] / total["n"]
        out["rollout_rs_seq_masked_fraction"] = total["any_rejected"] / total["rows"]
    if moments.plan.log_veto is not None:
        out["rollout_is_veto_fraction"] = total["veto_row"] / total["valid_rows"]
        out["rollout_is_catastrophic_token_fraction"] = total["veto_low"] / total["n"]
    out.update(_offpolicy(total, low, high))
    out.update(_timestep_gaps(moments.timesteps))
    full = _full_names(tuple(out), prefix)
    return dict(zip(full, out.values(), strict=True))


def _timestep_gaps(timesteps: dict[float, tuple[float, float]]) -> Figures:
    """Mean `|l|` by the timestep's name; values that six digits do not tell apart share one."""
    sums: dict[str, tuple[float, float]] = {}
    for t, (gap, count) in timesteps.items():
        name = f"logprob_abs_diff/ts_{t:.6g}"
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + gap, before[1] + count)
    return {name: gap / count for name, (gap, count) in sums.items()}


@lru_cache(maxsize=64)
def _full_names(names: tuple[str, ...], prefix: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def _offpolicy(total: Figures, low: Figures, high: Figures) -> Figures:
    n, rows = total["n"], total["rows"]
    by_row = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl")
    by_row += ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq")
    return {
        **{name: total[name] / rows for name in by_row},
        "log_ppl_diff_max": high["log_ppl_diff"],
        "log_ppl_diff_min": low["log_ppl_diff"],
        "kl": -total["l"] / n,
        "k3_kl": total["k3"] / n,
        "chi2_token": (total["e2"] + 2.0 * (total["k3"] + total["lc"])) / n,
        "logprob_abs_diff_mean": total["abs"] / n,
        "logprob_abs_diff_max": max(high["l_max"], -low["l_min"]),
    }


def _importance(
    spec: ImportanceSampling, total: Figures, low: Figures, high: Figures, divisor: float | None
) -> Figures:
    n, rows = total["n"], total["rows"]
    token = spec.level == "token"
    mean_d, mean_d2 = total["d" if token else "row_d*n"] / n, total["d2" if token else "row_din2*n"] / n
    mean, second = total["w" if token else "is_w"] / n, total["w2" if token else "is_w2"] / n
    variance = mean_d2 - mean_d * mean_d
    if mean <= 0.5:  # near 0, `w` is the more exact; near 1, `d`
        variance = second - mean * mean
    elif token:
        mean, second = 1.0 + mean_d, 1.0 + 2.0 * mean_d + mean_d2
    share = n if token else rows
    smallest, largest = _extreme_weights(spec, total, low, high)
    out = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(max(variance, 0.0)) if n > 1 else 0.0,
        "rollout_is_min": smallest,
        "rollout_is_max": largest,
        "rollout_is_eff_sample_size": mean * mean / second if second > 0.0 and mean > 0.0 else 0.0,
        "rollout_is_ratio_fraction_high": total["is_high"] / share,
        "rollout_is_ratio_fraction_low": total["is_low"] / share,
        "rollout_is_seq_mean": 1.0 + total["row_d"] / rows,
        "rollout_is_seq_std": _sample_std(total["row_d"], total["row_d2"], rows),
        "rollout_is_seq_min": 1.0 + low["row_d"],
        "rollout_is_seq_max": 1.0 + high["row_d"],
        "rollout_is_seq_max_deviation": max(high["row_d"], -low["row_d"]),
        "rollout_is_seq_fraction_high": total["row_raw>" if token else "is_seq_high"] / rows,
        "rollout_is_seq_fraction_low": total["row_raw<" if token else "is_seq_low"] / rows,
    }
    if spec.mode in ("zero", "mask"):
        elements = "is_" if token else "is_elements_"
        outside = total[f"{elements}high"] + (total[f"{elements}low"] if spec.lower > 0 else 0.0)
        name = "rollout_is_oob_ratio" if spec.mode == "zero" else "rollout_is_masked_fraction"
        out[name] = outside / n
    if spec.batch_normalize:
        out["rollout_is_batch_norm_factor"] = _divisor(spec, total) if divisor is None else divisor
    return out


def _extreme_weights(spec: ImportanceSampling, total: Figures, low: Figures, high: Figures) -> tuple[float, float]:
    """Smallest and largest weight: as applied ("token"), before the bounds ("sequence", "geometric")."""
    if spec.level != "token":
        return _safe_exp(low["is_log_ratio"]), _safe_exp(high["is_log_ratio"])
    smallest, largest = _safe_exp(low["l_min"]), _safe_exp(high["l_max"])
    if spec.mode == "zero":
        outside = total["is_high"] + total["is_low"] > 0
        return 0.0 if outside else smallest, 1.0 + high["is_d_max"]
    if spec.mode == "mask":
        return smallest, largest
    floor = spec.lower if spec.mode == "clip" else 0.0
    return min(max(smallest, floor), spec.upper), min(max(largest, floor), spec.upper)


def _divisor(spec: ImportanceSampling, total: Figures) -> float:
    """Mean applied weight: over elements ("token") or rows with a valid element."""
    if spec.level == "token":
        mean = total["w"] / total["n"]
        if mean >= 0.5:  # near 1, `d` is the more exact
            mean = 1.0 + total["d"] / total["n"]
    else:
        mean = 1.0 + total["row_d"] / total["rows"]
    return mean if mean > 1e-8 else 1.0


@lru_cache(maxsize=256)
def _criterion_names(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a criterion's moments and of its metrics."""
    moments = [f"{name}/row{kind}" for kind in ("", "2", "<", ">", "!", "*n", "!*n", "in*n", "in2*n")]
    moments += [f"{name}/{part}" for part in ("in", "in2", "below", "above", "touched")]
    return tuple(moments), tuple(f"rollout_rs_{name}_{key}" for key in _CRITERION_METRICS)


_CRITERION_METRICS = (
    *("max", "min", "mean", "std", "masked_fraction", "fraction_high", "fraction_low"),
    *("seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation", "seq_masked_fraction"),
    *("seq_fraction_high", "seq_fraction_low"),
)


def _criterion(c: Criterion, total: Figures, low: Figures, high: Figures) -> Figures:
    n, rows = total["n"], total["valid_rows"]
    moments, metrics = _criterion_names(c.name)
    x, x2, is_below, is_above, is_out, xn, out_n, in_n, in2_n, e_in, e_in2, e_below, e_above, touched = moments
    below, above = total[is_below] / rows, total[is_above] / rows
    row_low, row_high = low[x], high[x]
    if c.aggregate == "token":
        inside, inside2 = total[e_in] / n, total[e_in2] / n
        small, large = total[e_below] / n, total[e_above] / n
        mean = -total["lc"] / n if c.statistic == "k1" else total[c.statistic] / n
        least, most = _element_extremes(c, low, high)
        masked, rows_masked = small + large, total[touched] / rows
    else:
        inside, inside2 = total[in_n] / n, total[in2_n] / n
        small, large = below, above
        mean, least, most = total[xn] / n, row_low, row_high
        masked, rows_masked = total[out_n] / n, total[is_out] / rows
    std = math.sqrt(max(inside2 - inside * inside, 0.0)) if n > 1 else 0.0
    if c.statistic == "k1" and not c.mirrored:  # k1 = -l: below its bounds are the large ratios
        small, large, below, above = large, small, above, below
    values = [most, least, mean, std, masked, large, small, total[x] / rows, _sample_std(total[x], total[x2], rows)]
    values += [row_high, row_low, max(abs(row_high), abs(row_low)), rows_masked, above, below]
    return dict(zip(metrics if c.statistic == "k1" else metrics[:-1], values, strict=False))


def _element_extremes(c: Criterion, low: Figures, high: Figures) -> tuple[float, float]:
    """Smallest and largest element statistic; the largest k2 and k3 lie at an extreme of `l`."""
    ends = [min(max(end, -SAFETY_BOUND), SAFETY_BOUND) for end in (low["l_min"], high["l_max"])]
    if c.statistic == "k1":
        return -ends[1], -ends[0]
    if c.statistic == "k2":
        largest = max(0.5 * end * end for end in ends)
    else:
        largest = max(math.expm1(end) - end for end in ends)
    return low[f"{c.name}/min"], largest


def _safe_exp(x: float) -> float:
    return math.exp(min(max(x, -SAFETY_BOUND), SAFETY_BOUND))


def _sample_std(total: float, squares: float, count: float) -> float:
    """Unbiased standard deviation from sums; 0 for fewer than two values."""
    if count < 2:
        return 0.0
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1))


_SLIME_NAMES = {
    "mismatch_training_log_ppl": "training_log_ppl",
    "mismatch_training_ppl": "training_ppl",
    "mismatch_rollout_log_ppl": "rollout_log_ppl",
    "mismatch_rollout_ppl": "rollout_ppl",
    "mismatch_kl": "kl",
    "mismatch_k3_kl": "k3_kl",
    "mismatch_log_ppl_diff": "log_ppl_diff",
    "mismatch_log_ppl_abs_diff": "log_ppl_abs_diff",
    "mismatch_ppl_ratio": "ppl_ratio",
    "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
}
_SLIME_VETO = {
    "mis_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
    "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
}
_SLIME_FRACTIONS = {
    "truncate": (("mis_truncate_fraction", "high"),),
    "clip": (("mis_clip_fraction_low", "low"), ("mis_clip_fraction_high", "high")),
    "mask": (("mis_mask_fraction_low", "low"), ("mis_mask_fraction_high", "high")),
    "zero": (("mis_mask_fraction_low", "low"), ("mis_mask_fraction_high", "high")),
}


def slime_metrics(result: Any, *, ppo_ratio_mean: float | None = None) -> Figures:
    """The figures under slime's names (`mismatch_*`, `mis_*`, `train_rollout_logprob_abs_diff`), without a prefix.

    Args:
        result: a `RolloutCorrection` or its `Moments`.
        ppo_ratio_mean: mean of pi_theta / pi_old, which the caller has; reported as `ois`.
    """
    moments: Moments = result if isinstance(result, Moments) else result.moments
    ours = metrics_from_moments(moments, "")
    total = dict(zip(moments.names, moments.sums, strict=True))
    out = {name: ours[source] for name, source in _SLIME_NAMES.items()}
    out.update({name: ours[source] for name, source in _SLIME_VETO.items() if source in ours})
    spec = moments.plan.importance
    if spec is not None:
        elements = "is_" if spec.level == "token" else "is_elements_"
        # the sum of exp(lc) = k3 + lc + 1 per element
        raw = total["k3"] + total["lc"] + total["n"] if spec.level == "token" else total["is_raw"]
        out["mis_mean_is_weight_before_clip"] = raw / total["n"]
        out["mis_ratio_mean_after_mis"] = ours["rollout_is_mean"]
        for name, side in _SLIME_FRACTIONS[spec.mode]:
            out[name] = total[f"{elements}{side}"] / total["n"]
        if spec.batch_normalize:
            out["mis_batch_norm_factor"] = ours["rollout_is_batch_norm_factor"]
    if ppo_ratio_mean is not None:
        out["ois"] = ppo_ratio_mean
    return out
