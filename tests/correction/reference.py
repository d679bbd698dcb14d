"""Rollout correction written out as loops over Python floats, from the formulas alone: slow, plain, float64.

Nothing here is shared with the library. `l = log_prob - rollout_log_prob`, `r = exp(l)`, train over rollout.
"""

import math
import random
import statistics
from dataclasses import dataclass, field

import torch

SAFE = 20.0
FORMS = (
    ("truncate", 1.3, 0.0, 1.3),
    ("truncate", "1.3", 0.0, 1.3),
    ("zero", "0.6_1.9", 0.6, 1.9),
    ("zero", "1.05_4.0", 1.05, 4.0),
    ("truncate", 0.8, 0.0, 0.8),
    ("zero", "0.3_0.9", 0.3, 0.9),
    ("clip", "1.1_1.5", 1.1, 1.5),
    ("mask", "1.1_1.9", 1.1, 1.9),
    ("clip", "0.6_1.3", 0.6, 1.3),
    ("clip", "0_1.3", 0.0, 1.3),
    ("mask", "0.6_1.9", 0.6, 1.9),
    ("mask", "0_1.2", 0.0, 1.2),
)
"""Mode, threshold as written, lower and upper bound; no band is its own reciprocal."""


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def safe_exp(x: float) -> float:
    return math.exp(clamp(x, -SAFE, SAFE))


def k_statistics(log_ratio: float) -> dict[str, float]:
    """k1, k2 and k3 of one element, on the clamped log ratio."""
    x = clamp(log_ratio, -SAFE, SAFE)
    return {"k1": -x, "k2": x * x / 2.0, "k3": math.expm1(x) - x}


@dataclass
class Weights:
    applied: list[list[float]]
    """After truncating, zeroing or clipping; 0 where invalid; before batch normalisation."""
    final: list[list[float]]
    raw: list[list[float]]
    keep: list[list[bool]]
    factor: float


@dataclass
class Criterion:
    """`lower` and `upper` bound the ratio for k1 (0: no lower bound); `upper` bounds the statistic for k2 and k3."""

    option: str
    upper: float
    lower: float | None = None


@dataclass
class Rejection:
    keep: list[list[bool]]
    statistic: list[list[float]] = field(default_factory=list)
    """Per element; a whole row's statistic repeated over its elements for sequence options."""
    row: list[float | None] = field(default_factory=list)


def log_ratios(p: torch.Tensor, q: torch.Tensor) -> list[list[float]]:
    grid = (p.shape[0], -1)
    p_rows, q_rows = p.double().reshape(grid).tolist(), q.double().reshape(grid).tolist()
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(p_rows, q_rows, strict=True)]


def valid_table(mask: torch.Tensor | None, like: torch.Tensor) -> list[list[bool]]:
    mask = torch.ones_like(like) if mask is None else mask
    return [[value != 0 for value in row] for row in mask.reshape(mask.shape[0], -1).tolist()]


def pick(row: list, valid: list[bool]) -> list:
    """The valid elements of a row."""
    return [x for x, ok in zip(row, valid, strict=True) if ok]


