"""From the table of per-row figures to sums, minima and maxima over rows. On the host, in float64.

A `Reduction` owns its buffers, like the kernel, and for the same reason.
"""

import numpy as np
import torch
from jaxtyping import Float

from flowgrpo_rc.correction.buffers import cached
from flowgrpo_rc.correction.layout import POWERS, ROW_POWERS, Layout
from flowgrpo_rc.correction.ops import HostOps, Tape
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, ImportanceSampling

_ROWS_AT_ONCE = 4096
_OPS = HostOps(torch.float64)
Array = np.ndarray


def reduce_table(
    layout: Layout, table: Float[Array, "figures rows"], *, masked: bool, count_empty_rows: bool
) -> tuple[Float[Array, " sums"], Float[Array, " ranged"], Float[Array, " ranged"]]:
    """Sums of `layout.reduced`, minima and maxima of `layout.ranged`.

    Rows without a valid element are left out; with `count_empty_rows` only of the criteria's figures.
    """
    rows = table.shape[1]
    parts = []
    with np.errstate(all="ignore"):
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = table[:, start : start + _ROWS_AT_ONCE]
            key = ("reduction", layout, part.shape[1], masked, count_empty_rows)
            reduction = cached(key, lambda: Reduction(layout, part.shape[1], masked, count_empty_rows))  # noqa: B023
            parts.append(reduction.run(part))
            if part.shape[1] == rows:
                return parts[0]
            parts[-1] = tuple(figures.copy() for figures in parts[-1])
        sums, minima, maxima = (np.stack(each) for each in zip(*parts, strict=True))
        return sums.sum(0), minima.min(0), maxima.max(0)


