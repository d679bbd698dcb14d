"""From the table of per-row figures to sums, minima and maxima over rows. On the host, in float64.

A `Reduction` owns its buffers, like the kernel, and for the same reason.
"""

import numpy as np
from jaxtyping import Float

from flowgrpo_rc.correction.buffers import cached
from flowgrpo_rc.correction.layout import POWERS, Layout
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, ImportanceSampling

_ROWS_AT_ONCE = 4096
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
        if len(parts) == 1:
            return parts[0]
        sums, minima, maxima = (np.stack(each) for each in zip(*parts, strict=True))
        return sums.sum(0), minima.min(0), maxima.max(0)


class Reduction:
    """Derives the figures of each row and reduces them, for tables of a given width."""

    def __init__(self, layout: Layout, rows: int, masked: bool, count_empty_rows: bool) -> None:
        self._layout, self._masked, self._empty = layout, masked, count_empty_rows and masked
        reduced, ranged, derived = len(layout.reduced), len(layout.ranged), len(layout.derived)
        self._figures = np.empty((reduced, rows))
        self._figure = dict(zip(layout.reduced, self._figures, strict=True))
        self._sums = self._figures[: len(layout.sums)]
        means = np.empty((len(layout.means), rows))
        self._means, self._mean_sums = means, self._sums[: len(layout.means)]
        self._ranged = np.empty((ranged, rows))
        self._derived = self._ranged[:derived]
        linear = len(layout.linear)
        mean = dict(zip(layout.means, means, strict=True))
        self._linear = [
            (target, mean[first], sign, mean[second] if second else None)
            for target, (first, sign, second) in zip(self._ranged, layout.linear, strict=False)
        ]
        self._statistics = self._ranged[linear : linear + len(layout.row_criteria)]
        self._extremes = self._ranged[derived : derived + len(layout.extremes)]
        first = layout.reduced.index("training_ppl")
        self._ppl = self._figures[first : first + 3]
        first = layout.reduced.index(layout.derived[0], first)
        self._power = dict(zip(POWERS, self._figures[first:].reshape(len(POWERS), derived, rows), strict=True))
        self._touched = [
            [self._figure[f"{c.name}/{part}"] for part in ("touched", "below", "above")] for c in layout.token_criteria
        ]
        self._inside = np.empty((derived, rows))
        self._figure["rows"].fill(1.0)
        self._valid = self._figure["valid_rows"]
        self._valid.fill(1.0)
        self._divisor = np.empty(rows) if masked else self._figure["n"]
        self._lower, self._upper = layout.lower, layout.upper
        self._parts = _places(layout)

    def run(self, table: Float[Array, "figures rows"]) -> tuple[Array, Array, Array]:
        """Sums, minima and maxima of the table's figures and of what derives from them."""
        figure, (sums, statistics, extremes) = self._figure, self._parts
        self._sums[:] = table[sums]
        n = figure["n"]
        if self._masked:
            np.greater(n, 0.0, out=self._valid)
            np.maximum(n, 1.0, out=self._divisor)
        np.divide(self._mean_sums, self._divisor, out=self._means)
        for target, first, sign, second in self._linear:
            if second is None:
                np.multiply(first, sign, out=target)
            else:
                (np.add if sign > 0 else np.subtract)(second, first, out=target)
        if self._layout.row_criteria:
            self._statistics[:] = table[statistics]
        self._extremes[:] = table[extremes]
        self._importance(table, n)
        np.maximum(self._ranged[:3], -SAFETY_BOUND, out=self._ppl)
        np.exp(np.minimum(self._ppl, SAFETY_BOUND, out=self._ppl), out=self._ppl)
        np.absolute(self._ranged[2], out=figure["log_ppl_abs_diff"])
        chi2 = np.maximum(figure["l"], -SAFETY_BOUND, out=figure["chi2_seq"])
        np.minimum(chi2, SAFETY_BOUND, out=chi2)
        np.expm1(np.add(chi2, chi2, out=chi2), out=chi2)
        for touched, below, above in self._touched:
            np.greater(np.add(below, above, out=touched), 0.0, out=touched)
        if self._layout.plan.can_reject:
            figure["kept"][:] = table[-1]
            np.less(table[-1], n, out=figure["any_rejected"])
        if self._layout.plan.log_veto is not None:
            np.greater(figure["veto_low"], 0.0, out=figure["veto_row"])
        self._powers(n)
        return self._over_rows()

    def _powers(self, n: Array) -> None:
        """Fills what `layout.POWERS` lists."""
        x, power = self._derived, self._power
        power[""][:] = x
        np.multiply(x, x, out=power["2"])
        np.less(x, self._lower, out=power["<"])
        np.greater(x, self._upper, out=power[">"])
        np.add(power["<"], power[">"], out=power["!"])
        np.multiply(x, n, out=power["*n"])
        np.multiply(power["!"], n, out=power["!*n"])
        inside = np.maximum(x, self._lower, out=self._inside)
        np.minimum(inside, self._upper, out=inside)
        np.multiply(inside, n, out=power["in*n"])
        np.multiply(power["in*n"], inside, out=power["in2*n"])

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
        return np.add.reduce(figures, 1), np.minimum.reduce(low, 1), np.maximum.reduce(high, 1)

    def _importance(self, table: Array, n: Array) -> None:
        """`d` of each row, where it is not linear in the row means; an empty row, where it counts, weighs 0."""
        spec = self._layout.plan.importance
        if spec is None:
            return
        if spec.level != "token":
            self._row_weights(spec, table, n)
        elif self._empty:
            self._ranged[3:5] -= 1.0 - self._valid

    def _row_weights(self, spec: ImportanceSampling, table: Array, n: Array) -> None:
        figure = self._figure
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
            valid = self._valid > 0
            d = np.where(valid, d, -1.0)
            row_high, row_low = np.where(valid, high, 0.0), np.where(valid, low, 1.0)
        w = d + 1.0
        values = (high, low, high * n, low * n, row_high, row_low, np.exp(clamped) * n, w * n, w * n * w)
        names = ("is_high", "is_low", "is_elements_high", "is_elements_low", "is_seq_high", "is_seq_low")
        for name, value in zip((*names, "is_raw", "is_w", "is_w2"), values, strict=True):
            figure[name][:] = value
        self._derived[-1], self._ranged[-1] = d, log_ratio


def _places(layout: Layout) -> tuple[slice, slice, slice]:
    """Where sums, statistics and extremes lie in the table."""
    first = len(layout.sums)
    second = first + len(layout.row_criteria)
    return slice(0, first), slice(first, second), slice(second, second + len(layout.extremes))
