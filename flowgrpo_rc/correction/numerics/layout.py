"""Which figures a plan needs, in which order: what the kernel fills, the host reduces and the metrics read.

The kernel returns a table with one column per row of the batch. Its rows are, in this order,

- `sums`: sums along the row of `log_prob`, `l`, ...; the first `len(means)` of them also as row means;
- `statistics`: each whole-row criterion's statistic;
- `extremes`, then `row_figures`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.plan import CorrectionPlan, Criterion

# What is summed of each derived figure x but the first three: x^2, whether below, above or outside its bounds; of those
# of whole rows also, times the row's elements, x, outside, x clamped to the bounds and its square.
POWERS = ("2", "<", ">", "!")
ROW_POWERS = ("*n", "!*n", "in*n", "in2*n")
# Figures of each row, derived on the host, that every call has.
_ROW_LOGS = ("training_log_ppl", "rollout_log_ppl", "log_ppl_diff")


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Names and constants of one plan."""

    plan: CorrectionPlan
    dtype: torch.dtype
    """In which elements are computed."""
    means: tuple[str, ...]
    sums: tuple[str, ...]
    token_criteria: tuple[Criterion, ...]
    row_criteria: tuple[Criterion, ...]
    extremes: tuple[str, ...]
    row_figures: tuple[str, ...]
    derived: tuple[str, ...]
    """Row figures that the host derives: linear in the row means, then the row criteria's statistics."""
    linear: tuple[tuple[str, float, str], ...]
    """The first of `derived` as `(a, sign, b)`: `sign * a`, plus `b` where named, of row means."""
    lower: Float[np.ndarray, "bounded 1"]
    upper: Float[np.ndarray, "bounded 1"]
    """Bounds of each derived figure but the first three; infinite where it has none."""
    reduced: tuple[str, ...]
    """Names of what is summed over rows."""
    ranged: tuple[str, ...]
    """Names of what is minimised and maximised over rows."""
    rejection_reduced: tuple[bool, ...]
    rejection_ranged: tuple[bool, ...]
    """Which of them never count empty rows: the criteria's, and the extremes of elements."""

    table: tuple[str, ...]
    """Names of the table's rows."""

    @property
    def height(self) -> int:
        """Rows of the table."""
        return len(self.table)


def band(c: Criterion) -> tuple[float, float]:
    """Bounds of a criterion's statistic; for k1, which is `-l`, the negated bounds of `l`."""
    return (-c.upper, -c.lower) if c.statistic == "k1" else (-math.inf, c.upper)


def round_to(bounds: list[float], dtype: torch.dtype) -> Float[Tensor, "bounds 1"]:
    """Bounds as the compute dtype holds them, so that host and device decide alike."""
    return torch.tensor(bounds, dtype=torch.float64, device="cpu").to(dtype).reshape(-1, 1)


