"""The table of metrics (SPEC section 5): one line each, with the unit, the name, the reduction and the formula.

verl's names, without their prefix. ``docs/metrics.md`` has the same table for readers, with healthy ranges.
"""

import itertools
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.log_ratios import LogRatios, clamp, excess_and_k3, row_mean, row_sum, safe_exp
from flowgrpo_rc.correction.numerics.moments import Figure
from flowgrpo_rc.correction.numerics.reductions import (
    CHI_SQUARED,
    DEVIATION,
    EFFECTIVE_SIZE,
    LEAST,
    MEAN,
    MEAN_EXCESS,
    MEAN_FROM_ONE,
    MOST,
    SAMPLE_DEVIATION,
    WEIGHT_DEVIATION,
    WEIGHT_MEAN,
    WEIGHT_SAMPLE_DEVIATION,
    Reduction,
)
from flowgrpo_rc.correction.numerics.rejection import Rejection, Verdict
from flowgrpo_rc.correction.numerics.weights import ImportanceWeights
from flowgrpo_rc.correction.plan import WEIGHT_MODES, ImportanceSampling


class _Columns(NamedTuple):
    name: str
    reduction: Reduction
    columns: list[Shaped[Tensor, " B"]]


class MetricTable:
    """Metrics of one batch as columns on its device: numbers of each row, which ``totals`` reduces over the rows.

    Args:
        valid: valid elements ``(B, T)``.
        count: their number in each row ``(B,)``.
        rows: the rows that count ``(B,)``; a row without a valid element has 0 for every sum.
    """

    def __init__(self, valid: Bool[Tensor, "B T"], count: Float[Tensor, " B"], rows: Bool[Tensor, " B"]) -> None:
        # Added to values, infinity keeps invalid elements out of a minimum; cheaper than a selection.
        self._away = torch.zeros_like(valid, dtype=torch.float32).masked_fill_(~valid, math.inf)
        self._count = count
        self._rows = rows
        self._row_count = rows.double()
        self._sums: list[_Columns] = []
        self._ends: list[_Columns] = []

    def elements(self, name: str, reduction: Reduction, *values: Shaped[Tensor, "B ..."]) -> None:
        """A metric over the valid elements; a row's value counts as often as the row has elements."""
        if reduction is LEAST:
            ends = [(v + self._away).amin(1) for v in values]
            self._ends.append(_Columns(name, reduction, ends))
        elif reduction is MOST:
            ends = [-(v - self._away).amax(1) for v in values]
            self._ends.append(_Columns(name, reduction, ends))
        else:
            self.add(name, reduction, *self.element_sums(*values))

    def element_sums(self, *values: Shaped[Tensor, "B ..."]) -> list[Shaped[Tensor, " B"]]:
        """Columns for ``add``: the number of elements and the sums of their values."""
        return [self._count, *(v.sum(1) if v.dim() == 2 else v * self._count for v in values)]

    def rows(self, name: str, reduction: Reduction, *values: Shaped[Tensor, " B"]) -> None:
        """A metric over the rows that count."""
        if reduction in (LEAST, MOST):
            self._ends.append(_Columns(name, reduction, [-v if reduction is MOST else v for v in values]))
        else:
            self.add(name, reduction, self._row_count, *values)

    def add(self, name: str, reduction: Reduction, *columns: Shaped[Tensor, " B"]) -> None:
        """A metric of the sums of some columns."""
        self._sums.append(_Columns(name, reduction, list(columns)))

    def totals(self) -> Float[Tensor, " numbers"]:
        """The numbers of all metrics on the device, which ``figures`` reads on the host."""
        # One stack and one reduction for all metrics: many small kernels would cost more than the arithmetic.
        sums = self._stack(self._sums) * self._row_count
        ends = self._stack(self._ends).masked_fill(~self._rows, math.inf)
        return torch.cat([sums.sum(1), ends.amin(1)])

    def figures(self, numbers: list[float]) -> dict[str, Figure]:
        """Every metric by its name, from the numbers of ``totals``."""
        rest = iter(numbers)
        return {
            name: Figure(reduction, tuple(itertools.islice(rest, len(columns))))
            for name, reduction, columns in self._sums + self._ends
        }

    def _stack(self, metrics: list[_Columns]) -> Float[Tensor, "N B"]:
        if not metrics:
            return torch.empty_like(self._row_count).expand(0, -1)
        return torch.stack([column.double() for each in metrics for column in each.columns])


