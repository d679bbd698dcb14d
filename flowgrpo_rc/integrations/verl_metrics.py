"""verl's two metric helpers, ``compute_is_metrics`` and ``compute_rs_metrics``, for code that calls them by name.

They take weights or statistics that the caller has made. Computed in float64, finite where verl overflows or divides by
zero, with one transfer of all figures. As in verl, rows without a valid element count as zeros in averages of weights.
"""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.plan import SAFETY_BOUND

Figures = dict[str, Tensor]


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
    weights = rollout_is_weights.double()
    bounded = weights.clamp(min=0.0, max=upper)
    second = _mean(bounded.square(), valid)
    if rollout_is == "sequence":
        high = _share(log_ratio_for_metrics > math.log(upper))
        low = _share(log_ratio_for_metrics < math.log(lower))
        least, most = torch.stack(log_ratio_for_metrics.aminmax()).double().clamp(max=SAFETY_BOUND).exp()
    else:
        high = _mean(raw_rollout_is_weights > upper, valid)
        low = _mean(raw_rollout_is_weights < lower, valid)
        least, most = _extremes(weights, valid)
    figures = {
        "mean": _mean(weights, valid),
        "std": _std(bounded, valid),
        "eff_sample_size": torch.where(second > 0, (_mean(bounded, valid) + 1e-8).square() / second, 0.0),
        "ratio_fraction_high": high,
        "ratio_fraction_low": low,
        "min": least,
        "max": most,
    }
    if weights.dim() > 1:
        raw_rows = _row_means(raw_rollout_is_weights, valid)
        figures |= _of_rows(_row_means(weights, valid), raw_rows, lower, upper, centre=1.0)
    return _to_host("rollout_is", figures)


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
    statistic = rs_statistic.double()
    rows = _row_means(statistic, valid) if per_sequence_values is None else per_sequence_values
    rows = rows.flatten()[seq_valid_mask]
    of_rows = _of_rows(rows, rows, lower, upper, centre=0.0)
    if level == "sequence" and len(rows):
        least, most, high, low = (of_rows[f"seq_{name}"] for name in ("min", "max", "fraction_high", "fraction_low"))
    else:
        least, most = _extremes(statistic, valid)
        high = _mean(rs_statistic > upper, valid)
        low = _mean(rs_statistic < lower, valid)
    if not apply_lower_threshold and len(rows):
        del of_rows["seq_fraction_low"]
    figures = {
        "mean": _mean(statistic, valid),
        "max": most,
        "min": least,
        "fraction_high": high,
        "fraction_low": low,
        "std": _std(statistic.clamp(min=lower if apply_lower_threshold else 0.0, max=upper), valid),
        **of_rows,
    }
    return _to_host(f"rollout_rs_{option_name}", figures)


def _of_rows(rows: Tensor, judged: Tensor, lower: float, upper: float, *, centre: float) -> Figures:
    """Figures of rows, 0 where there are none; ``judged`` is what is held against the bounds."""
    some = rows.double() if len(rows) else rows.new_zeros(1, dtype=torch.float64)
    return {
        "seq_mean": some.mean(),
        "seq_std": some.std(correction=min(len(some) - 1, 1)),  # of a single row 0
        "seq_max": some.max(),
        "seq_min": some.min(),
        "seq_max_deviation": (some - centre).abs().max(),
        "seq_fraction_high": _share(judged > upper),
        "seq_fraction_low": _share(judged < lower),
    }


def _valid(mask: Tensor) -> Bool[Tensor, "..."]:
    valid = mask != 0
    if not valid.any():
        raise ValueError("response_mask has no valid element: there is nothing to measure.")
    return valid


def _mean(values: Tensor, valid: Tensor) -> Float[Tensor, ""]:
    return torch.where(valid, values.double(), 0.0).sum() / valid.sum()


def _row_means(values: Tensor, valid: Tensor) -> Float[Tensor, "..."]:
    """Over the last dimension; 0 for rows without a valid element."""
    return torch.where(valid, values.double(), 0.0).sum(-1) / valid.sum(-1).clamp(min=1)


def _std(bounded: Tensor, valid: Tensor) -> Float[Tensor, ""]:
    """Of values that are clamped into their bounds; of a single one 0."""
    variance = _mean(bounded.square(), valid) - _mean(bounded, valid).square()
    return variance.clamp(min=0.0).sqrt() * (valid.sum() > 1)


def _share(flags: Tensor) -> Float[Tensor, ""]:
    return flags.double().sum() / max(flags.numel(), 1)


def _extremes(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest valid value."""
    return values.masked_fill(~valid, math.inf).min(), values.masked_fill(~valid, -math.inf).max()


def _to_host(prefix: str, figures: Figures) -> dict[str, float]:
    values = torch.stack([value.double() for value in figures.values()]).tolist()
    return {f"{prefix}_{name}": value for name, value in zip(figures, values, strict=True)}
