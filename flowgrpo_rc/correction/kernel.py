"""The pass over the elements: weights, mask and per-row figures of one block of rows, on the tensors' device.

Notation, for one element: `l = log_prob - rollout_log_prob` (train over rollout), `lc` its value clamped to
+-SAFETY_BOUND, `e = exp(lc) - 1`, `d = w - 1` with `w` the applied weight. Working with `e` and `d` keeps the
precision: at |l| near 1e-4, `exp(l) - 1 - l` in float32 is rounding noise, `expm1(l) - l` is not.

Invalid elements are selected away before any arithmetic, so that a NaN there cannot reach a result. Nothing here
waits for the device. A kernel owns its buffers and fills them with `out=`: on a CPU allocating costs more than
computing. Comparisons write 0/1 in the compute dtype, so that they can be added and summed.
"""

import math
from bisect import bisect_left, bisect_right
from typing import Any

import torch

from flowgrpo_rc.correction.layout import Layout, band, element_cuts
from flowgrpo_rc.correction.ops import Array, Ops, Tape
from flowgrpo_rc.correction.rows import Rows
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, Criterion, ImportanceSampling

# Up to this many elements every figure has a buffer and all are summed at once (few operations); above it they
# share one that stays in cache (little memory).
STACKED_ELEMENTS = 16384
# Rows up to this long are handled transposed, so that sums along a row run over contiguous memory.
TRANSPOSED_COLUMNS = 64
# Beyond any log ratio, yet safe to add to one: takes invalid elements out of minima and maxima.
FAR = 1e38
# Whether `l` is within the safety bound, and how many of the values it is compared with lie below it and not above it.
Facts = tuple[bool, int, int]
_NOTHING: Facts = (False, -1, -1)
# A kernel's tapes: blocks differ in few facts at a time.
_TAPES = 8


