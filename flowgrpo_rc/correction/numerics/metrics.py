"""The table of metrics (SPEC section 5): one line each, with the unit, the name, the reduction and the formula.

A metric is a function of a few numbers, its moments, which are sums or minima over elements or rows. Merging those
makes a merged metric equal to the metric of the merged batch, which a mean of standard deviations would not be.

verl's names, without their prefix. ``docs/metrics.md`` has the same table for readers, with healthy ranges.
"""

import itertools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.rejection import Rejection, Verdict
from flowgrpo_rc.correction.numerics.weights import ImportanceWeights, LogRatios, row_mean, row_sum, safe_exp
from flowgrpo_rc.correction.plan import WEIGHT_MODES, ImportanceSampling

BATCH_NORM_FACTOR = "rollout_is_batch_norm_factor"
ROUNDING = 2.0**-50
"""Share of the mean square below which a variance is only rounding: that of a deviation of 3e-8 of the mean."""
Reduction = Callable[..., float]


# Metrics as functions of their merged moments; the first is the number of elements or rows.


def mean(n: float, total: float) -> float:
    """``E[x]``."""
    return total / n


def mean_excess(n: float, total: float) -> float:
    """``E[x] - 1``."""
    return total / n - 1.0


def mean_from_one(n: float, excess: float) -> float:
    """``E[x]`` from sums of ``x - 1``."""
    return 1.0 + excess / n


def chi_squared(n: float, excess: float, squares: float) -> float:
    """``E[r^2] - 1`` of ``r - 1``."""
    return (squares + 2.0 * excess) / n


def deviation(n: float, total: float, squares: float) -> float:
    """``sqrt(E[x^2] - E[x]^2)``; 0 for a single value."""
    mean = total / n
    variance = squares / n - mean * mean
    # A difference of two equal squares is rounding noise, which the root would make visible.
    return math.sqrt(variance) if n > 1 and variance > ROUNDING * squares / n else 0.0


def sample_deviation(n: float, total: float, squares: float) -> float:
    """``deviation`` with ``n - 1`` in the denominator."""
    return deviation(n, total, squares) * math.sqrt(n / (n - 1.0)) if n > 1 else 0.0


def _of_weights(
    n: float, weight: float, squares: float, excess: float, excess_squares: float
) -> tuple[float, float, float]:
    """``E[w]``, ``E[w^2]`` and the deviation, from sums of ``w`` or of ``w - 1``, which is the more exact near 1."""
    if weight / n <= 0.5:
        return weight / n, squares / n, deviation(n, weight, squares)
    square = 1.0 + 2.0 * (excess / n) + excess_squares / n
    return 1.0 + excess / n, square, deviation(n, excess, excess_squares)


def weight_mean(*sums: float) -> float:
    """``E[w]``."""
    return _of_weights(*sums)[0]


def weight_deviation(*sums: float) -> float:
    """``deviation`` of weights."""
    return _of_weights(*sums)[2]


def weight_sample_deviation(n: float, *sums: float) -> float:
    """``sample_deviation`` of weights."""
    return weight_deviation(n, *sums) * math.sqrt(n / (n - 1.0)) if n > 1 else 0.0


def effective_size(*sums: float) -> float:
    """``E[w]^2 / E[w^2]``, the effective sample size as a share."""
    mean, square, _ = _of_weights(*sums)
    return mean * mean / square if square > 0.0 and mean > 0.0 else 0.0


def batch_divisor(n: float, weight: float, excess: float) -> float:
    """The mean weight, by which batch normalisation divides; 1 where it is tiny."""
    mean = weight_mean(max(n, 1.0), weight, 0.0, excess, 0.0)
    return mean if mean > 1e-8 else 1.0


def least(least: float) -> float:
    """The minimum."""
    return least


def most(minus_most: float) -> float:
    """The maximum, kept as the minimum of the negative, so that all extremes merge in one way."""
    return -minus_most


class Figure(NamedTuple):
    """One metric: a function of its moments, and the moments on the host."""

    finish: Callable[..., float]
    numbers: tuple[float, ...]

    @property
    def value(self) -> float:
        """The metric."""
        return self.finish(*self.numbers)

    def merge(self, other: "Figure") -> "Figure":
        """The same metric of both batches together."""
        join = min if self.finish in (least, most) else operator.add
        return Figure(self.finish, tuple(join(a, b) for a, b in zip(self.numbers, other.numbers, strict=True)))