def diagnostics(table: MetricTable, x: LogRatios) -> None:
    """How far the training policy is from the rollout policy: perplexities, divergences and gaps.

    With ``S_i = sum_t l`` and ``M_i = S_i / n_i`` of row ``i``, a row's log perplexity is ``-mean_t(log_prob)``, the
    log of its perplexity ratio ``-M_i``, and the ratio of the whole row ``exp(S_i)``. Exponents are clamped.
    """
    log_ratio = x.log_ratio
    gap = log_ratio.abs()
    e, k3 = excess_and_k3(clamp(log_ratio))
    training = -row_mean(x.log_prob, x.sizes)
    rollout = -row_mean(x.rollout_log_prob, x.sizes)
    difference = -row_mean(log_ratio, x.sizes)
    table.rows("training_ppl", MEAN, safe_exp(training))
    table.rows("training_log_ppl", MEAN, training)
    table.rows("rollout_ppl", MEAN, safe_exp(rollout))
    table.rows("rollout_log_ppl", MEAN, rollout)
    table.rows("log_ppl_diff", MEAN, difference)
    table.rows("log_ppl_abs_diff", MEAN, difference.abs())
    table.rows("log_ppl_diff_max", MOST, difference)
    table.rows("log_ppl_diff_min", LEAST, difference)
    table.rows("ppl_ratio", MEAN, safe_exp(difference))
    table.elements("kl", MEAN, -log_ratio)
    table.elements("k3_kl", MEAN, k3)
    table.elements("chi2_token", CHI_SQUARED, e, e * e)
    table.rows("chi2_seq", MEAN_EXCESS, safe_exp(row_sum(log_ratio)).square())
    table.elements("logprob_abs_diff_mean", MEAN, gap)
    table.elements("logprob_abs_diff_max", MOST, gap)


def weight_metrics(table: MetricTable, spec: ImportanceSampling, w: ImportanceWeights, x: LogRatios) -> None:
    """Metrics of importance weights: of all elements, and as ``rollout_is_seq_*`` of rows.

    A row's weight is its own, or for level ``token`` the mean of its elements' weights.
    """
    empty = x.sizes == 0
    if spec.level == "token":
        row_weight = row_mean(w.weight, x.sizes)
        row_excess = row_mean(w.excess, x.sizes).masked_fill(empty, -1.0)
        ratio_excess = row_mean(w.ratio_excess, x.sizes).masked_fill(empty, -1.0)
        low = ratio_excess < spec.reported_lower - 1.0
        high = ratio_excess > spec.upper - 1.0
    else:
        row_weight = w.weight
        row_excess = w.excess
        # As in verl, a row without a valid element has a weight of 0, where such rows count at all.
        low = w.low | empty
        high = w.high & ~empty
    # Summed once for three metrics.
    sums = table.element_sums(w.weight, w.weight * w.weight, w.excess, w.excess * w.excess)
    row_sums = (row_weight, row_weight * row_weight, row_excess, row_excess * row_excess)
    # The exact one of both forms of a weight, for its extremes.
    exact = torch.where(row_weight < 0.5, row_weight, 1.0 + row_excess)
    table.add("rollout_is_mean", WEIGHT_MEAN, *sums)
    table.add("rollout_is_std", WEIGHT_DEVIATION, *sums)
    table.add("rollout_is_eff_sample_size", EFFECTIVE_SIZE, *sums)
    # Fractions and extremes of the weights' own units: of elements, or of rows before their bounds.
    # verl reports row weights before truncation here, and element weights after it.
    of_units = table.rows if spec.level != "token" else table.elements
    ends = w.ratio if spec.level != "token" else w.weight
    of_units("rollout_is_min", LEAST, ends)
    of_units("rollout_is_max", MOST, ends)
    of_units("rollout_is_ratio_fraction_high", MEAN, w.high)
    of_units("rollout_is_ratio_fraction_low", MEAN, w.low)
    table.rows("rollout_is_seq_mean", WEIGHT_MEAN, *row_sums)
    table.rows("rollout_is_seq_std", WEIGHT_SAMPLE_DEVIATION, *row_sums)
    table.rows("rollout_is_seq_min", LEAST, exact)
    table.rows("rollout_is_seq_max", MOST, exact)
    table.rows("rollout_is_seq_max_deviation", MOST, row_excess.abs())
    table.rows("rollout_is_seq_fraction_high", MEAN, high)
    table.rows("rollout_is_seq_fraction_low", MEAN, low)
    mode = WEIGHT_MODES[spec.mode]
    if mode.outside_metric is not None:
        table.elements(mode.outside_metric, MEAN, w.low | w.high)
    table.elements("mis_mean_is_weight_before_clip", MEAN_FROM_ONE, w.ratio_excess)
    for name, side in mode.slime_fractions.items():
        table.elements(name, MEAN, w.low if side == "low" else w.high)