def flat(table: list[list], valid: list[list[bool]]) -> list:
    return [x for row, ok in zip(table, valid, strict=True) for x in pick(row, ok)]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def importance(
    ratios: list[list[float]],
    valid: list[list[bool]],
    level: str,
    mode: str,
    lower: float,
    upper: float,
    batch_normalize: bool,
) -> Weights:
    """Exponentiate with the safety bound, mask, truncate / zero / clip, normalise."""
    raw, applied, keep = [], [], []
    for row, ok in zip(ratios, valid, strict=True):
        chosen = pick(row, ok)
        if level == "token":
            logs = row
        elif level == "sequence":
            logs = [math.fsum(chosen)] * len(row)
        else:
            logs = [math.fsum(chosen) / max(len(chosen), 1)] * len(row)
        raw_row = [safe_exp(x) if good else 0.0 for x, good in zip(logs, ok, strict=True)]
        applied_row, keep_row = [], []
        for w, good in zip(raw_row, ok, strict=True):
            inside = lower <= w <= upper
            if mode == "truncate":
                w = min(w, upper)
            elif mode == "zero":
                w = w if inside else 0.0
            elif mode == "clip":
                w = clamp(w, lower, upper)
            applied_row.append(w if good else 0.0)
            keep_row.append(inside if mode == "mask" else True)
        raw.append(raw_row)
        applied.append(applied_row)
        keep.append(keep_row)
    if level == "token":
        average = mean(flat(applied, valid))
    else:
        average = mean([mean(pick(row, ok)) for row, ok in zip(applied, valid, strict=True) if any(ok)])
    factor = average if batch_normalize and average > 1e-8 else 1.0
    return Weights(applied, [[w / factor for w in row] for row in applied], raw, keep, factor)


def reject(ratios: list[list[float]], valid: list[list[bool]], c: Criterion) -> Rejection:
    """One criterion: what it keeps, its statistic per element and per row (None for a row without an element)."""
    aggregate, _, kind = c.option.rpartition("_")
    out = Rejection([])
    for row, ok in zip(ratios, valid, strict=True):
        each = [k_statistics(x)[kind] if good else 0.0 for x, good in zip(row, ok, strict=True)]
        chosen = pick(each, ok)
        if aggregate == "token":
            out.statistic.append(each)
            out.row.append(mean(chosen) if chosen else None)
            out.keep.append([_inside(s, c) for s in each])
            continue
        total = math.fsum(chosen)
        of_row = {"seq_sum": total, "seq_mean": total / max(len(chosen), 1), "seq_max": max(chosen, default=0.0)}
        out.statistic.append([of_row[aggregate]] * len(row))
        out.row.append(of_row[aggregate] if chosen else None)
        out.keep.append([_inside(of_row[aggregate], c)] * len(row))
    return out


def _inside(statistic: float, c: Criterion) -> bool:
    if not c.option.endswith("k1"):
        return statistic <= c.upper
    ratio_log = -statistic
    assert c.lower is not None
    return (c.lower == 0.0 or ratio_log >= math.log(c.lower)) and ratio_log <= math.log(c.upper)


def veto(ratios: list[list[float]], valid: list[list[bool]], threshold: float) -> list[bool]:
    """Per row: whether one valid, unclamped log ratio lies below the log of the threshold."""
    return [any(x < math.log(threshold) for x in pick(row, ok)) for row, ok in zip(ratios, valid, strict=True)]


