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
    mean, second = _mean(bounded, valid), _mean(bounded.square(), valid)
    size = torch.where(second > 0, (mean + 1e-8).square() / second, 0.0)
    out: Figures = {
        "rollout_is_mean": _mean(weights, valid),
        "rollout_is_std": (second - mean.square()).clamp(min=0.0).sqrt() * (valid.sum() > 1),
        "rollout_is_eff_sample_size": size,
    }
    if rollout_is == "sequence":
        high, low = log_ratio_for_metrics > math.log(upper), log_ratio_for_metrics < math.log(lower)
        out["rollout_is_ratio_fraction_high"], out["rollout_is_ratio_fraction_low"] = _share(high), _share(low)
        extremes = torch.stack(log_ratio_for_metrics.aminmax()).double().clamp(max=SAFETY_BOUND).exp()
        out["rollout_is_min"], out["rollout_is_max"] = extremes.unbind()
    else:
        out["rollout_is_ratio_fraction_high"] = _mean(raw_rollout_is_weights > upper, valid)
        out["rollout_is_ratio_fraction_low"] = _mean(raw_rollout_is_weights < lower, valid)
        out["rollout_is_min"], out["rollout_is_max"] = _extremes(weights, valid)
    if weights.dim() > 1:
        rows, raw_rows = _row_means(weights, valid), _row_means(raw_rollout_is_weights, valid)
        out |= {f"rollout_is_seq_{name}": value for name, value in _of_rows(rows, centre=1.0).items()}
        out["rollout_is_seq_fraction_high"] = _share(raw_rows > upper)
        out["rollout_is_seq_fraction_low"] = _share(raw_rows < lower)
    return _to_host(out)


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
    low_bound = rollout_rs_threshold_lower if apply_lower_threshold else -math.inf
    of_rows = _row_means(rs_statistic, valid) if per_sequence_values is None else per_sequence_values
    rows = (of_rows.squeeze(-1) if of_rows.dim() > 1 else of_rows)[seq_valid_mask]
    zero = rs_statistic.new_zeros((), dtype=torch.float64)
    summary = _of_rows(rows.double(), centre=0.0) if len(rows) else dict.fromkeys(_ROW_FIGURES, zero)
    rows_high = _share(rows > upper) if len(rows) else zero
    rows_low = _share(rows < low_bound) if len(rows) else zero
    if level == "sequence" and len(rows):
        least = summary["min"]
        most = summary["max"]
        high = rows_high
        low = rows_low
    else:
        least, most = _extremes(rs_statistic.double(), valid)
        high = _mean(rs_statistic > upper, valid)
        low = _mean(rs_statistic < low_bound, valid)
    bounded = rs_statistic.double().clamp(min=rollout_rs_threshold_lower if apply_lower_threshold else 0.0, max=upper)
    variance = _mean(bounded.square(), valid) - _mean(bounded, valid).square()
    out: Figures = {
        "mean": _mean(rs_statistic, valid),
        "max": most,
        "min": least,
        "fraction_high": high,
        "fraction_low": low,
        "std": variance.clamp(min=0.0).sqrt() * (valid.sum() > 1),
        **{f"seq_{name}": value for name, value in summary.items()},
        "seq_fraction_high": rows_high,
    }
    if apply_lower_threshold or not len(rows):
        out["seq_fraction_low"] = rows_low
    return _to_host({f"rollout_rs_{option_name}_{name}": value for name, value in out.items()})


_ROW_FIGURES = ("mean", "std", "max", "min", "max_deviation")


def _of_rows(rows: Float[Tensor, " B"], centre: float) -> Figures:
    std = rows.std() if len(rows) > 1 else torch.zeros_like(rows[0])
    figures = (rows.mean(), std, rows.max(), rows.min(), (rows - centre).abs().max())
    return dict(zip(_ROW_FIGURES, figures, strict=True))


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


def _share(flags: Tensor) -> Float[Tensor, ""]:
    return flags.double().mean()


def _extremes(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest valid value."""
    return values.masked_fill(~valid, math.inf).min(), values.masked_fill(~valid, -math.inf).max()


def _to_host(figures: Figures) -> dict[str, float]:
    return dict(zip(figures, torch.stack([value.double() for value in figures.values()]).tolist(), strict=True))