def normalization_columns(w: ImportanceWeights, x: LogRatios) -> list[Float[Tensor, " B"]]:
    """Numbers of each row that add up to the mean weight: 1, ``w`` and ``w - 1`` of its elements or of itself."""
    if w.weight.dim() == 2:
        return [x.sizes, row_sum(w.weight), row_sum(w.excess)]
    # Rows without a valid element never count in the mean weight, not even in verl.
    nonempty = (x.sizes > 0).double()
    return [nonempty, w.weight, w.excess * nonempty]


def rejection_metrics(table: MetricTable, rejection: Rejection, x: LogRatios) -> None:
    """Metrics of all criteria together, and of the veto."""
    rejected = x.valid & ~rejection.keep
    table.elements("rollout_rs_masked_fraction", MEAN, rejected)
    table.rows("rollout_rs_seq_masked_fraction", MEAN, rejected.any(1))
    if rejection.vetoed is not None:
        table.rows("rollout_is_veto_fraction", MEAN, rejection.vetoed.any(1))
        table.elements("rollout_is_catastrophic_token_fraction", MEAN, rejection.vetoed)


def criterion_metrics(table: MetricTable, v: Verdict, x: LogRatios) -> None:
    """Metrics of one criterion's statistic: of all elements, and as ``..._seq_*`` of rows.

    A row's statistic is its own, or for a ``token`` criterion the mean of its elements'. The standard deviation is
    that of statistics that are clamped into the bounds. A k1 criterion bounds ``l``; the reported statistic is ``-l``.
    """
    c = v.criterion
    token = c.aggregate == "token"
    dtype = x.log_ratio.dtype
    # As in verl, a few huge statistics should not hide the spread of those within the bounds.
    inside = v.values.to(dtype).clamp(v.lower, v.upper)  # pyright: ignore[reportCallIssue, reportArgumentType]
    outside = v.low | v.high
    row = v.values
    sides = (v.low, v.high)
    row_sides = sides
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
    statistic = v.values
    row_statistic = row
    if c.statistic == "k1":
        statistic = -statistic
        row_statistic = -row_statistic
    of_units = table.elements if token else table.rows
    start = f"rollout_rs_{c.name}_"
    of_units(f"{start}max", MOST, statistic)
    of_units(f"{start}min", LEAST, statistic)
    table.elements(f"{start}mean", MEAN, statistic)
    table.elements(f"{start}std", DEVIATION, inside, inside * inside)
    table.elements(f"{start}masked_fraction", MEAN, outside)
    of_units(f"{start}fraction_high", MEAN, high)
    of_units(f"{start}fraction_low", MEAN, low)
    table.rows(f"{start}seq_mean", MEAN, row_statistic)
    table.rows(f"{start}seq_std", SAMPLE_DEVIATION, row_statistic, row_statistic * row_statistic)
    table.rows(f"{start}seq_max", MOST, row_statistic)
    table.rows(f"{start}seq_min", LEAST, row_statistic)
    table.rows(f"{start}seq_max_deviation", MOST, row_statistic.abs())
    table.rows(f"{start}seq_masked_fraction", MEAN, outside.any(1) if token else outside)
    table.rows(f"{start}seq_fraction_high", MEAN, row_high)
    if c.statistic == "k1":
        table.rows(f"{start}seq_fraction_low", MEAN, row_low)


def timestep_table(x: LogRatios, timesteps: Shaped[Tensor, "B T"]) -> Float[Tensor, " numbers"]:
    """``|l|``, validity and timestep of every element, which ``gaps_by_timestep`` groups on the host."""
    # Grouped on the host: the number of distinct timesteps is not known on the device without waiting for it.
    gap = (x.log_prob.double() - x.rollout_log_prob.double()).abs()
    return torch.stack([gap, x.valid.double(), timesteps.double()]).flatten()


def gaps_by_timestep(table: list[float]) -> dict[float, tuple[float, float]]:
    """``{t: (sum of |l|, valid elements)}``, sorted, of the numbers of a ``timestep_table``.

    Raises:
        ValueError: the timestep of a valid element is NaN or infinite.
    """
    groups: dict[float, tuple[float, float]] = {}
    n = len(table) // 3
    for gap, valid, t in zip(table[:n], table[n : 2 * n], table[2 * n :], strict=True):
        if not valid:
            continue
        # A NaN timestep would become a group of its own for each element.
        if not math.isfinite(t):
            raise ValueError(f"timesteps: got {t} for a valid element; give finite numbers, or leave timesteps out.")
        total, count = groups.get(t, (0.0, 0.0))
        groups[t] = (total + gap, count + 1.0)
    return dict(sorted(groups.items()))
