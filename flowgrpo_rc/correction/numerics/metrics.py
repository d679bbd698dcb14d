"""Metrics as functions of moments, under verl's names (SPEC section 5, ``docs/rollout_correction.md``) and slime's."""

import math
from typing import Any

from flowgrpo_rc.correction.numerics.moments import Moments, RolloutCorrection, merge_over_ranks
from flowgrpo_rc.correction.numerics.weights import batch_divisor, weight_sums
from flowgrpo_rc.correction.plan import SAFETY_BOUND, WEIGHT_MODES, Criterion, ImportanceSampling

PREFIX = "rollout_corr/"
ROUNDING = 2.0**-50
"""Share of the mean square below which a variance is but rounding: that of a deviation of 3e-8 of the mean."""
Metrics = dict[str, float]
_SLIME = {
    **{f"mismatch_{name}": name for name in ("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl")},
    **{f"mismatch_{name}": name for name in ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")},
    "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
    "mis_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
    "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    "mis_ratio_mean_after_mis": "rollout_is_mean",
    "mis_batch_norm_factor": "rollout_is_batch_norm_factor",
}
"""Names of our metrics in slime's MIS helper."""


class MetricAccumulator:
    """Metrics of several micro-batches, and of all ranks, as if they had been one batch.

    Merges the moments of results that were computed with the same options. ``compute`` leaves the accumulator as it
    is; ``reset`` empties it.
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None

    def add(self, result: RolloutCorrection | Moments) -> None:
        """Adds a result or its moments."""
        moments = _moments(result)
        self._moments = moments if self._moments is None else self._moments.merge(moments)

    def reset(self) -> None:
        """Forgets what was added."""
        self._moments = None

    def compute(self, dp_group: Any = None, *, prefix: str = PREFIX, slime: bool = False) -> Metrics:
        """Metrics of everything added, on all ranks; empty when nothing was added anywhere.

        With ``torch.distributed`` initialised this is a collective over ``dp_group`` (None: all ranks), so every rank
        of it must call. ``slime=True`` adds the figures under slime's names.
        """
        moments = merge_over_ranks(self._moments, dp_group)
        if moments is None:
            return {}
        metrics = metrics_from_moments(moments, prefix)
        return {**metrics, **slime_metrics(moments)} if slime else metrics


def _moments(result: RolloutCorrection | Moments) -> Moments:
    return result if isinstance(result, Moments) else result.moments


def slime_metrics(result: RolloutCorrection | Moments, *, ppo_ratio_mean: float | None = None) -> Metrics:
    """The figures under slime's names (``mismatch_*``, ``mis_*``, ...), without a prefix.

    Args:
        result: of a correction, or its ``Moments``.
        ppo_ratio_mean: mean of pi_theta / pi_old, which the caller has; reported as ``ois``.
    """
    moments = _moments(result)
    total = moments.elements
    n = moments.count
    ours = metrics_from_moments(moments, "")
    out = {name: ours[source] for name, source in _SLIME.items() if source in ours}
    spec = moments.plan.importance
    if spec is not None:
        token = spec.level == "token"
        out["mis_mean_is_weight_before_clip"] = 1.0 + total["excess"] / n if token else total["rows/is/ratio"] / n
        for name, side in WEIGHT_MODES[spec.mode].slime_fractions.items():
            out[name] = total[f"is/{side}" if token else f"rows/is/{side}"] / n
    if ppo_ratio_mean is not None:
        out["ois"] = ppo_ratio_mean
    return out


def metrics_from_moments(moments: Moments, prefix: str = PREFIX) -> Metrics:
    """Every metric that the moments' options give, as Python floats."""
    plan = moments.plan
    n = moments.count
    rows = moments.row_count
    out: Metrics = {}
    if plan.importance is not None:
        out |= _importance(plan.importance, moments)
    for criterion in plan.criteria:
        out |= _criterion(criterion, moments)
    if plan.can_reject:
        out["rollout_rs_masked_fraction"] = moments.rows["rejected"] / n
        out["rollout_rs_seq_masked_fraction"] = moments.rows["any_rejected"] / rows
    if plan.log_veto is not None:
        out["rollout_is_veto_fraction"] = moments.rows["rows/veto"] / rows
        out["rollout_is_catastrophic_token_fraction"] = moments.elements["veto"] / n
    out |= _off_policy(moments)
    out |= _timestep_gaps(moments)
    return {prefix + name: value for name, value in out.items()}


def _off_policy(moments: Moments) -> Metrics:
    total = moments.elements
    of_rows = moments.rows
    n = moments.count
    rows = moments.row_count
    return {
        "training_ppl": of_rows["training_ppl"] / rows,
        "training_log_ppl": -of_rows["log_prob"] / rows,
        "rollout_ppl": of_rows["rollout_ppl"] / rows,
        "rollout_log_ppl": -of_rows["rollout_log_prob"] / rows,
        "log_ppl_diff": -of_rows["log_ratio"] / rows,
        "log_ppl_abs_diff": of_rows["log_ppl_abs_diff"] / rows,
        "log_ppl_diff_max": -moments.smallest["log_ratio"],
        "log_ppl_diff_min": -moments.largest["log_ratio"],
        "ppl_ratio": of_rows["ppl_ratio"] / rows,
        "kl": -total["log_ratio"] / n,
        "k3_kl": total["k3"] / n,
        "chi2_token": (total["excess_squared"] + 2.0 * total["excess"]) / n,  # r^2 - 1
        "chi2_seq": of_rows["row_ratio_squared"] / rows - 1.0,
        "logprob_abs_diff_mean": total["log_ratio_abs"] / n,
        "logprob_abs_diff_max": max(moments.largest["log_ratio/most"], -moments.smallest["log_ratio/least"]),
    }


def _timestep_gaps(moments: Moments) -> Metrics:
    """Mean ``|l|`` by the timestep's name; values that six digits do not tell apart share one."""
    sums: dict[str, tuple[float, float]] = {}
    for t, (gap, count) in moments.timesteps.items():
        name = f"logprob_abs_diff/ts_{t:.6g}"
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + gap, before[1] + count)
    return {name: gap / count for name, (gap, count) in sums.items()}


