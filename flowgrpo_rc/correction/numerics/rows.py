"""What acts on whole rows: their weights, their criteria, and which of them stay. `kernel` has the notation."""

from functools import lru_cache

import torch
from torch import Tensor

from flowgrpo_rc.correction.numerics.layout import Layout, band, round_to
from flowgrpo_rc.correction.plan import SAFETY_BOUND, Criterion, ImportanceSampling


class Rows:
    """The part of a kernel's pass that follows from the figures of each row.

    Args:
        table: the kernel's, whose sums and extremes are filled before `run`.
    """

    def __init__(self, layout: Layout, table: Tensor, columns: int, *, masked: bool) -> None:
        self._layout, self._columns, self._masked = layout, columns, masked
        self._row: dict[str, Tensor] = dict(zip(layout.table, table, strict=True))
        first, count, rows = len(layout.sums), len(layout.row_criteria), table.shape[1]
        self._statistics = table[first : first + count]
        self.extremes = table[first + count : first + count + 2]
        """Largest and smallest `l`, `(2, rows)`."""
        self.kept = table.new_empty((rows,))
        """1.0 where no whole-row criterion rejects the row."""
        self.rejects = False
        """Whether any could."""
        self._outside = table.new_empty((2, count, rows))
        self._lower, self._upper = _bounds(layout.row_criteria, layout.dtype, table.device)

    def run(self) -> None:
        """Reads the sums and extremes of the table; fills its other figures and `kept`."""
        layout, plan, row = self._layout, self._layout.plan, self._row
        divisor: Tensor | None = row["n"]
        if self._masked and self._columns > 1:
            divisor = torch.clamp(row["n"], min=1.0)
        if self._columns == 1:
            divisor = None
        if plan.importance is not None and plan.importance.level != "token":
            self._weights(plan.importance, divisor)
        for c, statistic in zip(layout.row_criteria, self._statistics, strict=True):
            self._statistic(c, divisor, statistic)
        if layout.row_criteria:
            torch.gt(self._statistics, self._upper, out=self._outside[0])
            torch.lt(self._statistics, self._lower, out=self._outside[1])
            for found in self._outside.reshape(-1, len(self.kept)):
                self._reject(found)
        if plan.log_veto is not None:
            self._reject(row["veto_low"])
        if self.rejects:
            torch.eq(self.kept, 0.0, out=self.kept)
        else:
            self.kept.fill_(1.0)

    def _weights(self, spec: ImportanceSampling, divisor: Tensor | None) -> None:
        """One weight per row, from the sum of its `l` ("sequence") or their mean ("geometric")."""
        row = self._row
        log_ratio = row["is_log_ratio"].copy_(row["l"])
        if spec.level == "geometric" and divisor is not None:
            torch.div(log_ratio, divisor, out=log_ratio)
        upper, lower = round_to([spec.log_upper, spec.log_lower], log_ratio.dtype).ravel()
        high = torch.gt(log_ratio, upper, out=row["is_high"])
        low = torch.lt(log_ratio, lower, out=row["is_low"])
        made = torch.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND, out=row["is_row_weight"])
        torch.exp(made, out=made)
        if spec.mode == "zero":
            for outside in (high, low):
                torch.mul(made, outside == 0.0, out=made)
        elif spec.mode == "mask":
            self._reject(high)
            if spec.lower > 0:
                self._reject(low)
        else:
            torch.clamp(made, spec.lower if spec.mode == "clip" else 0.0, spec.upper, out=made)

    def _statistic(self, c: Criterion, divisor: Tensor | None, statistic: Tensor) -> None:
        """Fills a whole-row criterion's statistic; `k1 = -l`."""
        if c.aggregate == "seq_max":
            ends = torch.clamp(self.extremes, -SAFETY_BOUND, SAFETY_BOUND)
            # k2 and k3 are convex with their minimum at 0: their maximum over a row is at an extreme of l
            ends = ends * ends * 0.5 if c.statistic == "k2" else torch.expm1(ends) - ends
            torch.amax(ends, 0, out=statistic)
            return
        total = self._row["lc" if c.statistic == "k1" else c.statistic]
        if c.aggregate == "seq_mean" and divisor is not None:
            torch.div(total, divisor, out=statistic)
        else:
            statistic.copy_(total)
        if c.statistic == "k1":
            torch.neg(statistic, out=statistic)

    def _reject(self, found: Tensor) -> None:
        if self.rejects:
            torch.add(self.kept, found, out=self.kept)
        else:
            self.kept.copy_(found)
            self.rejects = True


@lru_cache(maxsize=64)
def _bounds(criteria: tuple[Criterion, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bounds of the whole-row statistics, `(criteria, 1)`; kept, so that later calls copy nothing to the device."""
    bands = [band(c) for c in criteria]
    low, high = round_to([b[0] for b in bands], dtype), round_to([b[1] for b in bands], dtype)
    return low.to(device, non_blocking=True), high.to(device, non_blocking=True)
