"""From the table of per-row figures to sums, minima and maxima over rows. On the host, in float64.

A `Reduction` owns its buffers, like the kernel, and for the same reason.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.buffers import cached
from flowgrpo_rc.correction.kernel import FAR
from flowgrpo_rc.correction.layout import POWERS, Layout
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, ImportanceSampling

_ROWS_AT_ONCE = 8192
# On the CPU whatever the default device is; numbers as tensors, which an operation takes faster than Python floats
_ZERO, _ONE, _TWO, _FAR = torch.tensor([0.0, 1.0, 2.0, FAR], dtype=torch.float64, device="cpu").unbind(0)


def reduce_table(
    layout: Layout, table: Float[Tensor, "figures rows"], *, masked: bool, count_empty_rows: bool
) -> Float[Tensor, " reduced"]:
    """Sums of `layout.reduced`, then minima and maxima of `layout.ranged`, end to end.

    Rows without a valid element are left out; with `count_empty_rows` only of the criteria's figures.
    """
    parts = []
    for part in table.split(_ROWS_AT_ONCE, dim=1):
        key = ("reduction", layout, part.shape[1], masked, count_empty_rows)
        reduction = cached(key, lambda: Reduction(layout, part.shape[1], masked, count_empty_rows))  # noqa: B023
        parts.append(reduction.run(part))
        if part.shape[1] < table.shape[1]:
            parts[-1] = parts[-1].clone()
    if len(parts) == 1:
        return parts[0]
    stacked, k = torch.stack(parts), len(layout.ranged)
    sums, minima, maxima = stacked.split((stacked.shape[1] - 2 * k, k, k), dim=1)
    return torch.cat((sums.sum(0), minima.amin(0), maxima.amax(0)))


class Reduction:
    """Derives the figures of each row and reduces them, for tables of a given width."""

    def __init__(self, layout: Layout, rows: int, masked: bool, count_empty_rows: bool) -> None:
        self._layout, self._masked, self._empty = layout, masked, count_empty_rows and masked
        new = torch.empty((0,), dtype=torch.float64, device="cpu").new_empty
        reduced, ranged, derived = len(layout.reduced), len(layout.ranged), len(layout.derived)
        self._figures = new((reduced, rows))
        self._figure = dict(zip(layout.reduced, self._figures.unbind(0), strict=True))
        self._sums = self._figures[: len(layout.sums)]
        self._means = new((len(layout.means), rows))
        self._mean_sums = self._sums[: len(layout.means)]
        self._ranged = new((ranged, rows))
        self._derived = self._ranged[:derived]
        linear = layout.combine.shape[0]
        self._linear = self._ranged[:linear]
        self._statistics = self._ranged[linear : linear + len(layout.row_criteria)]
        self._extremes = self._ranged[derived : derived + len(layout.extremes)]
        first = self._place("training_ppl")
        self._ppl = self._figures[first : first + 3]
        first = self._place(layout.derived[0], after=first)
        powers = self._figures[first:].view(len(POWERS), derived, rows)
        self._power = dict(zip(POWERS, powers.unbind(0), strict=True))
        self._bad = [
            (self._figure[f"{c.name}/touched"], self._figure[f"{c.name}/below"], self._figure[f"{c.name}/above"])
            for c in layout.token_criteria
        ]
        self._out = new((reduced + 2 * ranged,))
        self._results = self._out.split((reduced, ranged, ranged))
        self._inside = new((derived, rows))
        self._figure["rows"].fill_(1.0)
        self._valid = self._figure["valid_rows"].fill_(1.0)
        self._divisor = new((rows,)) if masked else self._figure["n"]
        self._away = new((ranged, rows) if self._empty else (rows,)) if masked else None
        self._shifted = new((ranged, rows)) if masked else self._ranged
        self._counted = torch.tensor(layout.rejection_reduced, device="cpu")
        self._confined = torch.tensor(layout.rejection_ranged, dtype=torch.float64, device="cpu").unsqueeze(1)
        self._parts = _places(layout)

    def _place(self, name: str, after: int = 0) -> int:
        return self._layout.reduced.index(name, after)

    def run(self, table: Float[Tensor, "figures rows"]) -> Float[Tensor, " reduced"]:
        """The reduced figures, in a buffer that the next `run` overwrites."""
        figure, sums, statistics, extremes = self._figure, *self._parts
        self._sums.copy_(table[sums])
        n = figure["n"]
        if self._masked:
            torch.gt(n, _ZERO, out=self._valid)
            torch.clamp(n, min=1.0, out=self._divisor)
        torch.div(self._mean_sums, self._divisor, out=self._means)
        torch.mm(self._layout.combine, self._means, out=self._linear)
        if self._layout.row_criteria:
            self._statistics.copy_(table[statistics])
        self._extremes.copy_(table[extremes])
        self._importance(table, n)
        torch.clamp(self._ranged[:3], -SAFETY_BOUND, SAFETY_BOUND, out=self._ppl).exp_()
        torch.abs(self._ranged[2], out=figure["log_ppl_abs_diff"])
        chi2 = torch.clamp(figure["l"], -SAFETY_BOUND, SAFETY_BOUND, out=figure["chi2_seq"])
        chi2.mul_(_TWO).expm1_()
        for touched, below, above in self._bad:
            torch.gt(torch.add(below, above, out=touched), _ZERO, out=touched)
        if self._layout.plan.can_reject:
            kept = figure["kept"].copy_(table[-1])
            torch.lt(kept, n, out=figure["any_rejected"])
        if self._layout.plan.log_veto is not None:
            torch.gt(figure["veto_low"], _ZERO, out=figure["veto_row"])
        self._powers(n)
        return self._over_rows()

    def _powers(self, n: Tensor) -> None:
        """Fills what `layout.POWERS` lists."""
        x, power, layout = self._derived, self._power, self._layout
        power[""].copy_(x)
        torch.mul(x, x, out=power["2"])
        torch.lt(x, layout.lower, out=power["<"])
        torch.gt(x, layout.upper, out=power[">"])
        torch.add(power["<"], power[">"], out=power["!"])
        torch.mul(x, n, out=power["*n"])
        torch.mul(power["!"], n, out=power["!*n"])
        inside = torch.clamp(x, layout.lower, layout.upper, out=self._inside)
        torch.mul(inside, n, out=power["in*n"])
        torch.mul(power["in*n"], inside, out=power["in2*n"])

    def _over_rows(self) -> Tensor:
        sums, minima, maxima = self._results
        if self._away is None:
            torch.sum(self._figures, 1, out=sums)
            torch.amin(self._ranged, 1, out=minima)
            torch.amax(self._ranged, 1, out=maxima)
            return self._out
        torch.mv(self._figures, self._valid, out=sums)
        if self._empty:
            torch.where(self._counted, sums, self._figures.sum(1), out=sums)
            torch.mul(self._confined, _ONE - self._valid, out=self._away).mul_(_FAR)
        else:
            torch.sub(_ONE, self._valid, out=self._away).mul_(_FAR)
        torch.amin(torch.add(self._ranged, self._away, out=self._shifted), 1, out=minima)
        torch.amax(torch.sub(self._ranged, self._away, out=self._shifted), 1, out=maxima)
        return self._out

    def _importance(self, table: Tensor, n: Tensor) -> None:
        """`d` of each row, where it is not linear in the row means; an empty row, where it counts, weighs 0."""
        spec = self._layout.plan.importance
        if spec is None:
            return
        if spec.level != "token":
            self._row_weights(spec, table, n)
        elif self._empty:
            self._ranged[3:5].sub_(1.0 - self._valid)

    def _row_weights(self, spec: ImportanceSampling, table: Tensor, n: Tensor) -> None:
        figure = self._figure
        first = self._layout.table.index("is_log_ratio")
        log_ratio, high, low = table[first : first + 3].double().unbind(0)
        clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        d = torch.expm1(clamped)
        if spec.mode == "zero":
            d = torch.where(high + low > 0, -1.0, d)
        elif spec.mode != "mask":
            d = d.clamp((spec.lower if spec.mode == "clip" else 0.0) - 1.0, spec.upper - 1.0)
        row_high, row_low = high, low
        if self._empty:
            valid = self._valid > 0
            d = torch.where(valid, d, -1.0)
            row_high, row_low = torch.where(valid, high, 0.0), torch.where(valid, low, 1.0)
        w = d + 1.0
        values = (high, low, high * n, low * n, row_high, row_low, clamped.exp_() * n, w * n, w * n * w)
        names = ("is_high", "is_low", "is_elements_high", "is_elements_low", "is_seq_high", "is_seq_low")
        for name, value in zip((*names, "is_raw", "is_w", "is_w2"), values, strict=True):
            figure[name].copy_(value)
        self._derived[-1].copy_(d)
        self._ranged[-1].copy_(log_ratio)


def _places(layout: Layout) -> tuple[slice, slice, slice]:
    """Where sums, statistics and extremes lie in the table."""
    first = len(layout.sums)
    second = first + len(layout.row_criteria)
    return slice(0, first), slice(first, second), slice(second, second + len(layout.extremes))
