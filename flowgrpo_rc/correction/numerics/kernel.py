"""The pass over the elements: weights, mask and per-row figures of one block of rows, on the tensors' device.

Notation, for one element: `l = log_prob - rollout_log_prob` (train over rollout), `lc` its value clamped to
+-SAFETY_BOUND, `e = exp(lc) - 1`, `d = w - 1` with `w` the applied weight. Working with `e` and `d` keeps the
precision: at |l| near 1e-4, `exp(l) - 1 - l` in float32 is rounding noise, `expm1(l) - l` is not.

Invalid elements are selected away before any arithmetic, so that a NaN there cannot reach a result. Nothing here
waits for the device. A kernel owns its buffers and fills them with `out=`. Comparisons write 0/1 in the compute dtype,
so that they can be added and summed. Where the C extension is built it does all of this in host memory (`native`).
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.layout import Layout, band
from flowgrpo_rc.correction.numerics.rows import Rows
from flowgrpo_rc.correction.plan import SAFETY_BOUND, Criterion, ImportanceSampling

# Up to this many elements every figure has a buffer and all are summed at once (few operations); above it they
# share one (little memory).
STACKED_ELEMENTS = 16384
# Rows up to this long are handled transposed, so that sums along a row run over contiguous memory.
TRANSPOSED_COLUMNS = 64
# Beyond any log ratio, yet safe to add to one: takes invalid elements out of minima and maxima.
FAR = 1e38
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@lru_cache(maxsize=256)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number on the host as operations take it fastest, rounded to the compute dtype."""
    return torch.tensor(value, dtype=dtype, device="cpu")


