"""The pass over the elements: weights, keep mask and per-row figures of one block of rows, on the tensors' device.

Notation, for one element: `l = log_prob - rollout_log_prob` (train over rollout), `lc` its value clamped to
+-SAFETY_BOUND, `e = exp(lc) - 1`, `d = w - 1` with `w` the applied weight. Working with `e` and `d` keeps the
precision: at |l| near 1e-4, `exp(l) - 1 - l` in float32 is rounding noise, `expm1(l) - l` is not.

Invalid elements are replaced before any arithmetic, so that a NaN there cannot reach a result. Nothing here waits
for the device; every figure that the host needs is a row of `Block.table`.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, CorrectionPlan, Criterion, ImportanceSampling

# Up to this many elements the sums of a block are taken at once from a stack of planes (few operations); above it
# one by one, through a scratch buffer that stays in cache (little memory).
STACKED_ELEMENTS = 16384


class _RowSums:
    """Named sums along each row. `buffer` lends a tensor to fill with `out=`; `add` names it and sums it."""

    def __init__(self, like: Tensor, dim: int, planes: int) -> None:
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        self._dim = dim
        self._like = like
        self._planes: Tensor | None = None
        self._free: Iterator[Tensor] = iter(())
        if like.numel() <= STACKED_ELEMENTS:
            stacked = like.new_empty((planes, *like.shape))
            self._planes, self._free = stacked, iter(stacked.unbind(0))
        else:
            self._scratch = torch.empty_like(like)

    def buffer(self, *, lasting: bool = False) -> Tensor:
        """A tensor to fill and `add` next; one that is not `lasting` is overwritten by the next buffer."""
        if self._planes is not None:
            return next(self._free)
        return torch.empty_like(self._like) if lasting else self._scratch

    def add(self, name: str, filled: Tensor) -> Tensor:
        self._names.append(name)
        if self._planes is None:
            self._sums.append(filled.sum(self._dim))
        return filled

    def add_copy(self, name: str, values: Tensor) -> None:
        """Sums a tensor that is not one of ours."""
        self.add(name, values if self._planes is None else next(self._free).copy_(values))

    def table(self) -> dict[str, Tensor]:
        if self._planes is not None:
            self._sums = list(self._planes[: len(self._names)].sum(self._dim + 1).unbind(0))
        return dict(zip(self._names, self._sums, strict=True))


class Block:
    """One block of rows: `weights` and `keep` in the block's layout, and `table`, per-row figures by name.

    Args:
        log_prob, rollout_log_prob: in the compute dtype, contiguous.
        valid: True where an element counts; None when all do.
        dim: the dimension along which the elements of one row lie (0 or 1).

    Attributes:
        weights: `w`, 0 at invalid elements; None without importance sampling.
        keep: True where nothing rejects; broadcasts against the block; None when nothing can reject.
    """

    def __init__(
        self,
        log_prob: Float[Tensor, "rows cols"],
        rollout_log_prob: Float[Tensor, "rows cols"],
        valid: Bool[Tensor, "rows cols"] | None,
        plan: CorrectionPlan,
        dim: int,
    ) -> None:
        self.weights: Tensor | None = None
        self.keep: Tensor | None = None
        self._plan, self._dim, self._valid = plan, dim, valid
        self._bad: Tensor | None = None  # > 0 where a per-element criterion rejects
        self._row_bad: Tensor | None = None  # > 0 where a whole row is rejected
        self._sums = _RowSums(log_prob, dim, planes=14 + 6 * len(plan.criteria))
        self._base(log_prob, rollout_log_prob)
        if plan.importance is not None and plan.importance.level == "token":
            self._token_weights(plan.importance)
        for criterion in plan.criteria:
            self._element_criterion(criterion)
        if plan.log_veto is not None:
            self._count("veto_low", self._l, below=plan.log_veto)
        extremes = self._extremes
        self.table = self._sums.table()
        self.table.update(extremes)
        self._rows_pass()

    # Element level

    def _base(self, log_prob: Tensor, rollout_log_prob: Tensor) -> None:
        """`l`, `lc`, `e`, their extremes, and the sums that every call reports."""
        sums, valid, dim = self._sums, self._valid, self._dim
        self._l = torch.sub(log_prob, rollout_log_prob, out=sums.buffer(lasting=True))
        if valid is None:
            self._extremes = {"l_max": self._l.amax(dim), "l_min": self._l.amin(dim)}
            sums.add("l", self._l)
            sums.add_copy("log_prob", log_prob)
        else:
            self._invalid = ~valid
            scratch = self._l.masked_fill(self._invalid, -math.inf)
            self._extremes = {"l_max": scratch.amax(dim)}
            self._extremes["l_min"] = scratch.masked_fill_(self._invalid, math.inf).amin(dim)
            sums.add("l", self._l.masked_fill_(self._invalid, 0.0))
            sums.add("log_prob", sums.buffer().copy_(log_prob).masked_fill_(self._invalid, 0.0))
            self._ones = sums.add("n", sums.buffer(lasting=True).copy_(valid))
        sums.add("abs", torch.abs(self._l, out=sums.buffer()))
        self._lc = torch.clamp(self._l, -SAFETY_BOUND, SAFETY_BOUND, out=sums.buffer(lasting=True))
        sums.add("lc", self._lc)
        self._e = torch.expm1(self._lc)
        sums.add("k3", torch.sub(self._e, self._lc, out=sums.buffer()))
        sums.add("e2", torch.mul(self._e, self._e, out=sums.buffer()))

    def _token_weights(self, spec: ImportanceSampling) -> None:
        """Per-element weights and the sums of `d`, `d^2` and of the elements beyond the bounds."""
        sums = self._sums
        weights = torch.exp(self._lc)
        high = self._count("is_high", self._lc, above=math.log(spec.upper)).clone()
        low = self._count("is_low", self._lc, below=math.log(spec.reported_lower))
        d = sums.buffer(lasting=True)
        if spec.mode == "zero":
            outside = high.add_(low) > 0
            weights.masked_fill_(outside, 0.0)
            d.copy_(self._e).masked_fill_(outside, -1.0)
            largest = d if self._valid is None else d.masked_fill(self._invalid, -1.0)
            self._extremes["is_d_max"] = largest.amax(self._dim)
        elif spec.mode == "mask":
            self._reject(high.add_(low) if spec.lower > 0 else high)
            d.copy_(self._e)
        else:
            lower = spec.lower if spec.mode == "clip" else 0.0
            weights.clamp_(lower, spec.upper)
            torch.clamp(self._e, lower - 1.0, spec.upper - 1.0, out=d)
        if self._valid is not None:
            weights.mul_(self._ones)
            d.mul_(self._ones)
        self.weights = weights
        sums.add("d", d)
        sums.add("d2", torch.mul(d, d, out=sums.buffer()))

    def _element_criterion(self, c: Criterion) -> None:
        """The element sums that a criterion needs; a per-element one also marks what it rejects."""
        if c.statistic == "k2" and c.aggregate != "seq_max":
            statistic = torch.mul(self._lc, self._lc, out=self._sums.buffer(lasting=True)).mul_(0.5)
            self._sums.add(f"{c.name}/sum", statistic)
        elif c.statistic == "k3" and c.aggregate == "token":
            statistic = torch.sub(self._e, self._lc)
        else:
            statistic = self._lc
        if c.aggregate != "token":
            return
        self._reject(self._count(f"{c.name}/high", statistic, above=c.upper))
        if c.statistic == "k1":
            self._reject(self._count(f"{c.name}/low", statistic, below=c.lower))
        else:
            lowest = statistic if self._valid is None else statistic.masked_fill(self._invalid, math.inf)
            self._extremes[f"{c.name}/min"] = lowest.amin(self._dim)
        inside = self._sums.buffer()
        torch.clamp(statistic, c.lower if c.statistic == "k1" else 0.0, c.upper, out=inside)
        if self._valid is not None and not c.lower <= 0.0 <= c.upper:
            inside.mul_(self._ones)
        self._sums.add(f"{c.name}/in", inside)
        self._sums.add(f"{c.name}/in2", torch.mul(inside, inside, out=self._sums.buffer()))

    def _count(self, name: str, values: Tensor, *, above: float = math.inf, below: float = -math.inf) -> Tensor:
        """Counts valid elements with `values > above` or `values < below`; returns the indicator (a buffer)."""
        if above < math.inf or below == -math.inf:
            found = torch.gt(values, above, out=self._sums.buffer())
        else:
            found = torch.lt(values, below, out=self._sums.buffer())
        if self._valid is not None and (above < 0.0 or below > 0.0):  # invalid elements hold 0
            found.mul_(self._ones)
        return self._sums.add(name, found)

    def _reject(self, found: Tensor) -> None:
        self._bad = found.clone() if self._bad is None else self._bad.add_(found)

    # Row level

    def _rows_pass(self) -> None:
        """Criteria and weights that act on whole rows, then the final keep mask."""
        table = self.table
        if self._valid is None:
            self._n = torch.full_like(table["l"], self._l.shape[self._dim])
            table["n"] = self._n
        self._n = table["n"]
        self._divisor = self._n if self._valid is None else self._n.clamp(min=1.0)
        spec = self._plan.importance
        if spec is not None and spec.level != "token":
            self._row_weights(spec)
        for criterion in self._plan.criteria:
            if criterion.aggregate != "token":
                self._row_criterion(criterion)
        if self._plan.log_veto is not None:
            self._reject_rows(table["veto_low"])
        if self._plan.can_reject:
            self._combine()

    def _row_weights(self, spec: ImportanceSampling) -> None:
        """One weight per row, from the sum of its `l` ("sequence") or their mean ("geometric")."""
        log_ratio = self.table["l"]
        if spec.level == "geometric":
            log_ratio = log_ratio / self._divisor
        clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        high = torch.gt(log_ratio, math.log(spec.upper)).to(clamped.dtype)
        low = torch.lt(log_ratio, math.log(spec.reported_lower)).to(clamped.dtype)
        weights = torch.exp(clamped)
        if spec.mode == "zero":
            weights.masked_fill_((high + low) > 0, 0.0)
        elif spec.mode == "mask":
            self._reject_rows(high + low if spec.lower > 0 else high)
        else:
            weights.clamp_(spec.lower if spec.mode == "clip" else 0.0, spec.upper)
        self.table.update(is_log_ratio=log_ratio, is_high=high, is_low=low, is_row_weight=weights)
        spread = weights.unsqueeze(self._dim)
        self.weights = spread.expand_as(self._l).clone() if self._valid is None else spread * self._ones

    def _row_criterion(self, c: Criterion) -> None:
        """Statistic of each row (`k1 = -l`, as reported) and whether it lies outside the bounds."""
        table = self.table
        if c.aggregate == "seq_max":
            if c.statistic == "k2":
                statistic = torch.maximum(table["l_max"], -table["l_min"]).clamp(0.0, SAFETY_BOUND)
                statistic = statistic * statistic * 0.5
            else:  # k3 is convex with its minimum at 0: its maximum over a row is at an extreme
                ends = torch.stack((table["l_max"], table["l_min"])).clamp_(-SAFETY_BOUND, SAFETY_BOUND)
                statistic = (torch.expm1(ends) - ends).amax(0)
        else:
            name = {"k1": "lc", "k2": f"{c.name}/sum", "k3": "k3"}[c.statistic]
            statistic = table[name] if c.aggregate == "seq_sum" else table[name] / self._divisor
        high = torch.gt(statistic, c.upper).to(statistic.dtype)
        self._reject_rows(high)
        table[f"{c.name}/high"] = high
        table[f"{c.name}/row"] = statistic
        if c.statistic == "k1":
            low = torch.lt(statistic, c.lower).to(statistic.dtype)
            self._reject_rows(low)
            table[f"{c.name}/low"] = low
            table[f"{c.name}/row"] = -statistic

    def _reject_rows(self, found: Tensor) -> None:
        self._row_bad = found if self._row_bad is None else self._row_bad + found

    def _combine(self) -> None:
        """`keep`, and the number of elements that each row keeps."""
        kept = self._n
        if self._bad is not None:
            self.keep = self._bad == 0
            kept = kept - self._bad.gt_(0).sum(self._dim)
        if self._row_bad is not None:
            row_keep = self._row_bad == 0
            kept = kept * row_keep
            spread = row_keep.unsqueeze(self._dim)
            self.keep = spread if self.keep is None else self.keep.logical_and_(spread)
        self.table["kept"] = kept