class Reduction:
    """Derives the figures of each row and reduces them, for tables of a given width."""

    def __init__(self, layout: Layout, rows: int, masked: bool, count_empty_rows: bool) -> None:
        self._layout, self._masked, self._empty = layout, masked, count_empty_rows and masked
        self._ops, self._tape = _OPS, None
        reduced, ranged, derived = len(layout.reduced), len(layout.ranged), len(layout.derived)
        self._figures = np.empty((reduced, rows))
        self._figure = dict(zip(layout.reduced, self._figures, strict=True))
        self._sums = self._figures[: len(layout.sums)]
        self._means, self._mean_sums = np.empty((len(layout.means), rows)), self._sums[: len(layout.means)]
        self._ranged = np.empty((ranged, rows))
        linear = len(layout.linear)
        self._statistics = self._ranged[linear : linear + len(layout.row_criteria)]
        self._extremes = self._ranged[derived : derived + len(layout.extremes)]
        self._power(derived, linear, rows)
        self._figure["rows"].fill(1.0)
        self._valid = self._figure["valid_rows"]
        self._valid.fill(1.0)
        self._divisor = np.empty(rows) if masked else self._figure["n"]
        self._parts = _places(layout)
        self._out = np.empty(reduced), np.empty(ranged), np.empty(ranged)

    def _power(self, derived: int, linear: int, rows: int) -> None:
        """Places of the derived figures' powers, which end the figures."""
        layout = self._layout
        free = len(layout.derived) - len(layout.lower)
        place = self._figures[len(layout.reduced) - layout.powers :]
        self._plain, place = place[:derived], place[derived:]
        size = (derived - free) * len(POWERS)
        self._powers = place[:size].reshape(len(POWERS), derived - free, rows)
        self._row_powers = place[size:].reshape(len(ROW_POWERS), derived - linear, rows)
        self._bounded, self._whole = self._ranged[free:derived], self._ranged[linear:derived]
        self._inside = np.empty((derived - linear, rows))

    def run(self, table: Float[Array, "figures rows"]) -> tuple[Array, Array, Array]:
        """Sums, minima and maxima of the table's figures and of what derives from them; the next `run` overwrites."""
        sums, statistics, extremes = self._parts
        self._sums[:] = table[sums]
        if self._layout.row_criteria:
            self._statistics[:] = table[statistics]
        self._extremes[:] = table[extremes]
        if self._layout.plan.can_reject:
            self._figure["kept"][:] = table[-1]
        if self._layout.plan.importance is not None and self._layout.plan.importance.level != "token":
            self._row_weights(self._layout.plan.importance, table)
        if self._tape is None:
            self._ops = tape = Tape(_OPS)
            self._derive()
            self._ops, self._tape = _OPS, tape
        else:
            self._tape.replay()
        return self._over_rows()

    def _derive(self) -> None:
        figure, ops, derived, layout = self._figure, self._ops, self._ranged, self._layout
        n = figure["n"]
        if self._masked:
            ops.gt(n, 0.0, out=self._valid)
            ops.maximum(n, 1.0, out=self._divisor)
        ops.div(self._mean_sums, self._divisor, out=self._means)
        mean = dict(zip(layout.means, self._means, strict=True))
        for target, (first, sign, second) in zip(derived, layout.linear, strict=False):
            if second:
                (ops.add if sign > 0 else ops.sub)(mean[second], mean[first], out=target)
            else:
                ops.mul(mean[first], sign, out=target)
        importance = layout.plan.importance
        if self._empty and importance is not None and importance.level == "token":  # an empty row weighs 0
            for target in derived[3:5]:
                ops.add(target, self._valid, out=target)
                ops.sub(target, 1.0, out=target)
        first = layout.reduced.index("training_ppl")
        ppl = ops.clamp(derived[:3], -SAFETY_BOUND, SAFETY_BOUND, out=self._figures[first : first + 3])
        ops.exp(ppl, out=ppl)
        ops.abs(derived[2], out=figure["log_ppl_abs_diff"])
        chi2 = ops.clamp(figure["l"], -SAFETY_BOUND, SAFETY_BOUND, out=figure["chi2_seq"])
        ops.expm1(ops.add(chi2, chi2, out=chi2), out=chi2)
        for c in layout.token_criteria:
            touched = figure[f"{c.name}/touched"]
            ops.add(figure[f"{c.name}/below"], figure[f"{c.name}/above"], out=touched)
            ops.gt(touched, 0.0, out=touched)
        if layout.plan.can_reject:
            ops.lt(figure["kept"], n, out=figure["any_rejected"])
        if layout.plan.log_veto is not None:
            ops.gt(figure["veto_low"], 0.0, out=figure["veto_row"])
        self._derive_powers(n)

    def _derive_powers(self, n: Array) -> None:
        """Fills what `layout.POWERS` and `layout.ROW_POWERS` list."""
        ops, lower, upper = self._ops, self._layout.lower, self._layout.upper
        ops.copy(self._ranged[: len(self._plain)], out=self._plain)
        square, below, above, outside = self._powers
        if len(square):
            ops.mul(self._bounded, self._bounded, out=square)
            ops.lt(self._bounded, lower, out=below)
            ops.gt(self._bounded, upper, out=above)
            ops.add(below, above, out=outside)
        whole, inside, k = self._whole, self._inside, len(self._whole)
        if k:
            times, outside_times, inside_times, inside2_times = self._row_powers
            ops.mul(whole, n, out=times)
            ops.mul(outside[-k:], n, out=outside_times)
            ops.maximum(whole, lower[-k:], out=inside)
            ops.minimum(inside, upper[-k:], out=inside)
            ops.mul(inside, n, out=inside_times)
            ops.mul(inside_times, inside, out=inside2_times)

    def _over_rows(self) -> tuple[Array, Array, Array]:
        figures, low, high = self._figures, self._ranged, self._ranged
        if self._masked and not self._valid.all():
            empty = self._valid == 0.0
            figures = np.where(empty, 0.0, figures)
            low, high = np.where(empty, np.inf, low), np.where(empty, -np.inf, high)
            if self._empty:
                counted = ~np.array(self._layout.rejection_reduced)
                figures[counted] = self._figures[counted]
                counted = ~np.array(self._layout.rejection_ranged)
                low[counted] = high[counted] = self._ranged[counted]
        sums, minima, maxima = self._out
        np.add.reduce(figures, 1, out=sums)
        np.minimum.reduce(low, 1, out=minima)
        np.maximum.reduce(high, 1, out=maxima)
        return self._out

    def _row_weights(self, spec: ImportanceSampling, table: Array) -> None:
        """`d` of each row, from its log ratio; an empty row, where it counts, weighs 0."""
        figure, n = self._figure, self._figure["n"]
        first = self._layout.table.index("is_log_ratio")
        log_ratio, high, low = table[first : first + 3].astype(np.float64)
        clamped = np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)
        d = np.expm1(clamped)
        if spec.mode == "zero":
            d[high + low > 0] = -1.0
        elif spec.mode != "mask":
            d = np.clip(d, (spec.lower if spec.mode == "clip" else 0.0) - 1.0, spec.upper - 1.0)
        row_high, row_low = high, low
        if self._empty:
            valid = n > 0
            d = np.where(valid, d, -1.0)
            row_high, row_low = np.where(valid, high, 0.0), np.where(valid, low, 1.0)
        w = d + 1.0
        values = (high, low, high * n, low * n, row_high, row_low, np.exp(clamped) * n, w * n, w * n * w)
        names = ("is_high", "is_low", "is_elements_high", "is_elements_low", "is_seq_high", "is_seq_low")
        for name, value in zip((*names, "is_raw", "is_w", "is_w2"), values, strict=True):
            figure[name][:] = value
        self._ranged[len(self._layout.derived) - 1], self._ranged[-1] = d, log_ratio


def _places(layout: Layout) -> tuple[slice, slice, slice]:
    """Where sums, statistics and extremes lie in the table."""
    first = len(layout.sums)
    second = first + len(layout.row_criteria)
    return slice(0, first), slice(first, second), slice(second, second + len(layout.extremes))
