"""From per-row figures to moments: sums, minima and maxima that merge exactly over micro-batches and ranks.

Everything here runs on the host in float64, after the one transfer. Metrics are functions of the moments
(`metrics.metrics_from_moments`), so a merged metric equals the metric of the merged batch: means by their counts,
standard deviations and effective sample sizes from their sums of squares.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, CorrectionPlan, Criterion, ImportanceSampling

_ROWS_AT_ONCE = 1 << 16
Rows = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums, minima and maxima, over rows, of named per-row figures; figures that count elements sum to totals."""

    plan: CorrectionPlan
    names: tuple[str, ...]
    sums: tuple[float, ...]
    minima: tuple[float, ...]
    maxima: tuple[float, ...]
    divisor: float | None = None
    """What batch normalisation divided by; None when unknown (after a merge) or without normalisation."""
    timesteps: dict[float, tuple[float, float]] = field(default_factory=dict)
    """Sum of `|l|` and number of valid elements per timestep value."""

    @property
    def finite(self) -> bool:
        """False when a valid log-prob is NaN or infinite: it then is in the sum of `l`."""
        return math.isfinite(self.sums[self.names.index("l")])

    @property
    def count(self) -> float:
        """Valid elements."""
        return self.sums[self.names.index("n")]

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both batches together.

        Raises:
            ValueError: they were computed with different options.
        """
        if self.plan != other.plan or self.names != other.names:
            raise ValueError("Only results computed with the same options can be merged.")
        timesteps = dict(self.timesteps)
        for t, (total, count) in other.timesteps.items():
            before = timesteps.get(t, (0.0, 0.0))
            timesteps[t] = (before[0] + total, before[1] + count)
        return Moments(
            self.plan,
            self.names,
            tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)),
            tuple(map(min, self.minima, other.minima)),
            tuple(map(max, self.maxima, other.maxima)),
            timesteps=timesteps,
        )


class MetricAccumulator:
    """Metrics of several micro-batches, and of all ranks, as if they had been one batch.

    `add` takes results computed with the same options. `compute` leaves the accumulator as it is; `reset` empties it.
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None

    def add(self, result: Any) -> None:
        """Adds a `RolloutCorrection` or its `Moments`."""
        moments = result if isinstance(result, Moments) else result.moments
        self._moments = moments if self._moments is None else self._moments.merge(moments)

    def reset(self) -> None:
        """Forgets what was added."""
        self._moments = None

    def compute(self, dp_group: Any = None, *, prefix: str = "rollout_corr/", slime: bool = False) -> dict[str, float]:
        """Metrics of everything added, on all ranks; empty when nothing was added anywhere.

        With `torch.distributed` initialised this is a collective over `dp_group` (None: all ranks), so every rank
        of it must call. `slime=True` adds the figures under slime's names.
        """
        from flowgrpo_rc.correction.metrics import metrics_from_moments, slime_metrics

        moments = merge_over_ranks(self._moments, dp_group)
        if moments is None:
            return {}
        metrics = metrics_from_moments(moments, prefix)
        return {**metrics, **slime_metrics(moments)} if slime else metrics