def _deviation(square: float, mean: float, count: float) -> float:
    """Standard deviation of several values, from their mean square and mean; 0 where it drowns in rounding."""
    variance = square - mean * mean
    return math.sqrt(variance) if count > 1 and variance > ROUNDING * square else 0.0


def _importance(spec: ImportanceSampling, moments: Moments) -> Metrics:
    n = moments.count
    rows = moments.row_count
    token = spec.level == "token"
    # of an element without a weight of its own everything is its row's
    own = "is/" if token else "rows/is/"
    mean, square, deviation = _weight_moments(moments.elements, own, n)
    row_mean, _, row_deviation = _weight_moments(moments.rows, "rows/is/", rows)
    low, high = (moments.elements[f"{own}{side}"] / n for side in ("low", "high"))
    row_low, row_high = (moments.rows[f"rows/is/{side}"] / rows for side in ("low", "high"))
    least = moments.smallest["rows/is/weight"]
    most = moments.largest["rows/is/weight"]
    least_excess = moments.smallest["rows/is/excess"]
    most_excess = moments.largest["rows/is/excess"]
    out = {
        "rollout_is_mean": mean,
        "rollout_is_std": deviation,
        "rollout_is_min": moments.smallest["is/weight/least" if token else "rows/is/ratio"],
        "rollout_is_max": moments.largest["is/weight/most" if token else "rows/is/ratio"],
        "rollout_is_eff_sample_size": mean * mean / square if square > 0.0 and mean > 0.0 else 0.0,
        "rollout_is_ratio_fraction_high": high if token else row_high,
        "rollout_is_ratio_fraction_low": low if token else row_low,
        "rollout_is_seq_mean": row_mean,
        "rollout_is_seq_std": _of_sample(row_deviation, rows),
        "rollout_is_seq_min": least if least < 0.5 else 1.0 + least_excess,
        "rollout_is_seq_max": most if most < 0.5 else 1.0 + most_excess,
        "rollout_is_seq_max_deviation": max(most_excess, -least_excess),
        "rollout_is_seq_fraction_high": row_high,
        "rollout_is_seq_fraction_low": row_low,
    }
    outside = WEIGHT_MODES[spec.mode].outside_metric
    if outside is not None:
        out[outside] = low + high
    if spec.batch_normalize:
        known = batch_divisor(*weight_sums(spec, moments.elements, moments.rows))
        out["rollout_is_batch_norm_factor"] = moments.divisor or known
    return out


