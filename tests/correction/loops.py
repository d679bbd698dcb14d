"""Slow float64 references, one loop each, written from the formulas and sharing nothing with the library."""

import math

BOUND = 20.0


def clamp(x, low, high):
    return min(max(x, low), high)


def rows_of(log_prob, rollout_log_prob, mask):
    """`l` of the valid elements of each row, and the training log-probs, as lists of floats."""
    out = []
    for p, q, m in zip(log_prob.tolist(), rollout_log_prob.tolist(), mask.tolist(), strict=True):
        valid = [i for i, bit in enumerate(m) if bit]
        out.append(([p[i] - q[i] for i in valid], [p[i] for i in valid], [q[i] for i in valid], valid))
    return out


def weight(log_ratio, mode, lower, upper):
    """One weight from one log ratio (train over rollout)."""
    w = math.exp(clamp(log_ratio, -BOUND, BOUND))
    if mode == "truncate":
        return min(w, upper)
    if mode == "zero":
        return w if lower <= w <= upper else 0.0
    if mode == "clip":
        return clamp(w, lower, upper)
    return w  # "mask"


def weights(log_prob, rollout_log_prob, mask, level, mode, lower, upper):
    """Weights, a list per row, 0 at invalid elements."""
    columns = len(log_prob[0])
    table = []
    for ls, _, _, valid in rows_of(log_prob, rollout_log_prob, mask):
        row = [0.0] * columns
        for i, l in zip(valid, ls, strict=True):  # noqa: E741
            ratio = {"token": l, "sequence": sum(ls), "geometric": sum(ls) / max(len(ls), 1)}[level]
            row[i] = weight(ratio, mode, lower, upper)
        table.append(row)
    return table


def token_k1(l):  # noqa: E741
    return -clamp(l, -BOUND, BOUND)


def token_k2(l):  # noqa: E741
    return 0.5 * clamp(l, -BOUND, BOUND) ** 2


def token_k3(l):  # noqa: E741
    l = clamp(l, -BOUND, BOUND)  # noqa: E741
    return math.expm1(l) - l


STATISTICS = {"k1": token_k1, "k2": token_k2, "k3": token_k3}
AGGREGATES = {
    "seq_sum": sum,
    "seq_mean": lambda values: sum(values) / max(len(values), 1),
    "seq_max": lambda values: max(values, default=0.0),
}


def keeps(value, kind, lower, upper):
    """Whether a statistic passes: k1 by its ratio `exp(-k1)` in [lower, upper], k2 and k3 by `<= upper`."""
    if kind == "k1":
        return math.log(lower) <= -value <= math.log(upper) if lower > 0 else -value <= math.log(upper)
    return value <= upper


def criterion_keep(log_prob, rollout_log_prob, mask, option, lower, upper):
    """1/0 per element, for one criterion."""
    aggregate, _, kind = option.rpartition("_")
    table = []
    for ls, _, _, valid in rows_of(log_prob, rollout_log_prob, mask):
        values = [STATISTICS[kind](l) for l in ls]  # noqa: E741
        row = [0] * len(log_prob[0])
        if aggregate == "token":
            passed = [keeps(v, kind, lower, upper) for v in values]
        else:
            passed = [keeps(AGGREGATES[aggregate](values), kind, lower, upper)] * len(values)
        for i, ok in zip(valid, passed, strict=True):
            row[i] = int(ok)
        table.append(row)
    return table


def veto_keep(log_prob, rollout_log_prob, mask, veto):
    """1/0 per element: a row goes when one of its unclamped ratios is below `veto`."""
    table = []
    for ls, _, _, valid in rows_of(log_prob, rollout_log_prob, mask):
        ok = not any(l < math.log(veto) for l in ls)  # noqa: E741
        table.append([int(ok and i in valid) for i in range(len(log_prob[0]))])
    return table


def mean(values):
    return sum(values) / len(values)


def spread(values):
    """Population standard deviation, two passes."""
    m = mean(values)
    return math.sqrt(mean([(v - m) ** 2 for v in values]))


def sample_std(values):
    if len(values) < 2:
        return 0.0
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1))


def offpolicy(log_prob, rollout_log_prob, mask):
    """Diagnostics, over rows with a valid element."""
    rows = [r for r in rows_of(log_prob, rollout_log_prob, mask) if r[0]]
    ls = [l for r in rows for l in r[0]]  # noqa: E741
    clamped = [clamp(l, -BOUND, BOUND) for l in ls]  # noqa: E741
    train = [-mean(r[1]) for r in rows]
    rollout = [-mean(r[2]) for r in rows]
    diff = [a - b for a, b in zip(train, rollout, strict=True)]
    return {
        "training_ppl": mean([math.exp(clamp(x, -BOUND, BOUND)) for x in train]),
        "training_log_ppl": mean(train),
        "rollout_ppl": mean([math.exp(clamp(x, -BOUND, BOUND)) for x in rollout]),
        "rollout_log_ppl": mean(rollout),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(x) for x in diff]),
        "log_ppl_diff_max": max(diff),
        "log_ppl_diff_min": min(diff),
        "ppl_ratio": mean([math.exp(clamp(x, -BOUND, BOUND)) for x in diff]),
        "kl": -mean(ls),
        "k3_kl": mean([math.expm1(l) - l for l in clamped]),  # noqa: E741
        "chi2_token": mean([math.expm1(2 * l) for l in clamped]),  # noqa: E741
        "chi2_seq": mean([math.expm1(2 * clamp(sum(r[0]), -BOUND, BOUND)) for r in rows]),
        "logprob_abs_diff_mean": mean([abs(l) for l in ls]),  # noqa: E741
        "logprob_abs_diff_max": max(abs(l) for l in ls),  # noqa: E741
    }