def merge_over_ranks(moments: Moments | None, dp_group: Any = None) -> Moments | None:
    """Merges each rank's moments (None where a rank has none); the same result on every rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return moments
    gathered: list[Moments | None] = [None] * torch.distributed.get_world_size(dp_group)
    torch.distributed.all_gather_object(gathered, moments, group=dp_group)
    present = [m for m in gathered if m is not None]
    return merge_all(present) if present else None


def merge_all(moments: Iterable[Moments]) -> Moments:
    """Merges at least one."""
    first, *rest = moments
    for other in rest:
        first = first.merge(other)
    return first


def moments_of_rows(
    names: tuple[str, ...],
    flat: Float[Tensor, " figures"],
    *,
    rows: int,
    plan: CorrectionPlan,
    masked: bool,
    count_empty_rows: bool = False,
) -> Moments:
    """Moments of the transferred figures: `names` x `rows`, then the divisor, then three figures per element."""
    table = flat[: len(names) * rows].view(len(names), rows)
    rest = flat[len(names) * rows :]
    normalised = plan.importance is not None and plan.importance.batch_normalize
    out: tuple[str, ...] = ()
    sums, minima, maxima = [], [], []
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = dict(zip(names, table[:, start : start + _ROWS_AT_ONCE].unbind(0), strict=True))
        out, *reduced = _reduce(part, plan, masked, count_empty_rows)
        for collected, values in zip((sums, minima, maxima), reduced, strict=True):
            collected.append(values)
    if len(sums) > 1:
        sums = [torch.stack(sums).sum(0)]
        minima, maxima = [torch.stack(minima).amin(0)], [torch.stack(maxima).amax(0)]
    figures = torch.cat((sums[0], minima[0], maxima[0], rest)).tolist()
    k = len(out)
    tail = figures[3 * k :]
    divisor = tail.pop(0) if normalised else None
    return Moments(
        plan,
        out,
        tuple(figures[:k]),
        tuple(figures[k : 2 * k]),
        tuple(figures[2 * k : 3 * k]),
        divisor,
        _group_by_timestep(tail),
    )


def _group_by_timestep(tail: list[float]) -> dict[float, tuple[float, float]]:
    """`{t: (sum of |l|, count)}` of `|l|`, validity and timestep, laid end to end."""
    n = len(tail) // 3
    groups: dict[float, tuple[float, float]] = {}
    for gap, valid, t in zip(tail[:n], tail[n : 2 * n], tail[2 * n :], strict=True):
        if valid:
            total, count = groups.get(t, (0.0, 0.0))
            groups[t] = (total + gap, count + 1.0)
    return dict(sorted(groups.items()))


def _reduce(
    t: Rows, plan: CorrectionPlan, masked: bool, count_empty_rows: bool
) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor]:
    """`(names, sums, minima, maxima)` over rows of the derived figures; empty rows left out unless counted."""
    n = t["n"]
    valid = n > 0 if masked else None
    general = _offpolicy(t, n.clamp(min=1.0))
    if plan.importance is not None:
        general.update(_importance(t, plan.importance, n.clamp(min=1.0), valid))
    rejection: Rows = {}
    for criterion in plan.criteria:
        rejection.update(_criterion(t, criterion, n.clamp(min=1.0)))
    if "kept" in t:
        general["kept"] = t["kept"]
        general["any_rejected"] = (t["kept"] < n).double()
    if plan.log_veto is not None:
        rejection["veto_low"] = t["veto_low"]
        rejection["veto_row"] = (t["veto_low"] > 0).double()
    if not (masked and count_empty_rows):
        return _reduce_group({**general, **rejection}, valid)
    parts = [_reduce_group(general, None)]
    if rejection:
        parts.append(_reduce_group(rejection, valid))
    joined = [torch.cat(tensors) for tensors in zip(*(part[1:] for part in parts), strict=True)]
    return sum((part[0] for part in parts), ()), joined[0], joined[1], joined[2]


def _reduce_group(rows: Rows, valid: Tensor | None) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor]:
    stacked = torch.stack(tuple(rows.values()))
    if valid is None:
        return tuple(rows), stacked.sum(1), stacked.amin(1), stacked.amax(1)
    minima = torch.where(valid, stacked, math.inf).amin(1)
    maxima = torch.where(valid, stacked, -math.inf).amax(1)
    return tuple(rows), torch.where(valid, stacked, 0.0).sum(1), minima, maxima


def _offpolicy(t: Rows, n: Tensor) -> Rows:
    """Perplexities and divergences. `diff = -mean l = log ppl_train - log ppl_rollout`."""
    means = torch.stack((t["log_prob"], t["l"])).div_(-n)
    log_train, diff = means.unbind(0)
    logs = torch.stack((log_train, log_train - diff, diff))
    ppl = logs.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_().unbind(0)
    return {
        **{name: t[name] for name in ("n", "l", "abs", "lc", "k3", "e2", "l_max", "l_min")},
        "rows": torch.ones_like(n),
        "valid_rows": (t["n"] > 0).double(),
        "training_log_ppl": log_train,
        "rollout_log_ppl": logs[1],
        "log_ppl_diff": diff,
        "log_ppl_abs_diff": diff.abs(),
        "training_ppl": ppl[0],
        "rollout_ppl": ppl[1],
        "ppl_ratio": ppl[2],
        "chi2_seq": torch.expm1(t["l"].clamp(-SAFETY_BOUND, SAFETY_BOUND).mul_(2.0)),
    }


def _importance(t: Rows, spec: ImportanceSampling, n: Tensor, valid: Tensor | None) -> Rows:
    """Weights: `d = w - 1` summed over elements (`d`, `d2`) and as the mean of each row (`row_d`)."""
    if spec.level == "token":
        row = t["d"] / n
        raw = (t["lc"] + t["k3"]) / n + 1.0
        out = {k: t[k] for k in ("d", "d2", "is_high", "is_low", "is_d_max") if k in t}
        out["is_seq_high"] = (raw > spec.upper).double()
        out["is_seq_low"] = (raw < spec.reported_lower).double()
        out["is_raw"] = t["lc"] + t["k3"] + t["n"]
    else:
        row, raw = _row_weights(t, spec)
        out = {
            "d": t["n"] * row,
            "d2": t["n"] * row * row,
            "w": t["n"] * (row + 1.0),
            "w2": t["n"] * (row + 1.0).square(),
            "is_elements_high": t["is_high"] * t["n"],
            "is_elements_low": t["is_low"] * t["n"],
            "is_seq_high": t["is_high"],
            "is_seq_low": t["is_low"],
            "is_raw": raw * t["n"],
            **{k: t[k] for k in ("is_high", "is_low", "is_log_ratio")},
        }
    if valid is not None:  # an empty row, where it counts at all, has weight 0
        row = torch.where(valid, row, -1.0)
        out["is_seq_low"] = torch.where(valid, out["is_seq_low"], 1.0)
        out["is_seq_high"] = torch.where(valid, out["is_seq_high"], 0.0)
    out["row_d"] = row
    out["row_d2"] = row * row
    return out


def _row_weights(t: Rows, spec: ImportanceSampling) -> tuple[Tensor, Tensor]:
    """`d` as applied and the weight before the bounds, from each row's log ratio."""
    clamped = t["is_log_ratio"].clamp(-SAFETY_BOUND, SAFETY_BOUND)
    d = torch.expm1(clamped)
    if spec.mode == "zero":
        d = torch.where(t["is_high"] + t["is_low"] > 0, -1.0, d)
    elif spec.mode != "mask":
        d = d.clamp((spec.lower if spec.mode == "clip" else 0.0) - 1.0, spec.upper - 1.0)
    return d, torch.exp(clamped)


