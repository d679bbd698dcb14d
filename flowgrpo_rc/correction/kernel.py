"""The pass over the elements: weights, mask and per-row figures of one block of rows, on the tensors' device.

Notation, for one element: `l = log_prob - rollout_log_prob` (train over rollout), `lc` its value clamped to
+-SAFETY_BOUND, `e = exp(lc) - 1`, `d = w - 1` with `w` the applied weight. Working with `e` and `d` keeps the
precision: at |l| near 1e-4, `exp(l) - 1 - l` in float32 is rounding noise, `expm1(l) - l` is not.

Invalid elements are selected away before any arithmetic, so that a NaN there cannot reach a result. Nothing here
waits for the device. A kernel owns its buffers and fills them with `out=`: on a CPU allocating costs more than
computing. Comparisons write 0/1 in the compute dtype, several times faster there than boolean tensors.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.layout import Layout, band, round_to
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, Criterion, ImportanceSampling

# Up to this many elements every figure has a buffer and all are summed at once (few operations); above it they
# share one that stays in cache (little memory).
STACKED_ELEMENTS = 16384
# Rows up to this long are handled transposed, so that sums along a row run over contiguous memory.
TRANSPOSED_COLUMNS = 64
# Beyond any log ratio, yet safe to add to one: takes invalid elements out of minima and maxima.
FAR = 1e38
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_LASTING = ("n", "l", "lc", "k2")


class Kernel:
    """The pass for blocks of `(rows, columns)` elements; `run` leaves the figures in `table`.

    Args:
        layout: names and order of the figures; its dtype is the compute dtype.
        masked: whether blocks come with a mask.
    """

    def __init__(self, layout: Layout, rows: int, columns: int, *, masked: bool, device: torch.device) -> None:
        self._layout, self._columns, self._masked = layout, columns, masked
        self._numbers: dict[tuple[float, torch.dtype | None], Tensor] = {}
        self._like = torch.empty(0, dtype=layout.dtype, device=device)
        self._transposed = columns <= TRANSPOSED_COLUMNS
        self._dim = 0 if self._transposed else 1
        self._shape = (columns, rows) if self._transposed else (rows, columns)
        self.table = self._like.new_empty((layout.height, rows))
        self._row = dict(zip(layout.table, self.table.unbind(0), strict=True))
        self._buffers()
        self._lower, self._upper = _bounds(layout.row_criteria, layout.dtype, device)
        first = len(layout.sums)
        self._statistics = self.table[first : first + len(layout.row_criteria)]
        self._outside_rows = self._like.new_empty((2, *self._statistics.shape)).unbind(0)
        first += len(layout.row_criteria)
        self._ends = self.table[first : first + 2]

    def _buffers(self) -> None:
        """One per summed figure, or a shared one; and those that no figure needs."""
        layout, new = self._layout, self._like.new_empty
        self._summed = self.table[: len(layout.sums)]
        self._stack: Tensor | None = None
        self._stacked = self._shape[0] * self._shape[1] <= STACKED_ELEMENTS
        if self._stacked and self._columns == 1:  # an element is its row's sum
            self._buffer = dict(zip(layout.sums, self._summed.unsqueeze(1).unbind(0), strict=True))
        elif self._stacked:
            self._stack = new((len(layout.sums), *self._shape))
            self._buffer = dict(zip(layout.sums, self._stack.unbind(0), strict=True))
        else:
            scratch = new(self._shape)
            own = _LASTING if self._masked else _LASTING[1:]
            self._buffer = {name: new(self._shape) if name in own else scratch for name in layout.sums}
        self._inputs: dict[str, Tensor] = {}
        self._e, self._temporary = new(self._shape), new(self._shape)
        self._bad = new(self._shape) if layout.token_criteria or layout.plan.can_reject else self._temporary
        weighs = layout.plan.importance is not None
        self._weights = new(self._shape) if weighs and self._transposed else self._temporary
        self._row_bad = self._like.new_zeros(self.table.shape[1])
        if not self._masked:
            return
        self._ones, self._away = self._buffer["n"], new(self._shape)
        bits = _BITS[layout.dtype]
        self._bits = torch.empty(self._shape, dtype=bits, device=self._like.device)
        self._l_bits, self._p_bits = self._buffer["l"].view(bits), self._buffer["log_prob"].view(bits)

    def run(
        self,
        log_prob: Float[Tensor, "rows columns"],
        rollout_log_prob: Float[Tensor, "rows columns"],
        mask: Shaped[Tensor, "rows columns"] | None,
        weights: Float[Tensor, "rows columns"] | None,
        kept: Shaped[Tensor, "rows columns"] | None,
    ) -> None:
        """Fills `table`, and `weights` and `kept` (mask times keep) where given."""
        layout, plan = self._layout, self._layout.plan
        self._rejects_elements = self._rejects_rows = False
        if mask is not None:
            self._select(mask.t() if self._transposed else mask)
        self._base(self._ready("p", log_prob), self._ready("q", rollout_log_prob))
        target = self._weights if self._transposed else weights
        if plan.importance is not None and plan.importance.level == "token" and target is not None:
            self._token_weights(plan.importance, target)
        if "k2" in layout.means:
            torch.mul(self._lc, self._lc, out=self._buffer["k2"]).mul_(self._number(0.5))
            self._done("k2")
        for criterion in layout.token_criteria:
            self._token_criterion(criterion)
        if plan.log_veto is not None:
            self._count("veto_low", self._l, below=plan.log_veto)
        if self._stack is not None:
            torch.sum(self._stack, self._dim + 1, out=self._summed)
        self._rows_pass(target)
        if weights is not None and self._transposed:
            weights.copy_(self._weights.t())
        if kept is not None:
            self._mask(mask, kept)

    def _number(self, value: float, dtype: torch.dtype | None = None) -> Tensor:
        """A number as a tensor: an operation takes that in a third of the time it needs for a Python float."""
        key = (value, dtype)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = torch.tensor(value, dtype=dtype or self._layout.dtype, device="cpu")
        return number

    # Element level

    def _ready(self, name: str, values: Tensor) -> Tensor:
        """`values` in the block's layout and the compute dtype, in contiguous memory."""
        values = values.t() if self._transposed else values
        if values.dtype == self._layout.dtype and values.is_contiguous():
            return values
        if name not in self._inputs:
            self._inputs[name] = self._like.new_empty(self._shape)
        return self._inputs[name].copy_(values)

    def _select(self, mask: Tensor) -> None:
        """1.0 at valid elements; bit masks, by which `and` selects whatever is there; the offset of the rest."""
        if mask.dtype == torch.bool:
            self._ones.copy_(mask)
        else:
            torch.ne(mask, self._number(0.0, mask.dtype), out=self._ones)
        self._bits.copy_(self._ones).neg_()
        if self._columns > 1:
            torch.sub(self._ones, self._number(1.0), out=self._away).mul_(self._number(FAR))
        self._done("n")

    def _done(self, name: str) -> None:
        """The buffer of `name` is filled."""
        if not self._stacked:
            torch.sum(self._buffer[name], self._dim, out=self._row[name])

    def _base(self, log_prob: Tensor, rollout_log_prob: Tensor) -> None:
        """`l`, `lc`, `e`, the extremes of `l`, and the sums that every call reports."""
        buffer, dim = self._buffer, self._dim
        l = self._l = torch.sub(log_prob, rollout_log_prob, out=buffer["l"])  # noqa: E741
        if self._masked:
            self._l_bits.bitwise_and_(self._bits)
            torch.bitwise_and(log_prob.view(self._bits.dtype), self._bits, out=self._p_bits)
            self._done("log_prob")
        elif self._stacked:
            buffer["log_prob"].copy_(log_prob)
        else:
            torch.sum(log_prob, dim, out=self._row["log_prob"])
        self._done("l")
        if self._columns == 1:
            self._ends.copy_(l if dim == 0 else l.t())
        elif self._masked:
            torch.amax(torch.add(l, self._away, out=self._temporary), dim, out=self._row["l_max"])
            torch.amin(torch.sub(l, self._away, out=self._temporary), dim, out=self._row["l_min"])
        else:
            torch.amax(l, dim, out=self._row["l_max"])
            torch.amin(l, dim, out=self._row["l_min"])
        torch.abs(l, out=buffer["abs"])
        self._done("abs")
        lc = self._lc = torch.clamp(l, -SAFETY_BOUND, SAFETY_BOUND, out=buffer["lc"])
        self._done("lc")
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
            self._count("is_high", self._lc, above=math.log(spec.upper))
            self._count("is_low", self._lc, below=math.log(spec.reported_lower))
            lower = spec.lower if spec.mode == "clip" else 0.0
            weights.clamp_(lower, spec.upper)
            torch.clamp(self._e, lower - 1.0, spec.upper - 1.0, out=d)
            if self._masked and not lower <= 1.0 <= spec.upper:  # at invalid elements e is 0
                d.mul_(self._ones)
        if self._masked:
            weights.mul_(self._ones)
        self._done("d")
        torch.mul(d, d, out=self._buffer["d2"])
        self._done("d2")

    def _outside(self, spec: ImportanceSampling, weights: Tensor) -> None:
        """Modes "zero" (no weight outside the bounds) and "mask" (weight unbounded, the element rejected)."""
        outside = self._temporary.copy_(self._count("is_high", self._lc, above=math.log(spec.upper)))
        low = self._count("is_low", self._lc, below=math.log(spec.reported_lower))
        if spec.lower > 0:
            outside.add_(low)
        d = self._buffer["d"].copy_(self._e)
        if spec.mode == "mask":
            self._reject(outside)
            return
        inside = 1.0 - outside
        weights.mul_(inside)
        d.mul_(inside).sub_(outside)
        # the largest applied weight is not a function of the largest ratio
        shown = d + self._away if self._masked and self._columns > 1 else d
        torch.amax(shown, self._dim, out=self._row["is_d_max"])
        if self._masked:
            d.mul_(self._ones)

    def _token_criterion(self, c: Criterion) -> None:
        """Marks what a per-element criterion rejects, and sums its statistic clamped to its bounds.

        For k1 that is `l` in place of `-l`: only its spread is used.
        """
        lower, upper = (c.lower, c.upper) if c.statistic == "k1" else band(c)
        below, above = ("above", "below") if c.statistic == "k1" else ("below", "above")
        statistic = self._lc
        if c.statistic != "k1":
            statistic = self._buffer["k2"] if c.statistic == "k2" else torch.sub(self._e, self._lc)
            shown = statistic - self._away if self._masked and self._columns > 1 else statistic
            torch.amin(shown, self._dim, out=self._row[f"{c.name}/min"])
        self._reject(self._count(f"{c.name}/{above}", statistic, above=upper))
        self._reject(self._count(f"{c.name}/{below}", statistic, below=lower))
        inside = torch.clamp(statistic, lower, upper, out=self._buffer[f"{c.name}/in"])
        if self._masked and not lower <= 0.0 <= upper:
            inside.mul_(self._ones)
        self._done(f"{c.name}/in")
        torch.mul(inside, inside, out=self._buffer[f"{c.name}/in2"])
        self._done(f"{c.name}/in2")

    def _count(self, name: str, values: Tensor, *, above: float = math.inf, below: float = -math.inf) -> Tensor:
        """Counts valid elements with `values > above` or `< below`; the buffer returned is 1 where one is."""
        found = self._buffer[name]
        if above < math.inf:
            torch.gt(values, self._number(above), out=found)
        elif below > -math.inf:
            torch.lt(values, self._number(below), out=found)
        else:
            found.zero_()
        if self._masked and (above < 0.0 or below > 0.0):  # invalid elements hold 0
            found.mul_(self._ones)
        self._done(name)
        return found

    def _reject(self, found: Tensor) -> None:
        if self._rejects_elements:
            self._bad.add_(found)
        else:
            self._bad.copy_(found)
            self._rejects_elements = True

    # Row level

    def _rows_pass(self, weights: Tensor | None) -> None:
        """Criteria and weights that act on whole rows, and which elements each row keeps."""
        layout, plan, row = self._layout, self._layout.plan, self._row
        if not self._masked:
            row["n"].fill_(self._columns)
        divisor = row["n"].clamp(min=1.0) if self._masked and self._columns > 1 else row["n"]
        if self._columns == 1:
            divisor = None
        if plan.importance is not None and plan.importance.level != "token" and weights is not None:
            self._row_weights(plan.importance, divisor, weights)
        for c, statistic in zip(layout.row_criteria, self._statistics.unbind(0), strict=True):
            self._statistic(c, divisor, statistic)
        if layout.row_criteria:
            outside = torch.gt(self._statistics, self._upper, out=self._outside_rows[0])
            outside.add_(torch.lt(self._statistics, self._lower, out=self._outside_rows[1]))
            self._reject_rows(outside)
        if plan.log_veto is not None:
            self._reject_rows(row["veto_low"])
        if plan.can_reject:
            self._combine()

    def _row_weights(self, spec: ImportanceSampling, divisor: Tensor | None, weights: Tensor) -> None:
        """One weight per row, from the sum of its `l` ("sequence") or their mean ("geometric")."""
        row = self._row
        log_ratio = row["is_log_ratio"].copy_(row["l"])
        if spec.level == "geometric" and divisor is not None:
            log_ratio.div_(divisor)
        high = torch.gt(log_ratio, self._number(math.log(spec.upper)), out=row["is_high"])
        low = torch.lt(log_ratio, self._number(math.log(spec.reported_lower)), out=row["is_low"])
        made = torch.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND, out=row["is_row_weight"]).exp_()
        if spec.mode == "zero":
            made.mul_(1.0 - high).mul_(1.0 - low)
        elif spec.mode == "mask":
            self._reject_rows(high + low if spec.lower > 0 else high)
        else:
            made.clamp_(spec.lower if spec.mode == "clip" else 0.0, spec.upper)
        spread = made.unsqueeze(self._dim)
        if self._masked:
            torch.mul(self._ones, spread, out=weights)
        else:
            weights.copy_(spread.expand(self._shape))

    def _statistic(self, c: Criterion, divisor: Tensor | None, statistic: Tensor) -> None:
        """Fills a whole-row criterion's statistic; `k1 = -l`."""
        if c.aggregate == "seq_max":
            ends = self._ends.clamp(-SAFETY_BOUND, SAFETY_BOUND)
            # k2 and k3 are convex with their minimum at 0: their maximum over a row is at an extreme of l
            values = ends.mul_(ends).mul_(self._number(0.5)) if c.statistic == "k2" else torch.expm1(ends).sub_(ends)
            torch.amax(values, 0, out=statistic)
            return
        total = self._row["lc" if c.statistic == "k1" else c.statistic]
        if c.aggregate == "seq_mean" and divisor is not None:
            torch.div(total, divisor, out=statistic)
        else:
            statistic.copy_(total)
        if c.statistic == "k1":
            statistic.neg_()

    def _reject_rows(self, found: Tensor) -> None:
        """Adds what is found, `(rows)` or `(criteria, rows)`, to the rows that are rejected."""
        found = found if found.dim() == 1 else found.sum(0)
        if self._rejects_rows:
            self._row_bad.add_(found)
        else:
            self._row_bad.copy_(found)
            self._rejects_rows = True

    def _combine(self) -> None:
        """Turns `bad` into 1.0 where nothing rejects, and counts what each row keeps."""
        kept = self._row["kept"]
        if self._rejects_rows:
            row_keep = torch.eq(self._row_bad, self._number(0.0), out=self._row_bad)
            if not self._rejects_elements:
                torch.mul(self._row["n"], row_keep, out=kept)
                return
            keep = torch.eq(self._bad, self._number(0.0), out=self._bad).mul_(row_keep.unsqueeze(self._dim))
        else:
            keep = torch.eq(self._bad, self._number(0.0), out=self._bad)
        counted = torch.mul(keep, self._ones, out=self._temporary) if self._masked else keep
        torch.sum(counted, self._dim, out=kept)

    def _mask(self, mask: Tensor | None, kept: Tensor) -> None:
        """Mask times keep, in the mask's dtype."""
        keep = self._bad if self._rejects_elements else self._row_bad.unsqueeze(self._dim)
        keep = keep.t() if self._transposed else keep
        if mask is None:
            torch.ne(keep.expand_as(kept), 0.0, out=kept)
        elif mask.dtype.is_floating_point:
            torch.mul(mask, keep, out=kept)
        else:
            torch.mul(mask, keep.to(mask.dtype), out=kept)


@lru_cache(maxsize=64)
def _bounds(
    criteria: tuple[Criterion, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "criteria 1"], Float[Tensor, "criteria 1"]]:
    """Bounds of the whole-row statistics; kept, so that later calls copy nothing to the device."""
    bands = [band(c) for c in criteria]
    low, high = round_to([b[0] for b in bands], dtype), round_to([b[1] for b in bands], dtype)
    return low.to(device, non_blocking=True), high.to(device, non_blocking=True)