class Kernel:
    """The pass for blocks of `(rows, columns)` elements; `run` leaves the figures in `table`.

    Args:
        layout: names and order of the figures; its dtype is the compute dtype.
        masked: whether blocks come with a mask.
        ops: numpy or torch.
    """

    def __init__(self, layout: Layout, rows: int, columns: int, *, masked: bool, ops: Ops, device: Any) -> None:
        self._layout, self._columns, self._masked, self._ops = layout, columns, masked, ops
        self._tapes: dict[Facts, tuple[Tape, bool]] = {}
        self._cuts = sorted(float(ops.number(cut)) for cut in element_cuts(layout)) if ops.on_host else []
        self._transposed = columns <= TRANSPOSED_COLUMNS
        self._dim = 0 if self._transposed else 1
        self._shape = (columns, rows) if self._transposed else (rows, columns)
        self.table = ops.new((layout.height, rows))
        self._row: dict[str, Array] = dict(zip(layout.table, self.table, strict=True))
        self._buffers()
        self._rows = Rows(layout, self.table, columns, masked=masked, ops=ops, device=device)

    def _buffers(self) -> None:
        """One per summed figure, or a shared one; and those that no figure needs."""
        layout, ops, new = self._layout, self._ops, self._ops.new
        self._summed = self.table[: len(layout.sums)]
        self._stack: Array = None
        self._stacked = self._shape[0] * self._shape[1] <= STACKED_ELEMENTS
        if self._stacked and self._columns == 1:  # an element is its row's sum
            self._buffer = dict(zip(layout.sums, self._summed[:, None], strict=True))
        elif self._stacked:
            self._stack = new((len(layout.sums), *self._shape))
            self._buffer = dict(zip(layout.sums, self._stack, strict=True))
        else:
            scratch, lasting = new(self._shape), {"l", "n"} if self._masked else {"l"}
            if any(c.statistic == "k2" for c in layout.token_criteria):
                lasting.add("k2")
            self._buffer = {name: new(self._shape) if name in lasting else scratch for name in layout.sums}
        self._inputs: dict[str, Array] = {}
        self._e, self._temporary = new(self._shape), new(self._shape)
        self._made: dict[str, Array] = {}
        self._weights = self._temporary if layout.plan.importance is None else new(self._shape)
        if not self._masked:
            ops.fill(*((self._buffer["n"], 1.0) if self._stacked else (self._row["n"], float(self._columns))))
            return
        self._ones = self._buffer["n"]
        self._bits = ops.bits(self._temporary)
        self._l_bits, self._p_bits = ops.bits(self._buffer["l"]), ops.bits(self._buffer["log_prob"])

    def run(
        self, log_prob: Array, rollout_log_prob: Array, mask: Array, weights: Array, kept: torch.Tensor | None
    ) -> None:
        """Fills `table`, and `weights` and `kept` (mask times keep) where given. All are `(rows, columns)`.

        Arrays of `ops`, but for `kept`; `mask`, `weights` and `kept` may be None, `mask` only if not `masked`.
        """
        ops, turn = self._ops, self._ops.transpose if self._transposed else lambda x: x
        if self._masked:
            ops.ne(turn(mask), 0, out=self._ones)
        self._difference(self._ready("p", turn(log_prob)), self._ready("q", turn(rollout_log_prob)))
        self._ends_of_rows()
        facts = self._facts()
        if facts in self._tapes:
            tape, self._rejects_elements = self._tapes[facts]
            tape.replay()
        elif ops.on_host and len(self._tapes) < _TAPES:
            self._record(facts)
        else:
            self._pass()
        if weights is not None:
            ops.copy(turn(self._weights), out=weights)
        if kept is not None:
            keep = self._own("bad") if self._rejects_elements else self._spread(self._rows.kept)
            ops.keep(mask, turn(keep), kept)

    def _facts(self) -> Facts:
        """What the extremes of `l` say about the block; on them alone depends which operations it needs.

        On a device nobody looks, and nothing is known.
        """
        self._narrow, self._least, self._most = False, -math.inf, math.inf
        if not self._ops.on_host:
            return _NOTHING
        least, most = self._ops.ends(self._row["l_min"], self._row["l_max"])
        if not (math.isfinite(least) and math.isfinite(most)):
            return _NOTHING
        self._least, self._most = least, most
        self._narrow = least > -SAFETY_BOUND and most < SAFETY_BOUND
        return self._narrow, bisect_left(self._cuts, least), bisect_right(self._cuts, most)

    def _record(self, facts: Facts) -> None:
        """Does the pass and keeps what it did: blocks with the same facts need the same, on the same memory."""
        ops, tape = self._ops, Tape(self._ops)
        self._ops = tape
        try:
            self._pass()
        finally:
            self._ops = ops
        self._tapes[facts] = tape, self._rejects_elements

    def _beyond(self, *, above: float = math.inf, below: float = -math.inf) -> bool:
        """Whether some `l` may be above or below. Bounds are compared as the compute dtype rounds them."""
        if self._most == math.inf:
            return True
        if above < math.inf:
            return not self._most < float(self._ops.number(above))
        return not self._least > float(self._ops.number(below))

    def _pass(self) -> None:
        """Everything that follows from `l` and its extremes."""
        layout, plan, ops = self._layout, self._layout.plan, self._ops
        self._rejects_elements = False
        self._base()
        if plan.importance is not None and plan.importance.level == "token":
            self._token_weights(plan.importance, self._weights)
        if "k2" in layout.means:
            k2 = self._buffer["k2"]
            ops.mul(self._lc, self._lc, out=k2)
            ops.mul(k2, self._ops.number(0.5), out=k2)
            self._done("k2")
        for criterion in layout.token_criteria:
            self._token_criterion(criterion)
        if plan.log_veto is not None:
            self._count("veto_low", self._l, below=plan.log_veto)
        if self._stack is not None:
            ops.sum(self._stack, self._dim + 1, out=self._summed)
        self._rows.run(ops)
        self._finish()

    def _spread(self, row: Array) -> Array:
        """A figure of each row, as it broadcasts to the block's elements."""
        return row[None, :] if self._dim == 0 else row[:, None]

    # Element level

    def _ready(self, name: str, values: Array) -> Array:
        """`values` in the compute dtype."""
        if values.dtype == self._e.dtype:
            return values
        if name not in self._inputs:
            self._inputs[name] = self._ops.new(self._shape)
        return self._ops.copy(values, out=self._inputs[name])

    def _difference(self, log_prob: Array, rollout_log_prob: Array) -> None:
        """`l` and the sum of `log_prob`; with a mask, bits by which `and` selects whatever is there."""
        ops = self._ops
        self._l = ops.sub(log_prob, rollout_log_prob, out=self._buffer["l"])
        if self._masked:
            ops.copy(self._ones, out=self._bits)
            ops.neg(self._bits, out=self._bits)
            ops.bitwise_and(self._l_bits, self._bits, out=self._l_bits)
            ops.bitwise_and(ops.bits(log_prob), self._bits, out=self._p_bits)
        else:
            ops.copy(log_prob, out=self._buffer["log_prob"])
        self._done("log_prob")

    def _done(self, name: str, values: Array = None) -> None:
        """The buffer of `name` is filled."""
        if not self._stacked:
            self._ops.sum(self._buffer[name] if values is None else values, self._dim, out=self._row[name])

    def _own(self, name: str) -> Array:
        """A buffer that not every block needs."""
        if name not in self._made:
            self._made[name] = self._ops.new(self._shape)
        return self._made[name]

    def _ends_of_rows(self) -> None:
        """Largest and smallest valid `l` of each row."""
        dim, ops, row, l = self._dim, self._ops, self._row, self._l  # noqa: E741
        if self._columns == 1:
            ops.copy(l, out=self._rows.extremes)
            return
        ops.amax(l, dim, out=row["l_max"])
        ops.amin(l, dim, out=row["l_min"])
        if not self._masked or (ops.on_host and row["l_max"].min() > 0 > row["l_min"].max()):
            return  # invalid elements hold 0, which is inside
        away = self._far(self._own("other"))
        ops.amax(ops.add(l, away, out=self._temporary), dim, out=row["l_max"])
        ops.amin(ops.sub(l, away, out=self._temporary), dim, out=row["l_min"])

    def _far(self, out: Array) -> Array:
        """0 at valid elements, `-FAR` at the others: out of the way of a maximum."""
        self._ops.sub(self._ones, self._ops.number(1.0), out=out)
        return self._ops.mul(out, self._ops.number(FAR), out=out)

    def _base(self) -> None:
        """`lc`, `e`, and the sums that every call reports."""
        buffer, ops, l = self._buffer, self._ops, self._l  # noqa: E741
        self._done("l")
        if self._masked:
            self._done("n")
        ops.abs(l, out=buffer["abs"])
        self._done("abs")
        if self._narrow:
            lc = self._lc = l
            self._equals("lc", "l")
        else:
            clamped = buffer["lc"] if self._stacked else self._own("lc")
            lc = self._lc = ops.clamp(l, -SAFETY_BOUND, SAFETY_BOUND, out=clamped)
            self._done("lc", clamped)
        e = ops.expm1(lc, out=self._e)
        ops.sub(e, lc, out=buffer["k3"])
        self._done("k3")
        ops.mul(e, e, out=buffer["e2"])
        self._done("e2")

    def _equals(self, name: str, other: str) -> None:
        """A figure that is another's equal in this block."""
        place = self._buffer if self._stacked else self._row
        self._ops.copy(place[other], out=place[name])

    def _token_weights(self, spec: ImportanceSampling, weights: Array) -> None:
        """Per-element weights, the sums of `d` and `d^2`, and the elements beyond the bounds."""
        d, ops = self._buffer["d"], self._ops
        ops.exp(self._lc, out=weights)
        if spec.mode in ("zero", "mask"):
            self._outside(spec, weights)
        else:
            self._count("is_high", self._lc, above=math.log(spec.upper))
            self._count("is_low", self._lc, below=math.log(spec.reported_lower))
            lower = spec.lower if spec.mode == "clip" and spec.lower > 0 else None
            low = lower is not None and self._beyond(below=math.log(lower))
            if not low and not self._beyond(above=math.log(spec.upper)):
                self._unbounded(weights)
                return
            ops.clamp(weights, lower, spec.upper, out=weights)
            ops.clamp(self._e, None if lower is None else lower - 1.0, spec.upper - 1.0, out=d)
            if self._masked and not (lower or 0.0) <= 1.0 <= spec.upper:  # at invalid elements e is 0
                ops.mul(d, self._ones, out=d)
        if self._masked:
            ops.mul(weights, self._ones, out=weights)
        self._done("d")
        ops.mul(d, d, out=self._buffer["d2"])
        self._done("d2")

    def _unbounded(self, weights: Array) -> None:
        """Weights that no bound changes: `d = e`."""
        ops, row = self._ops, self._row
        if self._masked:
            ops.mul(weights, self._ones, out=weights)
        if self._stacked:
            ops.copy(self._e, out=self._buffer["d"])
        else:
            ops.add(row["k3"], row["lc"], out=row["d"])
        self._equals("d2", "e2")

    def _outside(self, spec: ImportanceSampling, weights: Array) -> None:
        """Modes "zero" (no weight outside the bounds) and "mask" (weight unbounded, the element rejected)."""
        ops = self._ops
        high = self._count("is_high", self._lc, above=math.log(spec.upper))
        outside = self._temporary
        if high is None:
            ops.fill(outside, 0.0)
        else:
            ops.copy(high, out=outside)
        low = self._count("is_low", self._lc, below=math.log(spec.reported_lower))
        if spec.lower > 0 and low is not None:
            ops.add(outside, low, out=outside)
        d = ops.copy(self._e, out=self._buffer["d"])
        if spec.mode == "mask":
            self._reject(outside)
            return
        inside = ops.eq(outside, self._ops.number(0.0), out=self._own("other"))
        ops.mul(weights, inside, out=weights)
        ops.mul(d, inside, out=d)
        ops.sub(d, outside, out=d)
        # the largest applied weight is not a function of the largest ratio
        shown = d
        if self._masked and self._columns > 1:
            shown = ops.add(d, self._far(inside), out=inside)
        ops.amax(shown, self._dim, out=self._row["is_d_max"])
        if self._masked:
            ops.mul(d, self._ones, out=d)

    def _token_criterion(self, c: Criterion) -> None:
        """Marks what a per-element criterion rejects, and sums its statistic clamped to its bounds.

        For k1 that is `l` in place of `-l`: only its spread is used.
        """
        ops = self._ops
        lower, upper = (c.lower, c.upper) if c.statistic == "k1" else band(c)
        below, above = ("above", "below") if c.statistic == "k1" else ("below", "above")
        statistic = self._lc
        if c.statistic != "k1":
            if c.statistic == "k2":
                statistic = self._buffer["k2"]
            else:
                statistic = ops.sub(self._e, self._lc, out=self._own("other"))
            shown = statistic
            if self._masked and self._columns > 1:
                shown = ops.sub(statistic, self._far(self._temporary), out=self._temporary)
            ops.amin(shown, self._dim, out=self._row[f"{c.name}/min"])
        self._reject(self._count(f"{c.name}/{above}", statistic, above=upper))
        self._reject(self._count(f"{c.name}/{below}", statistic, below=lower))
        inside = ops.clamp(statistic, lower, upper, out=self._buffer[f"{c.name}/in"])
        if self._masked and not lower <= 0.0 <= upper:
            ops.mul(inside, self._ones, out=inside)
        self._done(f"{c.name}/in")
        ops.mul(inside, inside, out=self._buffer[f"{c.name}/in2"])
        self._done(f"{c.name}/in2")

    def _count(self, name: str, values: Array, *, above: float = math.inf, below: float = -math.inf) -> Array:
        """Counts valid elements with `values > above` or `< below`; the buffer returned is 1 where one is.

        None where the extremes say that there is none.
        """
        found, ops = self._buffer[name], self._ops
        of_l = values is self._l or values is self._lc
        if (above == math.inf and below == -math.inf) or (of_l and not self._beyond(above=above, below=below)):
            ops.fill(found if self._stacked else self._row[name], 0.0)
            return None
        if above < math.inf:
            ops.gt(values, self._ops.number(above), out=found)
        else:
            ops.lt(values, self._ops.number(below), out=found)
        if self._masked and (above < 0.0 or below > 0.0):  # invalid elements hold 0
            ops.mul(found, self._ones, out=found)
        self._done(name)
        return found

    def _reject(self, found: Array) -> None:
        if found is None:
            return
        if self._rejects_elements:
            self._ops.add(self._own("bad"), found, out=self._own("bad"))
        else:
            self._ops.copy(found, out=self._own("bad"))
            self._rejects_elements = True

    # Both

    def _finish(self) -> None:
        """Row weights to elements; `bad` becomes 1.0 where nothing rejects; counts what each row keeps."""
        plan, ops, rows = self._layout.plan, self._ops, self._rows
        if plan.importance is not None and plan.importance.level != "token":
            made = self._spread(self._row["is_row_weight"])
            if self._masked:
                ops.mul(self._ones, made, out=self._weights)
            else:
                ops.copy(made, out=self._weights)
        if not plan.can_reject:
            return
        if not self._rejects_elements:
            ops.mul(self._row["n"], rows.kept, out=self._row["kept"])
            return
        keep = ops.eq(self._own("bad"), self._ops.number(0.0), out=self._own("bad"))
        if rows.rejects:
            ops.mul(keep, self._spread(rows.kept), out=keep)
        counted = ops.mul(keep, self._ones, out=self._temporary) if self._masked else keep
        ops.sum(counted, self._dim, out=self._row["kept"])