def _criterion(t: Rows, c: Criterion, n: Tensor) -> Rows:
    """One criterion's figures; `row` is its statistic per row, `in` the statistic clamped to the bounds."""
    k1 = c.statistic == "k1"
    low_bound, high_bound = (-c.upper, -c.lower) if k1 else (0.0, c.upper)
    high = t[f"{c.name}/high"]
    low = t[f"{c.name}/low"] if k1 else None
    bad = high if low is None else high + low
    if c.aggregate == "token":
        total = {"k1": -t["lc"], "k2": t.get(f"{c.name}/sum"), "k3": t["k3"]}[c.statistic]
        assert total is not None
        row = total / n
        out = {
            "total": total,
            "in": -t[f"{c.name}/in"] if k1 else t[f"{c.name}/in"],
            "in2": t[f"{c.name}/in2"],
        }
        if not k1:
            out["min"] = t[f"{c.name}/min"]
        out["high"], out["row_high"] = high, (row < low_bound if k1 else row > high_bound).double()
        if low is not None:
            out["low"], out["row_low"] = low, (row > high_bound).double()
        out["bad"] = bad
    else:
        row = t[f"{c.name}/row"]
        inside = row.clamp(low_bound, high_bound)
        weighted = inside * t["n"]
        out = {
            "total": row * t["n"],
            "in": weighted,
            "in2": weighted * inside,
            "row_high": high,
            "bad": bad * t["n"],
        }
        if low is not None:
            out["row_low"] = low
    out.update(row=row, row2=row * row, row_bad=(bad > 0).double())
    return {f"{c.name}/{key}": value for key, value in out.items()}