def importance(log_prob, rollout_log_prob, mask, level, mode, lower, upper, reported_lower):
    """Metrics of the weights, over rows with a valid element."""
    table = weights(log_prob, rollout_log_prob, mask, level, mode, lower, upper)
    raw = weights(log_prob, rollout_log_prob, mask, level, "mask", lower, upper)
    rows = [
        (w, r, v) for w, r, (_, _, _, v) in zip(table, raw, rows_of(log_prob, rollout_log_prob, mask), strict=True) if v
    ]
    applied = [w[i] for w, _, v in rows for i in v]
    before = [r[i] for _, r, v in rows for i in v]
    row_means = [mean([w[i] for i in v]) for w, _, v in rows]
    raw_means = [mean([r[i] for i in v]) for _, r, v in rows]
    counted = before if level == "token" else raw_means
    extremes = applied if level == "token" else raw_means
    out = {
        "rollout_is_mean": mean(applied),
        "rollout_is_std": spread(applied),
        "rollout_is_min": min(extremes),
        "rollout_is_max": max(extremes),
        "rollout_is_eff_sample_size": mean(applied) ** 2 / mean([w * w for w in applied]) if any(applied) else 0.0,
        "rollout_is_ratio_fraction_high": mean([float(x > upper) for x in counted]),
        "rollout_is_ratio_fraction_low": mean([float(x < reported_lower) for x in counted]),
        "rollout_is_seq_mean": mean(row_means),
        "rollout_is_seq_std": sample_std(row_means),
        "rollout_is_seq_min": min(row_means),
        "rollout_is_seq_max": max(row_means),
        "rollout_is_seq_max_deviation": max(abs(x - 1.0) for x in row_means),
        "rollout_is_seq_fraction_high": mean([float(x > upper) for x in raw_means]),
        "rollout_is_seq_fraction_low": mean([float(x < reported_lower) for x in raw_means]),
    }
    if mode in ("zero", "mask"):
        outside = mean([float(not lower <= x <= upper) for x in before])
        out["rollout_is_oob_ratio" if mode == "zero" else "rollout_is_masked_fraction"] = outside
    return out


def criterion(log_prob, rollout_log_prob, mask, option, lower, upper):
    """Metrics of one criterion, over rows with a valid element."""
    aggregate, _, kind = option.rpartition("_")
    rows = [r[0] for r in rows_of(log_prob, rollout_log_prob, mask) if r[0]]
    values = [[STATISTICS[kind](l) for l in ls] for ls in rows]  # noqa: E741
    if kind == "k1":
        low, high = -math.log(upper), (math.inf if lower == 0 else -math.log(lower))
    else:
        low, high = 0.0, upper
    if aggregate == "token":
        row_values = [mean(v) for v in values]
        spread_out = [x for v in values for x in v]
        extremes = spread_out
    else:
        row_values = [AGGREGATES[aggregate](v) for v in values]
        spread_out = [x for x, v in zip(row_values, values, strict=True) for _ in v]
        extremes = row_values
    counted = spread_out if aggregate == "token" else row_values
    above, below = mean([float(x > high) for x in counted]), mean([float(x < low) for x in counted])
    row_above, row_below = mean([float(x > high) for x in row_values]), mean([float(x < low) for x in row_values])
    if kind == "k1":  # high means a large ratio, that is a small k1
        above, below, row_above, row_below = below, above, row_below, row_above
    touched = [any(not low <= x <= high for x in v) for v in values]
    if aggregate != "token":
        touched = [not low <= x <= high for x in row_values]
    out = {
        "mean": mean(spread_out),
        "std": spread([clamp(x, low, high) for x in spread_out]),
        "max": max(extremes),
        "min": min(extremes),
        "fraction_high": above,
        "fraction_low": below,
        "seq_mean": mean(row_values),
        "seq_std": sample_std(row_values),
        "seq_max": max(row_values),
        "seq_min": min(row_values),
        "seq_max_deviation": max(abs(x) for x in row_values),
        "seq_fraction_high": row_above,
        "masked_fraction": mean([float(not low <= x <= high) for x in spread_out]),
        "seq_masked_fraction": mean([float(x) for x in touched]),
    }
    if kind == "k1":
        out["seq_fraction_low"] = row_below
    return {f"rollout_rs_{option}_{name}": value for name, value in out.items()}
