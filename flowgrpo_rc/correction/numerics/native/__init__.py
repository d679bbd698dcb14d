"""The two passes in C, for tensors in host memory; `kernel` and `reduction` do the same where it is not built.

`module.c` is compiled when the package is installed, if there is a C compiler (`hatch_build.py`).
"""

import math
import struct
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.layout import Layout, band
from flowgrpo_rc.correction.numerics.native.sources import digest
from flowgrpo_rc.correction.plan import ImportanceSampling


def _load() -> Any:
    """The extension module; None where it is not built, or from other sources than these."""
    try:
        from flowgrpo_rc.correction.numerics.native import _native  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return None
    if digest(Path(__file__).parent) not in (None, _native.SOURCES):
        warnings.warn(
            "The correction's C extension was built from other sources than these, so torch does its work, several "
            "times slower. Build it again: make install, or pip install -e .",
            stacklevel=2,
        )
        return None
    return _native


_native = _load()

# The enumerations and array sizes of `plan.h` and `reduce.h`.
_LEVELS = {"token": 1, "sequence": 2, "geometric": 3}
_MODES = {"truncate": 0, "zero": 1, "clip": 2, "mask": 3}
_AGGREGATES = {"seq_sum": 0, "seq_mean": 1, "seq_max": 2}
_STATISTICS = ("k1", "k2", "k3")
_SUMS = ("log_prob", "l", "lc", "k3", "k2", "d", "n", "abs", "e2", "d2", "w", "w2", "is_high", "is_low", "veto_low")
_CUTS = tuple(f"token_{statistic}/{part}" for statistic in _STATISTICS for part in ("below", "above", "in", "in2"))
_EXTREMES = ("l_max", "l_min", "is_d_max", "token_k2/min", "token_k3/min")
_ROW_WEIGHT = ("is_log_ratio", "is_high", "is_low", "is_row_weight")
_ROW_CRITERIA, _MAX_LINEAR = 8, 8
_MAX_BOUNDED = _MAX_LINEAR + _ROW_CRITERIA + 1
_KINDS = {
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8), 1),
    **{torch.int32: 2, torch.int64: 3, torch.float32: 4, torch.float64: 5},
}


def is_built() -> bool:
    """Whether the extension module is there."""
    return _native is not None


def knows(mask: Tensor | None) -> bool:
    """Whether a mask is of a type that the extension reads."""
    return mask is None or mask.dtype in _KINDS