class MetricTable:
    """Metrics of one batch as columns on its device: numbers of each row, which ``totals`` reduces over the rows.

    Args:
        valid: valid elements ``(B, T)``.
        sizes: their number in each row ``(B,)``.
        rows: the rows that count ``(B,)``; a row without a valid element has 0 for every sum.
    """

    def __init__(self, valid: Bool[Tensor, "B T"], sizes: Float[Tensor, " B"], rows: Bool[Tensor, " B"]) -> None:
        # Added to values, infinity keeps invalid elements out of a minimum; cheaper than a selection.
        self._away = torch.zeros_like(valid, dtype=torch.float32).masked_fill_(~valid, math.inf)
        self._sizes = sizes
        self._rows = rows
        self._row_count = rows.double()
        self._sums: dict[str, tuple[Reduction, list[Tensor]]] = {}
        self._ends: dict[str, tuple[Reduction, list[Tensor]]] = {}

    def elements(self, name: str, reduction: Reduction, *values: Shaped[Tensor, "B ..."]) -> None:
        """A metric over the valid elements; a row's value counts as often as the row has elements."""
        if reduction is least:
            self._ends[name] = (reduction, [(v + self._away).amin(1) for v in values])
        elif reduction is most:
            self._ends[name] = (reduction, [-(v - self._away).amax(1) for v in values])
        else:
            self.add(name, reduction, *self.element_sums(*values))

    def element_sums(self, *values: Shaped[Tensor, "B ..."]) -> list[Shaped[Tensor, " B"]]:
        """Columns for ``add``: the number of elements and the sums of their values."""
        return [self._sizes, *(v.sum(1) if v.dim() == 2 else v * self._sizes for v in values)]

    def rows(self, name: str, reduction: Reduction, *values: Shaped[Tensor, " B"]) -> None:
        """A metric over the rows that count."""
        if reduction in (least, most):
            self._ends[name] = (reduction, [-v if reduction is most else v for v in values])
        else:
            self.add(name, reduction, self._row_count, *values)

    def add(self, name: str, reduction: Reduction, *columns: Shaped[Tensor, " B"]) -> None:
        """A metric of the sums of some columns."""
        self._sums[name] = (reduction, list(columns))

    def sums(self, name: str) -> Float[Tensor, " numbers"]:
        """The sums of one metric's columns, on the device."""
        return torch.stack(self._sums[name][1]).sum(1)

    def totals(self) -> Float[Tensor, " numbers"]:
        """The moments of all metrics on the device, which ``figures`` reads on the host."""
        # One stack and one reduction for all metrics: many small kernels would cost more than the arithmetic.
        sums = self._stack(self._sums) * self._row_count
        ends = self._stack(self._ends).masked_fill(~self._rows, math.inf)
        return torch.cat([sums.sum(1), ends.amin(1)])

    def figures(self, numbers: list[float]) -> dict[str, Figure]:
        """Every metric by its name, from the numbers of ``totals``."""
        rest = iter(numbers)
        return {
            name: Figure(reduction, tuple(itertools.islice(rest, len(columns))))
            for name, (reduction, columns) in (self._sums | self._ends).items()
        }

    def _stack(self, metrics: dict[str, tuple[Reduction, list[Tensor]]]) -> Float[Tensor, "N B"]:
        if not metrics:
            return torch.empty_like(self._row_count).expand(0, -1)
        return torch.stack([column.double() for _, columns in metrics.values() for column in columns])


