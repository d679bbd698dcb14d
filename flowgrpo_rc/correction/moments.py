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

from flowgrpo_rc.correction.layout import Layout
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, CorrectionPlan, ImportanceSampling

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Moments:
    """Named sums, minima and maxima over rows of per-row figures; sums of element counts are totals."""

    plan: CorrectionPlan
    names: tuple[str, ...]
    sums: tuple[float, ...]
    ranged: tuple[str, ...]
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
            self.ranged,
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


def moments_of_table(
    layout: Layout,
    flat: Float[Tensor, " figures"],
    *,
    rows: int,
    masked: bool,
    count_empty_rows: bool = False,
) -> Moments:
    """Moments of what was transferred: the table, then the divisor, then three figures per element."""
    size = layout.height * rows
    table, rest = flat[:size].view(-1, rows), flat[size:]
    reduced = [_reduce(layout, part, masked, count_empty_rows) for part in table.split(_ROWS_AT_ONCE, dim=1)]
    if len(reduced) == 1:
        sums, minima, maxima = reduced[0]
    else:
        parts = [torch.stack(kind) for kind in zip(*reduced, strict=True)]
        sums, minima, maxima = parts[0].sum(0), parts[1].amin(0), parts[2].amax(0)
    figures = torch.cat((sums, minima, maxima, rest)).tolist()
    ends, k = len(layout.reduced), len(layout.ranged)
    importance = layout.plan.importance
    tail = figures[ends + 2 * k :]
    divisor = tail.pop(0) if importance is not None and importance.batch_normalize else None
    return Moments(
        layout.plan,
        layout.reduced,
        tuple(figures[:ends]),
        layout.ranged,
        tuple(figures[ends : ends + k]),
        tuple(figures[ends + k : ends + 2 * k]),
        divisor,
        _group_by_timestep(tail) if tail else {},
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
    layout: Layout, table: Float[Tensor, "figures rows"], masked: bool, count_empty_rows: bool
) -> tuple[Float[Tensor, " sums"], Float[Tensor, " ranges"], Float[Tensor, " ranges"]]:
    """Derives the figures of each row and reduces them over rows: sums, minima and maxima.

    Rows without a valid element are left out; with `count_empty_rows` only of the criteria's figures.
    """
    sums = table[: len(layout.sums)]
    n = sums[layout.sums.index("n")]
    valid = n > 0 if masked else None
    divisor = n.clamp(min=1.0) if masked else n
    derived = layout.combine @ (sums[: len(layout.means)] / divisor)
    start = len(layout.sums)
    stop = start + len(layout.row_criteria)
    extremes = table[stop : stop + len(layout.extremes)]
    figures = table[stop + len(layout.extremes) :].unbind(0)
    parts = [derived, table[start:stop]]
    importance = layout.plan.importance
    extra: list[Tensor] = []
    if importance is not None and importance.level != "token":
        row_d, extra = _row_importance(importance, figures, n, valid)
        parts.append(row_d.unsqueeze(0))
    elif importance is not None and valid is not None:  # an empty row, where it counts at all, weighs 0
        derived[3:5].sub_((~valid).double())
    rows = torch.cat(parts) if len(parts) > 2 or stop > start else derived
    touched = [_touched(layout, sums, c.name) for c in layout.token_criteria]
    if layout.plan.can_reject:
        extra += [figures[-1], (figures[-1] < n).double()]
    if layout.plan.log_veto is not None:
        extra.append((sums[layout.sums.index("veto_low")] > 0).double())
    every = torch.ones_like(n)
    singles = torch.stack([every, every if valid is None else valid.double()])
    stacked = [sums, singles, _offpolicy(derived, sums[layout.sums.index("l")])]
    if touched or extra:
        stacked.append(torch.stack(touched + extra))
    stacked += _powers(layout, rows, n)
    ranges = [rows, extremes]
    if importance is not None and importance.level != "token":
        ranges.append(figures[0].unsqueeze(0))
    return _over_rows(layout, torch.cat(stacked), torch.cat(ranges), valid, count_empty_rows)


def _over_rows(
    layout: Layout, rows: Tensor, ranges: Tensor, valid: Tensor | None, count_empty_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if valid is None:
        return rows.sum(1), ranges.amin(1), ranges.amax(1)
    sums = rows @ valid.double()
    if count_empty_rows:
        sums = torch.where(torch.tensor(layout.rejection_reduced), sums, rows.sum(1))
        valid = valid | ~torch.tensor(layout.rejection_ranged).unsqueeze(1)
    return sums, torch.where(valid, ranges, math.inf).amin(1), torch.where(valid, ranges, -math.inf).amax(1)


def _offpolicy(derived: Tensor, total: Tensor) -> Float[Tensor, "5 rows"]:
    """Perplexities `exp(-mean log_prob)`, their ratio, `|log_ppl_diff|`, and `exp(2 sum l) - 1`."""
    ppl = derived[:3].clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()
    chi2 = total.clamp(-SAFETY_BOUND, SAFETY_BOUND).mul_(2.0).expm1_()
    return torch.cat((ppl, torch.stack((derived[2].abs(), chi2))))


def _powers(layout: Layout, rows: Tensor, n: Tensor) -> list[Tensor]:
    """For each derived figure x: x, x^2, below, above, outside; and n times x, clamped x, its square, outside."""
    below, above = (rows < layout.lower).double(), (rows > layout.upper).double()
    inside = torch.clamp(rows, layout.lower, layout.upper)
    outside = below + above
    weighted = inside * n
    return [rows, rows * rows, below, above, outside, rows * n, weighted, weighted * inside, outside * n]


def _touched(layout: Layout, sums: Tensor, name: str) -> Tensor:
    """1 for each row in which a per-element criterion rejects something."""
    below = layout.sums.index(f"{name}/below")
    return (sums[below] + sums[below + 1] > 0).double()


def _row_importance(
    spec: ImportanceSampling, figures: tuple[Tensor, ...], n: Tensor, valid: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """`d` as applied, one per row, and the figures of `layout._host_rows` for weights per row."""
    log_ratio, high, low = figures[:3]
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    d = torch.expm1(clamped)
    if spec.mode == "zero":
        d = torch.where(high + low > 0, -1.0, d)
    elif spec.mode != "mask":
        d = d.clamp((spec.lower if spec.mode == "clip" else 0.0) - 1.0, spec.upper - 1.0)
    row_high, row_low = high, low
    if valid is not None:  # an empty row, where it counts at all, weighs 0
        d = torch.where(valid, d, -1.0)
        row_high, row_low = torch.where(valid, high, 0.0), torch.where(valid, low, 1.0)
    w = d + 1.0
    weighted = w * n
    return d, [
        *(high, low, high * n, low * n, row_high, row_low),
        *(clamped.exp_() * n, weighted, weighted * w),
    ]