def _weight_moments(sums: dict[str, float], start: str, count: float) -> tuple[float, float, float]:
    """Means of ``w`` and of ``w^2`` and deviation of ``w``: near 1 from sums of ``w - 1``."""
    mean, square, excess, excess_square = (
        sums[f"{start}{name}"] / count for name in ("weight", "weight_squared", "excess", "excess_squared")
    )
    if mean <= 0.5:
        return mean, square, _deviation(square, mean, count)
    return 1.0 + excess, 1.0 + 2.0 * excess + excess_square, _deviation(excess_square, excess, count)


def _of_sample(deviation: float, count: float) -> float:
    """The deviation with ``count - 1`` in the denominator; 0 of one value."""
    return deviation * math.sqrt(count / (count - 1.0)) if count > 1 else 0.0


def _criterion(c: Criterion, moments: Moments) -> Metrics:
    n = moments.count
    rows = moments.row_count
    row = f"rows/{c.name}"
    own = c.name if c.aggregate == "token" else row
    inside = moments.elements[f"{own}/inside"] / n
    deviation = _deviation(moments.elements[f"{own}/inside_squared"] / n, inside, n)
    row_mean = moments.rows[f"{row}/statistic"] / rows
    row_deviation = _deviation(moments.rows[f"{row}/statistic_squared"] / rows, row_mean, rows)
    row_low, row_high = _shares_outside(moments.rows, row, rows)
    row_ends = (moments.smallest[f"{row}/statistic"], moments.largest[f"{row}/statistic"])
    if c.aggregate == "token":
        mean = moments.elements[c.statistic] / n
        ends = _element_ends(c, moments)
        low, high = _shares_outside(moments.elements, own, n)
        rows_masked = moments.rows[f"{row}/rejected"] / rows
    else:
        mean = moments.elements[f"{row}/statistic"] / n
        ends = row_ends
        low = row_low
        high = row_high
        rows_masked = low + high
    if c.mirrored:
        low, high = high, low
        row_low, row_high = row_high, row_low
    if c.statistic == "k1":  # what was summed is l, and k1 is -l
        mean = -mean
        row_mean = -row_mean
        ends = (-ends[1], -ends[0])
        row_ends = (-row_ends[1], -row_ends[0])
    start = f"rollout_rs_{c.name}_"
    out = {
        start + "max": ends[1],
        start + "min": ends[0],
        start + "mean": mean,
        start + "std": deviation,
        start + "masked_fraction": moments.elements[f"{own}/outside"] / n,
        start + "fraction_high": high,
        start + "fraction_low": low,
        start + "seq_mean": row_mean,
        start + "seq_std": _of_sample(row_deviation, rows),
        start + "seq_max": row_ends[1],
        start + "seq_min": row_ends[0],
        start + "seq_max_deviation": max(abs(row_ends[0]), abs(row_ends[1])),
        start + "seq_masked_fraction": rows_masked,
        start + "seq_fraction_high": row_high,
    }
    if c.statistic == "k1":
        out[start + "seq_fraction_low"] = row_low
    return out


def _shares_outside(sums: dict[str, float], name: str, count: float) -> tuple[float, float]:
    """Shares of what is below and above a criterion's bounds."""
    outside = sums[f"{name}/outside"]
    side = sums[f"{name}/side"]  # what is above minus what is below
    return (outside - side) / (2.0 * count), (outside + side) / (2.0 * count)


def _element_ends(c: Criterion, moments: Moments) -> tuple[float, float]:
    """Smallest and largest statistic of an element; ``l``, for k1, is within the safety bound."""
    if c.statistic != "k1":
        return moments.smallest[f"{c.statistic}/least"], moments.largest[f"{c.statistic}/most"]
    least = max(moments.smallest["log_ratio/least"], -SAFETY_BOUND)
    most = max(moments.largest["log_ratio/most"], -SAFETY_BOUND)
    return min(least, SAFETY_BOUND), min(most, SAFETY_BOUND)
