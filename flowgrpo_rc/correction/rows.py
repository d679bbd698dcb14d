"""What acts on whole rows: their weights, their criteria, and which of them stay. `kernel` has the notation."""

import math
from functools import lru_cache

import torch

from flowgrpo_rc.correction.layout import Layout, band, round_to
from flowgrpo_rc.correction.ops import Array, Ops
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, Criterion, ImportanceSampling


class Rows:
    """The part of a kernel's pass that follows from the figures of each row.

    Args:
        table: the kernel's, whose sums and extremes are filled before `run`.
    """

    def __init__(
        self, layout: Layout, table: Array, columns: int, *, masked: bool, ops: Ops, device: torch.device
    ) -> None:
        self._layout, self._columns, self._masked, self._ops = layout, columns, masked, ops
        self._row: dict[str, Array] = dict(zip(layout.table, table, strict=True))
        first, count, rows = len(layout.sums), len(layout.row_criteria), table.shape[1]
        self._statistics = table[first : first + count]
        self.extremes = table[first + count : first + count + 2]
        """Largest and smallest `l`, `(2, rows)`."""
        self.kept = ops.new((rows,))
        """1.0 where no whole-row criterion rejects the row."""
        self.rejects = False
        """Whether any could."""
        self._outside, self._ends = ops.new((2, count, rows)), ops.new((2, rows))
        self._divisor, self._scratch = ops.new((rows,)), ops.new((rows,))
        self._lower, self._upper = (ops.array(bound) for bound in _bounds(layout.row_criteria, layout.dtype, device))

    def run(self, ops: Ops) -> None:
        """Reads the sums and extremes of the table; fills its other figures and `kept`."""
        layout, plan, row = self._layout, self._layout.plan, self._row
        self._ops, self.rejects = ops, False
        divisor = row["n"]
        if self._masked and self._columns > 1:
            divisor = ops.clamp(divisor, 1.0, math.inf, out=self._divisor)
        if self._columns == 1:
            divisor = None
        if plan.importance is not None and plan.importance.level != "token":
            self._weights(plan.importance, divisor)
        for c, statistic in zip(layout.row_criteria, self._statistics, strict=True):
            self._statistic(c, divisor, statistic)
        if layout.row_criteria:
            ops.gt(self._statistics, self._upper, out=self._outside[0])
            ops.lt(self._statistics, self._lower, out=self._outside[1])
            for found in self._outside.reshape(-1, len(self.kept)):
                self._reject(found)
        if plan.log_veto is not None:
            self._reject(row["veto_low"])
        if self.rejects:
            ops.eq(self.kept, self._ops.number(0.0), out=self.kept)
        else:
            ops.fill(self.kept, 1.0)

    def _weights(self, spec: ImportanceSampling, divisor: Array) -> None:
        """One weight per row, from the sum of its `l` ("sequence") or their mean ("geometric")."""
        row, ops = self._row, self._ops
        log_ratio = ops.copy(row["l"], out=row["is_log_ratio"])
        if spec.level == "geometric" and divisor is not None:
            ops.div(log_ratio, divisor, out=log_ratio)
        high = ops.gt(log_ratio, self._ops.number(math.log(spec.upper)), out=row["is_high"])
        low = ops.lt(log_ratio, self._ops.number(math.log(spec.reported_lower)), out=row["is_low"])
        made = ops.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND, out=row["is_row_weight"])
        ops.exp(made, out=made)
        if spec.mode == "zero":
            for outside in (high, low):
                inside = ops.eq(outside, self._ops.number(0.0), out=self._scratch)
                ops.mul(made, inside, out=made)
        elif spec.mode == "mask":
            self._reject(high)
            if spec.lower > 0:
                self._reject(low)
        else:
            ops.clamp(made, spec.lower if spec.mode == "clip" else 0.0, spec.upper, out=made)

    def _statistic(self, c: Criterion, divisor: Array, statistic: Array) -> None:
        """Fills a whole-row criterion's statistic; `k1 = -l`."""
        ops = self._ops
        if c.aggregate == "seq_max":
            ends = ops.clamp(self.extremes, -SAFETY_BOUND, SAFETY_BOUND, out=self._ends)
            # k2 and k3 are convex with their minimum at 0: their maximum over a row is at an extreme of l
            if c.statistic == "k2":
                ops.mul(ops.mul(ends, ends, out=ends), self._ops.number(0.5), out=ends)
            else:
                ops.sub(ops.expm1(ends, out=ops.new(ends.shape)), ends, out=ends)
            ops.amax(ends, 0, out=statistic)
            return
        total = self._row["lc" if c.statistic == "k1" else c.statistic]
        if c.aggregate == "seq_mean" and divisor is not None:
            ops.div(total, divisor, out=statistic)
        else:
            ops.copy(total, out=statistic)
        if c.statistic == "k1":
            ops.neg(statistic, out=statistic)

    def _reject(self, found: Array) -> None:
        if self.rejects:
            self._ops.add(self.kept, found, out=self.kept)
        else:
            self._ops.copy(found, out=self.kept)
            self.rejects = True


@lru_cache(maxsize=64)
def _bounds(
    criteria: tuple[Criterion, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of the whole-row statistics, `(criteria, 1)`; kept, so that later calls copy nothing to the device."""
    bands = [band(c) for c in criteria]
    low, high = round_to([b[0] for b in bands], dtype), round_to([b[1] for b in bands], dtype)
    return low.to(device, non_blocking=True), high.to(device, non_blocking=True)