def is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the extension can read a tensor's memory as numbers of `dtype`, row after row without gaps."""
    return x.dtype == dtype and x.is_contiguous() and not x.is_neg()


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, or a copy that `is_plain`."""
    return x.detach().to(dtype).contiguous().resolve_neg()


def run_rows(
    layout: Layout,
    log_prob: Float[Tensor, "R T"],
    rollout_log_prob: Float[Tensor, "R T"],
    mask: Shaped[Tensor, "R T"] | None,
    weights: Float[Tensor, "R T"] | None,
    kept: Shaped[Tensor, "R T"] | None,
    table: Float[Tensor, "figures R"],
) -> None:
    """`Kernel.run` for some rows: fills their columns of the table, `weights` and `kept`.

    Tensors in host memory, all but `table` `is_plain`: `log_prob`, `rollout_log_prob`, `weights` and `table` in the
    layout's dtype, `kept` in the mask's (bool without one).
    """
    rows, columns = log_prob.shape
    _native.run(
        _plan_bytes(layout),
        layout.dtype == torch.float64,
        log_prob.data_ptr(),
        rollout_log_prob.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if mask is None else _KINDS[mask.dtype],
        0 if weights is None else weights.data_ptr(),
        0 if kept is None else kept.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        rows,
        columns,
    )


def reduce_rows(
    layout: Layout, table: Float[Tensor, "figures rows"]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """`reduction.reduce_table` of a float32 or float64 table, leaving out every row without a valid element."""
    return _native.reduce(_reduction_bytes(layout), table.dtype == torch.float64, table.data_ptr(), table.shape[1])


@lru_cache(maxsize=64)
def _plan_bytes(layout: Layout) -> bytes:
    """`struct plan`."""
    plan, spec = layout.plan, _importance(layout)
    token = {c.statistic: c for c in layout.token_criteria}
    # the statistic of k1 is -l, and the pass compares l: what is below for one is above for the other
    token_bands = [
        (token[s].lower if s == "k1" else -math.inf, token[s].upper) if s in token else (0.0, 0.0) for s in _STATISTICS
    ]
    row_bands = [band(c) for c in layout.row_criteria]
    doubles = [
        spec.upper,
        spec.lower,
        spec.log_upper,
        spec.log_lower,
        -math.inf if plan.log_veto is None else plan.log_veto,
        *(low for low, _ in token_bands),
        *(high for _, high in token_bands),
        *_padded([low for low, _ in row_bands], _ROW_CRITERIA, 0.0),
        *_padded([high for _, high in row_bands], _ROW_CRITERIA, 0.0),
    ]
    integers = [
        0 if plan.importance is None else _LEVELS[spec.level],
        _MODES[spec.mode],
        plan.log_veto is not None,
        plan.can_reject,
        *(s in token for s in _STATISTICS),
        len(row_bands),
        *_padded([_AGGREGATES[c.aggregate] for c in layout.row_criteria], _ROW_CRITERIA),
        *_padded([_STATISTICS.index(c.statistic) for c in layout.row_criteria], _ROW_CRITERIA),
        *_places(layout),
    ]
    return _packed(doubles, integers)


def _places(layout: Layout) -> list[int]:
    """Where the table has each of the pass's figures, -1 where it does not."""
    place = {name: i for i, name in enumerate(layout.table)}
    of_rows = {name: place.pop(name) for name in _ROW_WEIGHT} if "is_row_weight" in place else {}
    for part, other in (("token_k1/below", "token_k1/above"), ("token_k1/above", "token_k1/below")):
        if part in layout.table:
            place[part] = layout.table.index(other)
    criteria = _padded([place[c.name] for c in layout.row_criteria], _ROW_CRITERIA, -1)
    found = [place.get(name, -1) for name in (*_SUMS, *_CUTS, *_EXTREMES)]
    return [*found, *(of_rows.get(name, -1) for name in _ROW_WEIGHT), place.get("kept", -1), *criteria]


@lru_cache(maxsize=64)
def _reduction_bytes(layout: Layout) -> bytes:
    """`struct reduction`."""
    spec, place = _importance(layout), {name: i for i, name in enumerate(layout.table)}
    lower, upper = (bounds.ravel().tolist() for bounds in (layout.lower, layout.upper))
    by_row = "is_row_weight" in place
    touched = [place[f"{c.name}/below"] for c in layout.token_criteria]
    doubles = [
        spec.lower,
        spec.upper,
        *_padded([sign for _, sign, _ in layout.linear], _MAX_LINEAR, 0.0),
        *_padded(lower, _MAX_BOUNDED, 0.0),
        *_padded(upper, _MAX_BOUNDED, 0.0),
    ]
    integers = [
        len(layout.sums),
        len(layout.linear),
        len(layout.row_criteria),
        len(layout.extremes),
        *_padded([place[first] for first, _, _ in layout.linear], _MAX_LINEAR),
        *_padded([place[second] if second else -1 for _, _, second in layout.linear], _MAX_LINEAR),
        len(touched),
        *_padded(touched, len(_STATISTICS)),
        place["n"],
        place["l"],
        place.get("veto_low", -1),
        place["is_log_ratio"] if by_row else -1,
        place.get("kept", -1),
        _MODES[spec.mode],
        len(layout.reduced),
        len(layout.ranged),
    ]
    return _packed(doubles, integers)


def _importance(layout: Layout) -> ImportanceSampling:
    """The plan's weights; where it has none, something to fill their place."""
    return layout.plan.importance or ImportanceSampling("token", "truncate", 0.0, math.inf, 0.0)


def _padded(values: list[Any], size: int, filler: Any = 0) -> list[Any]:
    if len(values) > size:
        raise ValueError(f"{len(values)} figures do not fit the {size} places that the extension has")
    return values + [filler] * (size - len(values))


def _packed(doubles: list[float], integers: list[Any]) -> bytes:
    """As a C compiler lays the structure out: doubles, integers, and room up to a multiple of eight."""
    return struct.pack(f"@{len(doubles)}d{len(integers)}i0d", *doubles, *map(int, integers))
