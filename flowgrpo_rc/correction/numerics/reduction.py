"""From the table of per-row figures to sums, minima and maxima over rows. On the host, in float64."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics import native
from flowgrpo_rc.correction.numerics.layout import Layout
from flowgrpo_rc.correction.plan import SAFETY_BOUND, ImportanceSampling

_ROWS_AT_ONCE = 4096
Array = np.ndarray
Totals = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def reduce_table(
    layout: Layout, table: Float[Tensor, "figures rows"], *, masked: bool, count_empty_rows: bool
) -> Totals:
    """Sums of `layout.reduced`, minima and maxima of `layout.ranged`; `table` is in host memory, without gaps.

    Rows without a valid element are left out; with `count_empty_rows` only of the criteria's figures.
    """
    count_empty_rows = count_empty_rows and masked and bool((table[layout.table.index("n")] == 0).any())
    if native.is_built() and not count_empty_rows:
        return native.reduce_rows(layout, table)
    parts = []
    with np.errstate(all="ignore"):
        for part in torch.split(table, _ROWS_AT_ONCE, dim=1):
            parts.append(_reduce(layout, part.numpy().astype(np.float64), masked, count_empty_rows))
    sums, low, high = (np.stack(each) for each in zip(*parts, strict=True))
    return tuple(sums.sum(0).tolist()), tuple(low.min(0).tolist()), tuple(high.max(0).tolist())


def _reduce(layout: Layout, table: Float[Array, "figures rows"], masked: bool, empty: bool) -> tuple[Array, ...]:
    """`reduce_table` of a few rows; `empty` counts rows without a valid element."""
    figure = dict(zip(layout.table, table, strict=True))
    n = figure["n"]
    valid = (n > 0).astype(np.float64)
    derived, host = _derived(layout, figure, valid, empty)
    whole_rows = [*table[: len(layout.sums)], np.ones_like(n), valid, *host]
    figures = np.stack([*whole_rows, *derived, *_powers(layout, derived, n)])
    ranged = [*derived, *(figure[name] for name in layout.extremes)]
    if "is_log_ratio" in figure:
        ranged.append(figure["is_log_ratio"])
    low = high = np.stack(ranged)
    if masked and not valid.all():
        out = valid == 0.0
        spared = (np.array(layout.rejection_reduced)[:, None], np.array(layout.rejection_ranged)[:, None])
        left_out, unranged = (out & (of_criteria | (not empty)) for of_criteria in spared)
        figures = np.where(left_out, 0.0, figures)
        low, high = np.where(unranged, np.inf, low), np.where(unranged, -np.inf, high)
    return figures.sum(1), low.min(1), high.max(1)


def _derived(
    layout: Layout, figure: dict[str, Array], valid: Array, empty: bool
) -> tuple[Float[Array, "derived rows"], list[Array]]:
    """The figures that `layout.derived` names, and those of each row that are summed besides."""
    plan, n = layout.plan, figure["n"]
    mean = {name: figure[name] / np.maximum(n, 1.0) for name in layout.means}
    derived = [sign * mean[first] + (mean[second] if second else 0.0) for first, sign, second in layout.linear]
    if empty and plan.importance is not None and plan.importance.level == "token":  # an empty row weighs 0
        derived[3:5] = (x + valid - 1.0 for x in derived[3:5])
    derived += [figure[c.name] for c in layout.row_criteria]
    host = [np.exp(np.clip(x, -SAFETY_BOUND, SAFETY_BOUND)) for x in derived[:3]]
    host += [np.abs(derived[2]), np.expm1(2.0 * np.clip(figure["l"], -SAFETY_BOUND, SAFETY_BOUND))]
    host += [(figure[f"{c.name}/below"] + figure[f"{c.name}/above"] > 0).astype(n.dtype) for c in layout.token_criteria]
    if "is_row_weight" in figure and plan.importance is not None:
        d, more = _row_weights(plan.importance, figure, valid, empty)
        derived.append(d)
        host += more
    if plan.can_reject:
        host += [figure["kept"], (figure["kept"] < n).astype(n.dtype)]
    if plan.log_veto is not None:
        host.append((figure["veto_low"] > 0).astype(n.dtype))
    return np.stack(derived), host


def _powers(layout: Layout, derived: Float[Array, "derived rows"], n: Array) -> list[Array]:
    """What `layout.POWERS` and `layout.ROW_POWERS` list."""
    bounded, whole = derived[len(derived) - len(layout.lower) :], derived[len(layout.linear) :]
    below, above = bounded < layout.lower, bounded > layout.upper
    outside = (below | above).astype(n.dtype)
    inside = np.clip(bounded, layout.lower, layout.upper)[len(bounded) - len(whole) :]
    out = [bounded * bounded, below, above, outside]
    out += [whole * n, outside[len(bounded) - len(whole) :] * n, inside * n, inside * n * inside]
    return [row for rows in out for row in rows]


def _row_weights(
    spec: ImportanceSampling, figure: dict[str, Array], valid: Array, empty: bool
) -> tuple[Array, list[Array]]:
    """`d` of each row, from its log ratio, and what is summed besides; an empty row, where it counts, weighs 0."""
    n, high, low = figure["n"], figure["is_high"], figure["is_low"]
    clamped = np.clip(figure["is_log_ratio"], -SAFETY_BOUND, SAFETY_BOUND)
    d = np.expm1(clamped)
    if spec.mode == "zero":
        d = np.where(high + low > 0, -1.0, d)
    elif spec.mode != "mask":
        d = np.clip(d, (spec.lower if spec.mode == "clip" else 0.0) - 1.0, spec.upper - 1.0)
    row_high, row_low = high, low
    if empty:
        d = np.where(valid > 0, d, -1.0)
        row_high, row_low = high * valid, np.where(valid > 0, low, 1.0)
    w = d + 1.0
    return d, [high, low, high * n, low * n, row_high, row_low, np.exp(clamped) * n, w * n, w * n * w]