def diagnostics(table: MetricTable, x: LogRatios) -> None:
    """Distance of the training policy from the rollout policy: perplexities, divergences and gaps.

    With ``S_i = sum_t l`` and ``M_i = S_i / n_i`` of row ``i``, a row's log perplexity is ``-mean_t(log_prob)``, the
    log of its perplexity ratio ``-M_i``, and the ratio of the whole row ``exp(S_i)``. Exponents are clamped.
    """
    gap = x.log_ratio.abs()
    e = x.excess
    training = -row_mean(x.log_prob, x.sizes)
    rollout = -row_mean(x.rollout_log_prob, x.sizes)
    difference = -row_mean(x.log_ratio, x.sizes)
    table.rows("training_ppl", mean, safe_exp(training))
    table.rows("training_log_ppl", mean, training)
    table.rows("rollout_ppl", mean, safe_exp(rollout))
    table.rows("rollout_log_ppl", mean, rollout)
    table.rows("log_ppl_diff", mean, difference)
    table.rows("log_ppl_abs_diff", mean, difference.abs())
    table.rows("log_ppl_diff_max", most, difference)
    table.rows("log_ppl_diff_min", least, difference)
    table.rows("ppl_ratio", mean, safe_exp(difference))
    table.elements("kl", mean, -x.log_ratio)
    table.elements("k3_kl", mean, x.k3)
    table.elements("chi2_token", chi_squared, e, e * e)
    # A product of many ratios may be huge; its exponent is clamped before it is squared.
    table.rows("chi2_seq", mean_excess, safe_exp(row_sum(x.log_ratio)).square())
    table.elements("logprob_abs_diff_mean", mean, gap)
    # An invalid element's gap is 0, which is no maximum.
    table.rows("logprob_abs_diff_max", most, gap.amax(1))


def weight_metrics(table: MetricTable, spec: ImportanceSampling, w: ImportanceWeights, x: LogRatios) -> None:
    """Metrics of importance weights: of all elements, and as ``rollout_is_seq_*`` of rows.

    A row's weight is its own, or for level ``token`` the mean of its elements' weights.
    """
    empty = x.sizes == 0
    token = spec.level == "token"
    of_units = table.elements if token else table.rows
    # Near 1 expm1 has more digits than w - 1, and holds for every ratio that bounding left alone.
    ratio_excess = x.excess if token else torch.expm1(w.log_ratio)
    excess = torch.where(w.weight == w.ratio, ratio_excess, w.weight - 1.0)
    if token:
        excess = excess.masked_fill(~x.valid, 0.0)
        row_weight = row_mean(w.weight, x.sizes)
        row_excess = row_mean(excess, x.sizes).masked_fill(empty, -1.0)
        row_ratio_excess = row_mean(ratio_excess, x.sizes).masked_fill(empty, -1.0)
        low = row_ratio_excess < spec.reported_lower - 1.0
        high = row_ratio_excess > spec.upper - 1.0
    else:
        row_weight = w.weight
        row_excess = excess
        # As in verl, a row without a valid element has a weight of 0, where such rows count at all.
        low = w.low | empty
        high = w.high & ~empty
    # Summed once for three metrics.
    sums = table.element_sums(w.weight, w.weight * w.weight, excess, excess * excess)
    table.add("rollout_is_mean", weight_mean, *sums)
    table.add("rollout_is_std", weight_deviation, *sums)
    table.add("rollout_is_eff_sample_size", effective_size, *sums)
    # verl reports row weights before their bounds here, and element weights after them.
    ends = w.weight if token else w.ratio
    of_units("rollout_is_min", least, ends)
    of_units("rollout_is_max", most, ends)
    of_units("rollout_is_ratio_fraction_high", mean, w.high)
    of_units("rollout_is_ratio_fraction_low", mean, w.low)
    row_sums = (row_weight, row_weight * row_weight, row_excess, row_excess * row_excess)
    # The exact one of both forms of a weight, for its extremes.
    exact = torch.where(row_weight < 0.5, row_weight, 1.0 + row_excess)
    table.rows("rollout_is_seq_mean", weight_mean, *row_sums)
    table.rows("rollout_is_seq_std", weight_sample_deviation, *row_sums)
    table.rows("rollout_is_seq_min", least, exact)
    table.rows("rollout_is_seq_max", most, exact)
    table.rows("rollout_is_seq_max_deviation", most, row_excess.abs())
    table.rows("rollout_is_seq_fraction_high", mean, high)
    table.rows("rollout_is_seq_fraction_low", mean, low)
    if spec.batch_normalize:
        # Rows without a valid element never count in the mean weight, not even in verl.
        columns = (sums[0], sums[1], sums[3]) if token else (~empty, row_weight, row_excess * ~empty)
        table.add(BATCH_NORM_FACTOR, batch_divisor, *(column.double() for column in columns))
    mode = WEIGHT_MODES[spec.mode]
    if mode.outside_metric is not None:
        table.elements(mode.outside_metric, mean, w.low | w.high)
    table.elements("mis_mean_is_weight_before_clip", mean_from_one, ratio_excess)
    for name, side in mode.slime_fractions.items():
        table.elements(name, mean, w.low if side == "low" else w.high)


