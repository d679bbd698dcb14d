"""The pass over the elements: weights, keep mask and per-row figures of one block of rows, on the tensors' device.

Notation, for one element: `l = log_prob - rollout_log_prob` (train over rollout), `lc` its value clamped to
+-SAFETY_BOUND, `e = exp(lc) - 1`, `d = w - 1` with `w` the applied weight. Working with `e` and `d` keeps the
precision: at |l| near 1e-4, `exp(l) - 1 - l` in float32 is rounding noise, `expm1(l) - l` is not.

Invalid elements are selected away before any arithmetic, so that a NaN there cannot reach a result. Nothing here
waits for the device. Comparisons write 0/1 into tensors of the compute dtype, several times faster on a CPU than
boolean tensors.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.layout import Layout, band, round_to
from flowgrpo_rc.correction.thresholds import SAFETY_BOUND, Criterion, ImportanceSampling

# Up to this many elements the sums of a block are taken at once from a stack of planes (few operations); above it
# one by one, through a scratch buffer that stays in cache (little memory).
STACKED_ELEMENTS = 16384
# Beyond any log ratio, yet safe to add to one: takes invalid elements out of minima and maxima.
_FAR = 1e38
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class _RowSums:
    """The named sums along each row. `out` lends a tensor to fill; `done` says that it is filled."""

    def __init__(self, like: Tensor, dim: int, names: tuple[str, ...]) -> None:
        self._names, self._dim, self._like = names, dim, like
        self._sums: dict[str, Tensor] = {}
        self._stack = self._scratch = None
        if like.numel() <= STACKED_ELEMENTS:
            self._stack = like.new_empty((len(names), *like.shape))
            self._planes = dict(zip(names, self._stack.unbind(0), strict=True))
        else:
            self._scratch = torch.empty_like(like)

    def out(self, name: str, *, lasting: bool = False) -> Tensor:
        """A tensor for `name`; unless `lasting`, the next `out` may overwrite it."""
        if self._scratch is None:
            return self._planes[name]
        return torch.empty_like(self._like) if lasting else self._scratch

    def done(self, name: str, filled: Tensor) -> Tensor:
        if self._stack is None:
            self._sums[name] = filled.sum(self._dim)
        return filled

    def copy(self, name: str, values: Tensor) -> None:
        """Sums a tensor that was not lent."""
        if self._stack is None:
            self._sums[name] = values.sum(self._dim)
        else:
            self._planes[name].copy_(values)

    def finish(self) -> Float[Tensor, "sums rows"]:
        if self._stack is not None:
            return self._stack.sum(self._dim + 1)
        # without a mask nothing fills "n"; the caller writes the row's length there
        return torch.stack([self._sums.get(name, self._sums["l"]) for name in self._names])


class Block:
    """One block of rows.

    Args:
        log_prob, rollout_log_prob: in the compute dtype, contiguous.
        ones: 1.0 where an element counts and 0.0 elsewhere, same dtype; None when all count.
        dim: the dimension along which the elements of one row lie (0 or 1).
        weights_out: where to put the weights, if the caller has a place of the block's layout.

    Attributes:
        table: per-row figures in the order of `layout.table`.
        weights: 0 at invalid elements; None without importance sampling.
        row_weights: for weights that are one per row, that one.
        keep: 1.0 where nothing rejects, broadcasting against the block; None when nothing can reject.
    """

    def __init__(
        self,
        log_prob: Float[Tensor, "rows cols"],
        rollout_log_prob: Float[Tensor, "rows cols"],
        ones: Float[Tensor, "rows cols"] | None,
        layout: Layout,
        dim: int,
        weights_out: Float[Tensor, "rows cols"] | None = None,
    ) -> None:
        plan = layout.plan
        self.weights = weights_out
        self.row_weights: Tensor | None = None
        self.keep: Tensor | None = None
        self._dim, self._ones = dim, ones
        self._bad: Tensor | None = None  # > 0 where a per-element criterion rejects
        self._row_bad: Tensor | None = None  # > 0 where a whole row is rejected
        self._extremes: list[Tensor] = []
        self._sums = _RowSums(log_prob, dim, layout.sums)
        self._base(log_prob, rollout_log_prob)
        if plan.importance is not None and plan.importance.level == "token":
            self._token_weights(plan.importance)
        if "k2" in layout.means:
            k2 = torch.mul(self._lc, self._lc, out=self._sums.out("k2", lasting=True)).mul_(0.5)
            self._k2 = self._sums.done("k2", k2)
        for criterion in layout.token_criteria:
            self._token_criterion(criterion)
        if plan.log_veto is not None:
            self._count("veto_low", self._l, below=plan.log_veto)
        self._finish(layout)

    # Element level

    def _base(self, log_prob: Tensor, rollout_log_prob: Tensor) -> None:
        """`l`, `lc`, `e`, the extremes of `l`, and the sums that every call reports."""
        sums, ones, dim = self._sums, self._ones, self._dim
        l = self._l = torch.sub(log_prob, rollout_log_prob, out=sums.out("l", lasting=True))  # noqa: E741
        if ones is None:
            self._extremes = [l, l] if l.shape[dim] == 1 else [l.amax(dim), l.amin(dim)]
            sums.copy("log_prob", log_prob)
        else:
            select = _BITS[l.dtype]
            bits = ones.to(select).neg_()  # all bits set where valid: `and` selects, whatever is there
            l.view(select).bitwise_and_(bits)
            chosen = sums.out("log_prob")
            torch.bitwise_and(log_prob.view(select), bits, out=chosen.view(select))
            sums.done("log_prob", chosen)
            sums.copy("n", ones)
            away = torch.sub(ones, 1.0).mul_(_FAR)
            self._extremes = [torch.add(l, away).amax(dim), away.neg_().add_(l).amin(dim)]
        sums.done("l", l)
        sums.done("abs", torch.abs(l, out=sums.out("abs")))
        self._lc = torch.clamp(l, -SAFETY_BOUND, SAFETY_BOUND, out=sums.out("lc", lasting=True))
        sums.done("lc", self._lc)
        self._e = torch.expm1(self._lc)
        sums.done("k3", torch.sub(self._e, self._lc, out=sums.out("k3")))
        sums.done("e2", torch.mul(self._e, self._e, out=sums.out("e2")))

    def _token_weights(self, spec: ImportanceSampling) -> None:
        """Per-element weights, the sums of `d` and `d^2`, and the elements beyond the bounds."""
        sums = self._sums
        weights = torch.exp(self._lc) if self.weights is None else torch.exp(self._lc, out=self.weights)
        high = self._count("is_high", self._lc, above=math.log(spec.upper))
        outside = high.clone() if spec.mode in ("zero", "mask") else high
        low = self._count("is_low", self._lc, below=math.log(spec.reported_lower))
        d = sums.out("d", lasting=True)
        if spec.mode == "zero":
            outside.add_(low)
            inside = 1.0 - outside
            weights.mul_(inside)
            torch.mul(self._e, inside, out=d).sub_(outside)
        elif spec.mode == "mask":
            self._reject(outside.add_(low) if spec.lower > 0 else outside)
            d.copy_(self._e)
        else:
            lower = spec.lower if spec.mode == "clip" else 0.0
            weights.clamp_(lower, spec.upper)
            torch.clamp(self._e, lower - 1.0, spec.upper - 1.0, out=d)
        if self._ones is not None:
            weights.mul_(self._ones)
            d.mul_(self._ones)
        if spec.mode == "zero":  # the largest applied weight is not a function of the largest ratio
            valid = d if self._ones is None else d + self._ones - 1.0
            self._extremes.append(valid.amax(self._dim))
        self.weights = weights
        sums.done("d", d)
        sums.done("d2", torch.mul(d, d, out=sums.out("d2")))

    def _token_criterion(self, c: Criterion) -> None:
        """Marks the elements that a per-element criterion rejects, and sums its statistic within the bounds."""
        sums, dim = self._sums, self._dim
        lower, upper = band(c)
        if c.statistic == "k1":
            statistic = -self._lc
        else:
            statistic = self._k2 if c.statistic == "k2" else self._e - self._lc
            far = statistic if self._ones is None else (1.0 - self._ones).mul_(_FAR).add_(statistic)
            self._extremes.append(far.amin(dim))
        self._reject(self._count(f"{c.name}/above", statistic, above=upper))
        self._reject(self._count(f"{c.name}/below", statistic, below=lower))
        inside = torch.clamp(statistic, lower, upper, out=sums.out(f"{c.name}/in"))
        if self._ones is not None and not lower <= 0.0 <= upper:
            inside.mul_(self._ones)
        sums.done(f"{c.name}/in", inside)
        sums.done(f"{c.name}/in2", torch.mul(inside, inside, out=sums.out(f"{c.name}/in2")))

    def _count(self, name: str, values: Tensor, *, above: float = math.inf, below: float = -math.inf) -> Tensor:
        """Counts valid elements with `values > above` or `< below`; the buffer returned is 1 where one is."""
        found = self._sums.out(name)
        if above < math.inf:
            torch.gt(values, above, out=found)
        elif below > -math.inf:
            torch.lt(values, below, out=found)
        else:
            found.zero_()
        if self._ones is not None and (above < 0.0 or below > 0.0):  # invalid elements hold 0
            found.mul_(self._ones)
        return self._sums.done(name, found)

    def _reject(self, found: Tensor) -> None:
        self._bad = found.clone() if self._bad is None else self._bad.add_(found)

    # Row level

    def _finish(self, layout: Layout) -> None:
        """Criteria and weights that act on whole rows, the keep mask, and the table."""
        plan = layout.plan
        sums = self._sums.finish()
        row = {name: sums[layout.sums.index(name)] for name in ("l", "n", "lc", "k3")}
        if self._ones is None:
            row["n"].fill_(self._l.shape[self._dim])
        figures: list[Tensor] = []
        if plan.importance is not None and plan.importance.level != "token":
            figures += self._row_weights(plan.importance, row["l"], row["n"])
        statistics = [self._statistic(c, row, sums, layout) for c in layout.row_criteria]
        if statistics:
            values = torch.stack(statistics)
            lower, upper = _bounds(layout.row_criteria, values.dtype, values.device)
            self._reject_rows(((values > upper) | (values < lower)).any(0))
            statistics = [values]
        if plan.log_veto is not None:
            self._reject_rows(sums[layout.sums.index("veto_low")] > 0)
        if plan.can_reject:
            figures.append(self._combine(row["n"]))
        ends = [end.reshape(row["n"].shape) for end in self._extremes]
        self.table = torch.cat([sums, *statistics, torch.stack(ends + figures)])

    def _row_weights(self, spec: ImportanceSampling, total: Tensor, n: Tensor) -> list[Tensor]:
        """One weight per row, from the sum of its `l` ("sequence") or their mean ("geometric")."""
        log_ratio = total / n.clamp(min=1.0) if spec.level == "geometric" else total
        high = torch.gt(log_ratio, math.log(spec.upper)).to(total.dtype)
        low = torch.lt(log_ratio, math.log(spec.reported_lower)).to(total.dtype)
        weights = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()
        if spec.mode == "zero":
            weights.mul_(1.0 - high).mul_(1.0 - low)
        elif spec.mode == "mask":
            self._reject_rows((high + low if spec.lower > 0 else high) > 0)
        else:
            weights.clamp_(spec.lower if spec.mode == "clip" else 0.0, spec.upper)
        self.row_weights = weights
        spread = weights.unsqueeze(self._dim)
        like = torch.ones_like(self._l) if self._ones is None else self._ones
        self.weights = torch.mul(spread, like) if self.weights is None else torch.mul(spread, like, out=self.weights)
        return [log_ratio, high, low]

    def _statistic(self, c: Criterion, row: dict[str, Tensor], sums: Tensor, layout: Layout) -> Tensor:
        """A whole-row criterion's statistic; `k1 = -l`."""
        if c.aggregate == "seq_max":
            ends = torch.stack([end.reshape(row["n"].shape) for end in self._extremes[:2]])
            ends.clamp_(-SAFETY_BOUND, SAFETY_BOUND)
            # k2 and k3 are convex with their minimum at 0: their maximum over a row is at an extreme of l
            values = ends.square().mul_(0.5) if c.statistic == "k2" else torch.expm1(ends).sub_(ends)
            return values.amax(0)
        name = {"k1": "lc", "k2": "k2", "k3": "k3"}[c.statistic]
        value = sums[layout.sums.index(name)]
        if c.aggregate == "seq_mean":
            value = value / (row["n"] if self._ones is None else row["n"].clamp(min=1.0))
        return value.neg() if c.statistic == "k1" else value

    def _reject_rows(self, found: Tensor) -> None:
        self._row_bad = found if self._row_bad is None else self._row_bad | found

    def _combine(self, n: Tensor) -> Tensor:
        """Sets `keep`; returns the number of elements that each row keeps."""
        row_keep = None if self._row_bad is None else (~self._row_bad).to(n.dtype)
        if self._bad is None:
            assert row_keep is not None
            self.keep = row_keep.unsqueeze(self._dim)
            return n * row_keep
        keep = torch.eq(self._bad, 0.0, out=self._bad)
        if row_keep is not None:
            keep.mul_(row_keep.unsqueeze(self._dim))
        self.keep = keep
        return keep.sum(self._dim) if self._ones is None else torch.mul(keep, self._ones).sum(self._dim)


@lru_cache(maxsize=64)
def _bounds(
    criteria: tuple[Criterion, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "criteria 1"], Float[Tensor, "criteria 1"]]:
    bands = [band(c) for c in criteria]
    low, high = round_to([b[0] for b in bands], dtype), round_to([b[1] for b in bands], dtype)
    return low.to(device), high.to(device)
