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

from flowgrpo_rc.correction.numerics.layout import Layout
from flowgrpo_rc.correction.numerics.reduction import reduce_table
from flowgrpo_rc.correction.plan import CorrectionPlan


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
        from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments, slime_metrics

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
    """Moments of what was transferred to the host: the table, then the divisor, then three figures per element."""
    size = layout.height * rows
    table, tail = flat[:size].view(-1, rows), flat[size:].tolist()
    sums, minima, maxima = reduce_table(layout, table, masked=masked, count_empty_rows=count_empty_rows)
    importance = layout.plan.importance
    divisor = tail.pop(0) if importance is not None and importance.batch_normalize else None
    return Moments(
        layout.plan,
        layout.reduced,
        sums,
        layout.ranged,
        minima,
        maxima,
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
    wrong = [t for t in groups if not math.isfinite(t)]
    if wrong:
        raise ValueError(f"timesteps: got {wrong[0]} for a valid element; give finite numbers, or leave timesteps out.")
    return dict(sorted(groups.items()))