@lru_cache(maxsize=64)
def make_layout(plan: CorrectionPlan, dtype: torch.dtype) -> Layout:
    """The layout of a plan; `dtype` is the compute dtype."""
    token_is = plan.importance is not None and plan.importance.level == "token"
    token_criteria = tuple(c for c in plan.criteria if c.aggregate == "token")
    row_criteria = tuple(c for c in plan.criteria if c.aggregate != "token")
    means, sums = _sums(plan, token_criteria, token_is)
    extremes = ["l_max", "l_min"]
    if token_is and plan.importance is not None and plan.importance.mode == "zero":
        extremes.append("is_d_max")
    extremes += [f"{c.name}/min" for c in token_criteria if c.statistic != "k1"]
    row_figures = [] if token_is or plan.importance is None else ["is_log_ratio", "is_high", "is_low", "is_row_weight"]
    row_figures += ["kept"] if plan.can_reject else []

    derived, linear, bounds = _linear(plan, token_criteria, token_is)
    derived += [f"{c.name}/row" for c in row_criteria]
    bounds += [band(c) for c in row_criteria]
    if plan.importance is not None and not token_is:
        derived.append("row_d")
        bounds.append((-math.inf, math.inf))
    reduced = [*sums, "rows", "valid_rows", *_host_rows(plan, token_is)]
    reduced += derived
    for kind in POWERS:
        reduced += [name + kind for name in derived[len(_ROW_LOGS) :]]
    for kind in ROW_POWERS:
        reduced += [name + kind for name in derived[len(linear) :]]
    ranged = [*derived, *extremes, *([] if token_is or plan.importance is None else ["is_log_ratio"])]
    return Layout(
        plan,
        dtype,
        tuple(means),
        tuple(sums),
        token_criteria,
        row_criteria,
        tuple(extremes),
        tuple(row_figures),
        tuple(derived),
        tuple(linear),
        round_to([low for low, _ in bounds], dtype).double().numpy(),
        round_to([high for _, high in bounds], dtype).double().numpy(),
        tuple(reduced),
        tuple(ranged),
        tuple("/" in name for name in reduced),
        tuple("/" in name or name in extremes for name in ranged),
        (*sums, *(c.name for c in row_criteria), *extremes, *row_figures),
    )


def _sums(plan: CorrectionPlan, token_criteria: tuple[Criterion, ...], token_is: bool) -> tuple[list[str], list[str]]:
    """Names of the element sums: those used as row means, and all."""
    means = ["log_prob", "l", "lc", "k3"]
    if any(c.statistic == "k2" and c.aggregate != "seq_max" for c in plan.criteria):
        means.append("k2")
    if token_is:
        means.append("d")
    sums = [*means, "n", "abs", "e2"]
    if token_is:
        sums += ["d2", "w", "w2", "is_high", "is_low"]
    for c in token_criteria:
        sums += [f"{c.name}/{part}" for part in ("below", "above", "in", "in2")]
    if plan.log_veto is not None:
        sums.append("veto_low")
    return means, sums


def _linear(
    plan: CorrectionPlan, token_criteria: tuple[Criterion, ...], token_is: bool
) -> tuple[list[str], list[tuple[str, float, str]], list[tuple[float, float]]]:
    """Derived figures that are linear in the row means: names, terms as in `Layout.linear`, bounds but for the first 3.

    `log ppl = -mean log_prob`, and `log_ppl_diff = log ppl_train - log ppl_rollout = -mean l`.
    """
    names: list[str] = list(_ROW_LOGS)
    terms = [("log_prob", -1.0, ""), ("log_prob", -1.0, "l"), ("l", -1.0, "")]
    bounds: list[tuple[float, float]] = []
    if token_is and plan.importance is not None:
        spec = plan.importance
        names += ["row_d", "row_raw"]
        terms += [("d", 1.0, ""), ("k3", 1.0, "lc")]
        # without a lower bound even a ratio that rounds to 0 is not below it
        lower = spec.reported_lower - 1.0 if spec.reported_lower > 0 else -math.inf
        bounds += [(-math.inf, math.inf), (lower, spec.upper - 1.0)]
    for c in token_criteria:
        names.append(f"{c.name}/row")
        terms.append(("lc", -1.0, "") if c.statistic == "k1" else (c.statistic, 1.0, ""))
        bounds.append(band(c))
    return names, terms, bounds


def _host_rows(plan: CorrectionPlan, token_is: bool) -> list[str]:
    """Further per-row figures of the host, in the order in which `moments` makes them."""
    names = ["training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_abs_diff", "chi2_seq"]
    names += [f"{c.name}/touched" for c in plan.criteria if c.aggregate == "token"]
    if plan.importance is not None and not token_is:
        names += ["is_high", "is_low", "is_elements_high", "is_elements_low", "is_seq_high", "is_seq_low"]
        names += ["is_raw", "is_w", "is_w2"]
    if plan.can_reject:
        names += ["kept", "any_rejected"]
    if plan.log_veto is not None:
        names.append("veto_row")
    return names
