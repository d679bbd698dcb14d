"""verl's two metric helpers, ``compute_is_metrics`` and ``compute_rs_metrics``, for code that calls them by name.

They take weights or statistics that the caller has made. The figures stay finite where verl overflows or divides by
zero, and cross to the host together. As in verl, rows without a valid element count as zeros in averages of weights.
"""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.metrics import MetricTable
from flowgrpo_rc.correction.numerics.moments import deviation, least, mean, most, sample_deviation
from flowgrpo_rc.correction.numerics.weights import row_mean, row_sum
from flowgrpo_rc.correction.plan import SAFETY_BOUND


@torch.no_grad()
def compute_is_metrics(
    rollout_is_weights: Float[Tensor, "..."],
    raw_rollout_is_weights: Float[Tensor, "..."],
    log_ratio_for_metrics: Float[Tensor, "..."],
    response_mask: Shaped[Tensor, "..."],
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """Metrics of importance weights, without a prefix.

    Args:
        rollout_is_weights: as applied, 0 where masked.
        raw_rollout_is_weights: before their bounds, 0 where masked.
        log_ratio_for_metrics: unclamped log ratios: of elements for "token", of rows for "sequence".
        response_mask: non-zero where an element is valid.
        rollout_is: "sequence", or else "token".
        rollout_is_threshold, rollout_is_threshold_lower: the bounds; None: 1 / the upper one.

    Raises:
        ValueError: no element is valid.
    """
    valid = _valid(response_mask)
    upper = rollout_is_threshold
    lower = 1.0 / upper if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    weights = rollout_is_weights.double().reshape(valid.shape)
    raw = raw_rollout_is_weights.double().reshape(valid.shape)
    bounded = weights.clamp(min=0.0, max=upper)
    count = row_sum(valid)
    table = MetricTable(valid, count, torch.ones_like(valid[:, 0]))
    table.elements("mean", mean, _masked(weights, valid))
    table.elements("std", deviation, _masked(bounded, valid), _masked(bounded.square(), valid))
    if rollout_is == "sequence":
        ratios = log_ratio_for_metrics.flatten()
        table.rows("ratio_fraction_high", mean, ratios > math.log(upper))
        table.rows("ratio_fraction_low", mean, ratios < math.log(lower))
        table.rows("min", least, ratios.double().clamp(max=SAFETY_BOUND).exp())
        table.rows("max", most, ratios.double().clamp(max=SAFETY_BOUND).exp())
    else:
        table.elements("ratio_fraction_high", mean, (raw > upper) & valid)
        table.elements("ratio_fraction_low", mean, (raw < lower) & valid)
        table.elements("min", least, weights)
        table.elements("max", most, weights)
    if rollout_is_weights.dim() > 1:
        judged = row_mean(_masked(raw, valid), count)
        _add_rows(table, row_mean(_masked(weights, valid), count), judged, lower, upper, centre=1.0)
    figures = table.figures(table.totals().tolist())
    count, total, squares = figures["std"].numbers
    mean_square = squares / count
    # verl adds 1e-8 to the mean weight.
    size = (total / count + 1e-8) ** 2 / mean_square if mean_square > 0 else 0.0
    metrics = {name: figure.value for name, figure in figures.items()} | {"eff_sample_size": size}
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


@torch.no_grad()
def compute_rs_metrics(
    option_name: str,
    rs_statistic: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    seq_valid_mask: Bool[Tensor, " B"],
    *,
    level: str,
    per_sequence_values: Float[Tensor, "..."] | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
    apply_lower_threshold: bool,
) -> dict[str, float]:
    """Metrics of one rejection criterion's statistic, without a prefix.

    Args:
        option_name: names the metrics: ``rollout_rs_{option_name}_...``.
        rs_statistic: of every element; a row's own at each of its elements.
        response_mask: non-zero where an element is valid.
        seq_valid_mask: rows that count.
        level: "sequence" takes extremes and fractions over rows, "token" over elements.
        per_sequence_values: the rows' statistic, ``(B,)`` or ``(B, 1)``; None: the rows' means.
        rollout_rs_threshold, rollout_rs_threshold_lower: bounds of the statistic, which for k1 are logarithms.
        apply_lower_threshold: whether there is a lower bound.

    Raises:
        ValueError: no element is valid.
    """
    valid = _valid(response_mask)
    upper = rollout_rs_threshold
    lower = rollout_rs_threshold_lower if apply_lower_threshold else -math.inf
    statistic = _masked(rs_statistic.double(), valid)
    inside = _masked(statistic.clamp(min=lower if apply_lower_threshold else 0.0, max=upper), valid)
    count = row_sum(valid)
    rows = row_mean(statistic, count) if per_sequence_values is None else per_sequence_values.flatten().double()
    table = MetricTable(valid, count, seq_valid_mask)
    table.elements("mean", mean, statistic)
    table.elements("std", deviation, inside, inside.square())
    of_units = table.rows if level == "sequence" else table.elements
    units = rows if level == "sequence" else statistic
    counted = seq_valid_mask if level == "sequence" else valid
    of_units("max", most, units)
    of_units("min", least, units)
    of_units("fraction_high", mean, (units > upper) & counted)
    of_units("fraction_low", mean, (units < lower) & counted)
    _add_rows(table, rows, rows, lower, upper, centre=0.0)
    metrics = {name: figure.value for name, figure in table.figures(table.totals().tolist()).items()}
    if not apply_lower_threshold:
        del metrics["seq_fraction_low"]
    return {f"rollout_rs_{option_name}_{name}": value for name, value in metrics.items()}


def _add_rows(table: MetricTable, rows: Tensor, judged: Tensor, lower: float, upper: float, *, centre: float) -> None:
    """Metrics of rows; ``judged`` is held against the bounds."""
    table.rows("seq_mean", mean, rows)
    table.rows("seq_std", sample_deviation, rows, rows.square())
    table.rows("seq_max", most, rows)
    table.rows("seq_min", least, rows)
    table.rows("seq_max_deviation", most, (rows - centre).abs())
    table.rows("seq_fraction_high", mean, judged > upper)
    table.rows("seq_fraction_low", mean, judged < lower)


def _valid(mask: Tensor) -> Bool[Tensor, "B T"]:
    valid = mask.reshape(len(mask), -1) != 0
    if not valid.any():
        raise ValueError("response_mask has no valid element: there is nothing to measure.")
    return valid


def _masked(values: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return values.masked_fill(~valid, 0.0)