def rejection_metrics(table: MetricTable, rejection: Rejection, x: LogRatios) -> None:
    """Metrics of all criteria together, and of the veto."""
    # Padding is not kept either, but nobody rejected it.
    rejected = x.valid & ~rejection.keep
    table.elements("rollout_rs_masked_fraction", mean, rejected)
    table.rows("rollout_rs_seq_masked_fraction", mean, rejected.any(1))
    if rejection.vetoed is not None:
        table.rows("rollout_is_veto_fraction", mean, rejection.vetoed.any(1))
        table.elements("rollout_is_catastrophic_token_fraction", mean, rejection.vetoed)


def criterion_metrics(table: MetricTable, v: Verdict, x: LogRatios) -> None:
    """Metrics of one criterion's statistic: of all elements, and as ``..._seq_*`` of rows.

    A row's statistic is its own, or for a ``token`` criterion the mean of its elements'. The standard deviation is
    that of statistics that are clamped into the bounds. A k1 criterion bounds ``l``; the reported statistic is ``-l``.
    """
    c = v.criterion
    token = c.aggregate == "token"
    of_units = table.elements if token else table.rows
    dtype = x.log_ratio.dtype
    # As in verl, a few huge statistics should not hide the spread of those within the bounds.
    inside = v.values.to(dtype).clamp(v.lower, v.upper)  # pyright: ignore[reportCallIssue, reportArgumentType]
    outside = v.low | v.high
    row = v.values
    sides = row_sides = (v.low, v.high)
    if token:
        # A band that excludes a ratio of 1 moves the 0 of an invalid element.
        inside = inside.masked_fill(~x.valid, 0.0)
        row = row_mean(v.values, x.sizes)
        row_sides = (row.to(dtype) < v.lower, row.to(dtype) > v.upper)
    else:
        inside = inside.double()
    # verl applies the band to -l, so that its "high" is a small ratio.
    low, high = sides[::-1] if c.mirrored else sides
    row_low, row_high = row_sides[::-1] if c.mirrored else row_sides
    k1 = c.statistic == "k1"
    statistic = -v.values if k1 else v.values
    row_statistic = -row if k1 else row
    start = f"rollout_rs_{c.name}_"
    # As in verl, a row counts once in extremes and fractions, and as often as it has elements in mean and deviation.
    of_units(f"{start}max", most, statistic)
    of_units(f"{start}min", least, statistic)
    table.elements(f"{start}mean", mean, statistic)
    table.elements(f"{start}std", deviation, inside, inside * inside)
    table.elements(f"{start}masked_fraction", mean, outside)
    of_units(f"{start}fraction_high", mean, high)
    of_units(f"{start}fraction_low", mean, low)
    table.rows(f"{start}seq_mean", mean, row_statistic)
    table.rows(f"{start}seq_std", sample_deviation, row_statistic, row_statistic * row_statistic)
    table.rows(f"{start}seq_max", most, row_statistic)
    table.rows(f"{start}seq_min", least, row_statistic)
    table.rows(f"{start}seq_max_deviation", most, row_statistic.abs())
    table.rows(f"{start}seq_masked_fraction", mean, outside.any(1) if token else outside)
    table.rows(f"{start}seq_fraction_high", mean, row_high)
    if k1:
        table.rows(f"{start}seq_fraction_low", mean, row_low)


def gaps_by_timestep(gaps: list[float], valid: list[float], timesteps: list[float]) -> dict[str, Figure]:
    """The mean ``|l|`` of each distinct timestep; timesteps with the same six digits share one mean.

    Raises:
        ValueError: the timestep of a valid element is NaN or infinite.
    """
    # Grouped on the host: the number of distinct timesteps is not known on the device without waiting for it.
    found: dict[float, tuple[float, float]] = {}
    for gap, ok, t in zip(gaps, valid, timesteps, strict=True):
        if not ok:
            continue
        # A NaN timestep would become a group of its own for each element.
        if not math.isfinite(t):
            raise ValueError(f"timesteps: got {t} for a valid element; give finite numbers, or leave timesteps out.")
        count, total = found.get(t, (0.0, 0.0))
        found[t] = (count + 1.0, total + gap)
    figures: dict[str, Figure] = {}
    for t, numbers in sorted(found.items()):
        name = f"logprob_abs_diff/ts_{t:.6g}"
        figure = Figure(mean, numbers)
        figures[name] = figures[name].merge(figure) if name in figures else figure
    return figures