class Kernel:
    """The pass for a block of `(rows, columns)` elements; `run` leaves the figures in `table`.

    Args:
        layout: names and order of the figures; its dtype is the compute dtype.
        masked: whether the block comes with a mask.
    """

    def __init__(self, layout: Layout, rows: int, columns: int, *, masked: bool, device: torch.device) -> None:
        self._layout, self._columns, self._masked = layout, columns, masked
        self._like = torch.empty(0, dtype=layout.dtype, device=device)
        self._transposed = columns <= TRANSPOSED_COLUMNS
        self._dim = 0 if self._transposed else 1
        self._shape = (columns, rows) if self._transposed else (rows, columns)
        self.table = self._like.new_empty((layout.height, rows))
        self._row: dict[str, Tensor] = dict(zip(layout.table, self.table, strict=True))
        self._buffers()
        self._rows = Rows(layout, self.table, columns, masked=masked)

    def _buffers(self) -> None:
        """One per summed figure, or a shared one; and those that no figure needs."""
        layout = self._layout
        self._summed = self.table[: len(layout.sums)]
        self._stack: Tensor | None = None
        self._stacked = self._shape[0] * self._shape[1] <= STACKED_ELEMENTS
        if self._stacked and self._columns == 1:  # an element is its row's sum
            self._buffer = dict(zip(layout.sums, self._summed[:, None], strict=True))
        elif self._stacked:
            self._stack = self._like.new_empty((len(layout.sums), *self._shape))
            self._buffer = dict(zip(layout.sums, self._stack, strict=True))
        else:
            scratch, lasting = self._new(), {"l", "n"} if self._masked else {"l"}
            if any(c.statistic == "k2" for c in layout.token_criteria):
                lasting.add("k2")
            self._buffer = {name: self._new() if name in lasting else scratch for name in layout.sums}
        self._e, self._temporary = self._new(), self._new()
        self._made: dict[str, Tensor] = {}
        self._weights = self._temporary if layout.plan.importance is None else self._new()
        self._rejects_elements = False
        if not self._masked:
            ones = self._buffer["n"] if self._stacked else self._row["n"]
            ones.fill_(1.0 if self._stacked else float(self._columns))
            return
        self._ones, bits = self._buffer["n"], _BITS[layout.dtype]
        self._bits, self._l_bits = self._temporary.view(bits), self._buffer["l"].view(bits)
        self._p_bits = self._buffer["log_prob"].view(bits)

    def _new(self) -> Tensor:
        return self._like.new_empty(self._shape)

    def run(
        self,
        log_prob: Float[Tensor, "R T"],
        rollout_log_prob: Float[Tensor, "R T"],
        mask: Shaped[Tensor, "R T"] | None,
        weights: Float[Tensor, "R T"] | None,
        kept: Shaped[Tensor, "R T"] | None,
    ) -> None:
        """Fills `table`, and `weights` and `kept` (mask times keep) where given. There is a mask if `masked`."""
        layout, plan = self._layout, self._layout.plan
        if mask is not None:
            torch.ne(self._turned(mask), 0, out=self._ones)
        self._difference(self._ready(log_prob), self._ready(rollout_log_prob))
        self._ends_of_rows()
        self._base()
        if plan.importance is not None and plan.importance.level == "token":
            self._token_weights(plan.importance, self._weights)
        if "k2" in layout.means:
            k2 = self._buffer["k2"]
            torch.mul(self._lc, self._lc, out=k2)
            torch.mul(k2, self._number(0.5), out=k2)
            self._done("k2")
        for criterion in layout.token_criteria:
            self._token_criterion(criterion)
        if plan.log_veto is not None:
            self._count("veto_low", self._l, below=plan.log_veto)
        if self._stack is not None:
            torch.sum(self._stack, self._dim + 1, out=self._summed)
        self._rows.run()
        self._finish()
        if weights is not None:
            weights.copy_(self._turned(self._weights))
        if kept is not None:
            keep = self._turned(self._own("bad") if self._rejects_elements else self._spread(self._rows.kept))
            if mask is None:
                torch.ne(keep.expand_as(kept), 0.0, out=kept)
            else:
                torch.where(keep != 0, mask, mask.new_zeros(()), out=kept)

    def _number(self, value: float) -> Tensor:
        return _constant(value, self._layout.dtype)

    def _turned(self, x: Tensor) -> Tensor:
        return x.t() if self._transposed else x

    def _spread(self, row: Tensor) -> Tensor:
        """A figure of each row, as it broadcasts to the block's elements."""
        return row[None, :] if self._dim == 0 else row[:, None]

    # Element level

    def _ready(self, values: Tensor) -> Tensor:
        """`values` as they lie in the block, in the compute dtype."""
        return self._turned(values.detach()).to(self._e.dtype).resolve_neg()

    def _difference(self, log_prob: Tensor, rollout_log_prob: Tensor) -> None:
        """`l` and the sum of `log_prob`; with a mask, bits by which `and` selects whatever is there."""
        self._l = torch.sub(log_prob, rollout_log_prob, out=self._buffer["l"])
        if self._masked:
            self._bits.copy_(self._ones)
            torch.neg(self._bits, out=self._bits)
            torch.bitwise_and(self._l_bits, self._bits, out=self._l_bits)
            torch.bitwise_and(log_prob.view(self._bits.dtype), self._bits, out=self._p_bits)
        else:
            self._buffer["log_prob"].copy_(log_prob)
        self._done("log_prob")

    def _done(self, name: str, values: Tensor | None = None) -> None:
        """The buffer of `name` is filled."""
        if not self._stacked:
            torch.sum(self._buffer[name] if values is None else values, self._dim, out=self._row[name])

    def _own(self, name: str) -> Tensor:
        """A buffer that not every plan needs."""
        if name not in self._made:
            self._made[name] = self._new()
        return self._made[name]

    def _ends_of_rows(self) -> None:
        """Largest and smallest valid `l` of each row."""
        dim, row, l = self._dim, self._row, self._l  # noqa: E741
        if self._columns == 1:
            self._rows.extremes.copy_(l)
        elif not self._masked:
            torch.amax(l, dim, out=row["l_max"])
            torch.amin(l, dim, out=row["l_min"])
        else:
            away = self._far(self._own("other"))
            torch.amax(torch.add(l, away, out=self._temporary), dim, out=row["l_max"])
            torch.amin(torch.sub(l, away, out=self._temporary), dim, out=row["l_min"])

    def _far(self, out: Tensor) -> Tensor:
        """0 at valid elements, `-FAR` at the others: out of the way of a maximum."""
        torch.sub(self._ones, self._number(1.0), out=out)
        return torch.mul(out, self._number(FAR), out=out)

    def _base(self) -> None:
        """`lc`, `e`, and the sums that every call reports."""
        buffer, l = self._buffer, self._l  # noqa: E741
        self._done("l")
        if self._masked:
            self._done("n")
        torch.abs(l, out=buffer["abs"])
        self._done("abs")
        clamped = buffer["lc"] if self._stacked else self._own("lc")
        lc = self._lc = torch.clamp(l, -SAFETY_BOUND, SAFETY_BOUND, out=clamped)
        self._done("lc", clamped)
        e = torch.expm1(lc, out=self._e)
        torch.sub(e, lc, out=buffer["k3"])
        self._done("k3")
        torch.mul(e, e, out=buffer["e2"])
        self._done("e2")

    def _token_weights(self, spec: ImportanceSampling, weights: Tensor) -> None:
        """Per-element weights, the sums of `d` and `d^2`, and the elements beyond the bounds."""
        d = self._buffer["d"]
        torch.exp(self._lc, out=weights)
        if spec.mode in ("zero", "mask"):
            self._outside(spec, weights)
        else:
            self._count("is_high", self._lc, above=spec.log_upper)
            self._count("is_low", self._lc, below=spec.log_lower)
            lower = spec.lower if spec.mode == "clip" and spec.lower > 0 else None
            torch.clamp(weights, lower, spec.upper, out=weights)
            torch.clamp(self._e, None if lower is None else lower - 1.0, spec.upper - 1.0, out=d)
            if self._masked and not (lower or 0.0) <= 1.0 <= spec.upper:  # at invalid elements e is 0
                torch.mul(d, self._ones, out=d)
        if self._masked:
            torch.mul(weights, self._ones, out=weights)
        self._done("d")
        torch.mul(d, d, out=self._buffer["d2"])
        self._done("d2")
        self._buffer["w"].copy_(weights)
        self._done("w")
        torch.mul(weights, weights, out=self._buffer["w2"])
        self._done("w2")

    def _outside(self, spec: ImportanceSampling, weights: Tensor) -> None:
        """Modes "zero" (no weight outside the bounds) and "mask" (weight unbounded, the element rejected)."""
        outside = self._temporary.copy_(self._count("is_high", self._lc, above=spec.log_upper))
        low = self._count("is_low", self._lc, below=spec.log_lower)
        if spec.lower > 0:
            torch.add(outside, low, out=outside)
        d = self._buffer["d"].copy_(self._e)
        if spec.mode == "mask":
            self._reject(outside)
            return
        inside = torch.eq(outside, self._number(0.0), out=self._own("other"))
        torch.mul(weights, inside, out=weights)
        torch.mul(d, inside, out=d)
        torch.sub(d, outside, out=d)
        # the largest applied weight is not a function of the largest ratio
        shown = d
        if self._masked and self._columns > 1:
            shown = torch.add(d, self._far(inside), out=inside)
        torch.amax(shown, self._dim, out=self._row["is_d_max"])
        if self._masked:
            torch.mul(d, self._ones, out=d)

    def _token_criterion(self, c: Criterion) -> None:
        """Marks what a per-element criterion rejects, and sums its statistic clamped to its bounds.

        For k1 that is `l` in place of `-l`: only its spread is used.
        """
        lower, upper = (c.lower, c.upper) if c.statistic == "k1" else band(c)
        below, above = ("above", "below") if c.statistic == "k1" else ("below", "above")
        statistic = self._lc
        if c.statistic != "k1":
            if c.statistic == "k2":
                statistic = self._buffer["k2"]
            else:
                statistic = torch.sub(self._e, self._lc, out=self._own("other"))
            shown = statistic
            if self._masked and self._columns > 1:
                shown = torch.sub(statistic, self._far(self._temporary), out=self._temporary)
            torch.amin(shown, self._dim, out=self._row[f"{c.name}/min"])
        self._reject(self._count(f"{c.name}/{above}", statistic, above=upper))
        self._reject(self._count(f"{c.name}/{below}", statistic, below=lower))
        inside = torch.clamp(statistic, lower, upper, out=self._buffer[f"{c.name}/in"])
        if self._masked and not lower <= 0.0 <= upper:
            torch.mul(inside, self._ones, out=inside)
        self._done(f"{c.name}/in")
        torch.mul(inside, inside, out=self._buffer[f"{c.name}/in2"])
        self._done(f"{c.name}/in2")

    def _count(self, name: str, values: Tensor, *, above: float = math.inf, below: float = -math.inf) -> Tensor:
        """Counts valid elements with `values > above` or `< below`; the buffer returned is 1 where one is."""
        found = self._buffer[name]
        if above < math.inf:
            torch.gt(values, self._number(above), out=found)
        else:
            torch.lt(values, self._number(below), out=found)
        if self._masked and (above < 0.0 or below > 0.0):  # invalid elements hold 0
            torch.mul(found, self._ones, out=found)
        self._done(name)
        return found

    def _reject(self, found: Tensor) -> None:
        if self._rejects_elements:
            torch.add(self._own("bad"), found, out=self._own("bad"))
        else:
            self._own("bad").copy_(found)
            self._rejects_elements = True

    # Both

    def _finish(self) -> None:
        """Row weights to elements; `bad` becomes 1.0 where nothing rejects; counts what each row keeps."""
        plan, rows = self._layout.plan, self._rows
        if plan.importance is not None and plan.importance.level != "token":
            made = self._spread(self._row["is_row_weight"])
            if self._masked:
                torch.mul(self._ones, made, out=self._weights)
            else:
                self._weights.copy_(made)
        if not plan.can_reject:
            return
        if not self._rejects_elements:
            torch.mul(self._row["n"], rows.kept, out=self._row["kept"])
            return
        keep = torch.eq(self._own("bad"), self._number(0.0), out=self._own("bad"))
        if rows.rejects:
            torch.mul(keep, self._spread(rows.kept), out=keep)
        counted = torch.mul(keep, self._ones, out=self._temporary) if self._masked else keep
        torch.sum(counted, self._dim, out=self._row["kept"])