def random_case(
    seed: int, rows: int = 7, columns: int = 5, spread: float = 0.6, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of both policies and a bool mask; from three rows on, the second has no valid element."""
    g = torch.Generator().manual_seed(seed)
    q = -3.0 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    p = q + 0.1 + spread * torch.randn(rows, columns, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=g) < 0.7
    if rows >= 3:
        mask[1] = False
    mask[0, 0] = True
    return p.to(dtype), q.to(dtype), mask


def random_criteria(seed: int, options: list[str]) -> tuple[list[Criterion], str]:
    """Criteria with asymmetric thresholds that keep some and reject some, and the string that asks for them."""
    rng = random.Random(seed)
    criteria, texts = [], []
    for option in options:
        if option.endswith("k1"):
            lower, upper = rng.choice([(0.55, 1.9), (0.8, 3.0), (0.3, 1.15), (0.0, 1.4), (1.05, 2.5), (0.4, 0.95)])
            criteria.append(Criterion(option, upper, lower))
            texts.append(f"{lower}_{upper}")
        else:
            upper = rng.choice([0.05, 0.2, 0.6])
            criteria.append(Criterion(option, upper))
            texts.append(str(upper))
    return criteria, ",".join(texts)


def metrics(
    p: torch.Tensor,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    weights: Weights | None = None,
    level: str = "token",
    mode: str = "truncate",
    lower: float = 0.0,
    upper: float = 2.0,
    batch_normalize: bool = False,
    criteria: list[Criterion] | None = None,
    veto_threshold: float | None = None,
) -> dict[str, float]:
    """Every metric of the documentation, by its definition. Rows without a valid element count nowhere."""
    ratios, valid = log_ratios(p, q), valid_table(mask, p)
    out = _offpolicy(p, q, ratios, valid)
    if weights is not None:
        out.update(_importance_metrics(valid, weights, level, mode, lower, upper))
        if batch_normalize:
            out["rollout_is_batch_norm_factor"] = weights.factor
    rejections = [reject(ratios, valid, c) for c in criteria or []]
    for c, rejection in zip(criteria or [], rejections, strict=True):
        out.update(_rejection_metrics(valid, c, rejection))
    keeps = [r.keep for r in rejections]
    if weights is not None and mode == "mask":
        keeps.append(weights.keep)
    if veto_threshold is not None:
        vetoed = veto(ratios, valid, veto_threshold)
        keeps.append([[not v] * len(row) for v, row in zip(vetoed, ratios, strict=True)])
        out["rollout_is_veto_fraction"] = mean([float(v) for v, ok in zip(vetoed, valid, strict=True) if any(ok)])
        below = [[float(x < math.log(veto_threshold)) for x in row] for row in ratios]
        out["rollout_is_catastrophic_token_fraction"] = mean(flat(below, valid))
    if keeps:
        dropped = [[float(not all(k[i][j] for k in keeps)) for j in range(len(r))] for i, r in enumerate(ratios)]
        out["rollout_rs_masked_fraction"] = mean(flat(dropped, valid))
        out["rollout_rs_seq_masked_fraction"] = _share_of_rows(dropped, valid)
    return {f"rollout_corr/{name}": value for name, value in out.items()}


def _share_of_rows(flags: list[list[float]], valid: list[list[bool]]) -> float:
    """Of the rows with a valid element, how many have a flag at one."""
    return mean([float(any(pick(row, ok))) for row, ok in zip(flags, valid, strict=True) if any(ok)])


def _offpolicy(
    p: torch.Tensor, q: torch.Tensor, ratios: list[list[float]], valid: list[list[bool]]
) -> dict[str, float]:
    grid = (p.shape[0], -1)
    p_rows, q_rows = p.double().reshape(grid).tolist(), q.double().reshape(grid).tolist()
    rows = [i for i, ok in enumerate(valid) if any(ok)]
    train = [-mean(pick(p_rows[i], valid[i])) for i in rows]
    rollout = [-mean(pick(q_rows[i], valid[i])) for i in rows]
    diff = [a - b for a, b in zip(train, rollout, strict=True)]
    elements = flat(ratios, valid)
    return {
        "training_ppl": mean([safe_exp(x) for x in train]),
        "training_log_ppl": mean(train),
        "rollout_ppl": mean([safe_exp(x) for x in rollout]),
        "rollout_log_ppl": mean(rollout),
        "kl": -mean(elements),
        "k3_kl": mean([k_statistics(x)["k3"] for x in elements]),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(x) for x in diff]),
        "log_ppl_diff_max": max(diff),
        "log_ppl_diff_min": min(diff),
        "ppl_ratio": mean([safe_exp(x) for x in diff]),
        "chi2_token": mean([safe_exp(x) ** 2 for x in elements]) - 1.0,
        "chi2_seq": mean([safe_exp(math.fsum(pick(ratios[i], valid[i]))) ** 2 for i in rows]) - 1.0,
        "logprob_abs_diff_mean": mean([abs(x) for x in elements]),
        "logprob_abs_diff_max": max(abs(x) for x in elements),
    }


def _importance_metrics(
    valid: list[list[bool]], weights: Weights, level: str, mode: str, lower: float, upper: float
) -> dict[str, float]:
    reported_lower = 1.0 / upper if mode == "truncate" else lower
    applied, raw = flat(weights.applied, valid), flat(weights.raw, valid)
    row_applied = [mean(pick(r, ok)) for r, ok in zip(weights.applied, valid, strict=True) if any(ok)]
    row_raw = [mean(pick(r, ok)) for r, ok in zip(weights.raw, valid, strict=True) if any(ok)]
    units = raw if level == "token" else row_raw
    shown = applied if level == "token" else row_raw
    average = mean(applied)
    out = {
        "rollout_is_mean": average,
        "rollout_is_std": math.sqrt(mean([(w - average) ** 2 for w in applied])) if len(applied) > 1 else 0.0,
        "rollout_is_min": min(shown),
        "rollout_is_max": max(shown),
        "rollout_is_eff_sample_size": average**2 / mean([w * w for w in applied]) if average > 0.0 else 0.0,
        "rollout_is_ratio_fraction_high": mean([float(w > upper) for w in units]),
        "rollout_is_ratio_fraction_low": mean([float(w < reported_lower) for w in units]),
        "rollout_is_seq_mean": mean(row_applied),
        "rollout_is_seq_std": statistics.stdev(row_applied) if len(row_applied) > 1 else 0.0,
        "rollout_is_seq_min": min(row_applied),
        "rollout_is_seq_max": max(row_applied),
        "rollout_is_seq_max_deviation": max(abs(w - 1.0) for w in row_applied),
        "rollout_is_seq_fraction_high": mean([float(w > upper) for w in row_raw]),
        "rollout_is_seq_fraction_low": mean([float(w < reported_lower) for w in row_raw]),
    }
    outside = mean([float(not lower <= w <= upper) for w in raw])
    if mode == "zero":
        out["rollout_is_oob_ratio"] = outside
    if mode == "mask":
        out["rollout_is_masked_fraction"] = outside
    return out


def _rejection_metrics(valid: list[list[bool]], c: Criterion, rejection: Rejection) -> dict[str, float]:
    """`fraction_high` counts `r > upper`, that is a statistic `-l` below `-log(upper)`, for k1."""
    elements = flat(rejection.statistic, valid)
    rows = [s for s in rejection.row if s is not None]
    k1 = c.option.endswith("k1")
    low, high = 0.0, c.upper
    if k1:
        assert c.lower is not None
        low, high = -math.log(c.upper), -math.log(c.lower) if c.lower > 0.0 else math.inf
    above = [[float(s < low if k1 else s > high) for s in values] for values in (elements, rows)]
    below = [[float(s > high) if k1 else 0.0 for s in values] for values in (elements, rows)]
    token = c.option.startswith("token")
    shown = elements if token else rows
    inside = [clamp(s, low, high) for s in elements]
    center = mean(inside)
    dropped = [[float(not k) for k in row] for row in rejection.keep]
    out = {
        "mean": mean(elements),
        "std": math.sqrt(mean([(s - center) ** 2 for s in inside])) if len(inside) > 1 else 0.0,
        "min": min(shown),
        "max": max(shown),
        "fraction_high": mean(above[0 if token else 1]),
        "fraction_low": mean(below[0 if token else 1]),
        "seq_mean": mean(rows),
        "seq_std": statistics.stdev(rows) if len(rows) > 1 else 0.0,
        "seq_min": min(rows),
        "seq_max": max(rows),
        "seq_max_deviation": max(abs(s) for s in rows),
        "seq_fraction_high": mean(above[1]),
        "masked_fraction": mean(flat(dropped, valid)),
        "seq_masked_fraction": _share_of_rows(dropped, valid),
    }
    if k1:
        out["seq_fraction_low"] = mean(below[1])
    return {f"rollout_rs_{c.option}_{name}": value for name, value in out.items()}
