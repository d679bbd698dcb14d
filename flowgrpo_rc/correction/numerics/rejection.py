"""Rejection (SPEC section 3): criteria on k1, k2 and k3 of elements or of whole rows, and the veto.

Element criteria decide before the sums along rows are taken, row criteria after; both report the same figures. Instead
of ``k1 = -l`` all of it is about ``l``, of which ``metrics`` turn the sign.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, flags
from flowgrpo_rc.correction.numerics.figures import Figures
from flowgrpo_rc.correction.plan import Criterion


def element_statistics(criteria: Sequence[Criterion], x: Elements, figures: Figures) -> dict[str, Float[Tensor, "T B"]]:
    """``l`` for k1, ``k2 = l^2 / 2`` and ``k3 = r - 1 - l`` of each element; adds what criteria average or sum."""
    values = {"k1": x.clamped, "k3": x.k3}
    if any(criterion.statistic == "k2" for criterion in criteria):
        values["k2"] = x.clamped * x.clamped / 2
    for name in ("k1", "k2"):  # the sums of k3 are among the diagnostics
        if any(criterion.statistic == name and criterion.aggregate != "seq_max" for criterion in criteria):
            figures.add(name, values[name])
    return values


def judge_elements(
    criterion: Criterion, values: Float[Tensor, "T B"], x: Elements, figures: Figures
) -> Float[Tensor, "T B"]:
    """Flags of what an element criterion rejects, by the values of its statistic."""
    inside = x.zero_invalid(values.clamp(criterion.lower, criterion.upper))
    side = (values - inside).sign()
    outside = side.abs()
    figures.add(f"{criterion.name}/inside", inside)
    figures.add(f"{criterion.name}/inside_squared", inside * inside)
    figures.add(f"{criterion.name}/side", side)
    figures.add(f"{criterion.name}/outside", outside)
    return outside


def judge_rows(
    criteria: Sequence[Criterion],
    values: dict[str, Float[Tensor, "T B"]],
    row_bounds: Float[Tensor, " B"] | None,
    figures: Figures,
) -> list[Float[Tensor, " B"]]:
    """Flags of the rows that each row criterion rejects; adds the figures of rows of all criteria.

    Args:
        criteria: all of them; of an element criterion the mean of its statistic is reported.
        values: the statistics of elements.
        row_bounds: the bounds of a calibrated criterion, which stands alone.
    """
    dtype = values[criteria[0].statistic].dtype  # the compute dtype: in it is decided, and bounds are rounded to it
    aggregated = {
        "token": figures.mean,
        "seq_mean": figures.mean,
        "seq_sum": figures.sum,
        "seq_max": lambda statistic: values[statistic].amax(0).double(),  # of k2 and k3, 0 at invalid elements
    }
    statistic = torch.stack([aggregated[criterion.aggregate](criterion.statistic) for criterion in criteria])
    if row_bounds is None:
        lower, upper = _constant_bounds(tuple((c.lower, c.upper) for c in criteria), dtype, statistic.device)
    else:
        upper = row_bounds.to(dtype)
        lower = -upper
    compared = statistic.to(dtype)
    inside = compared.clamp(lower, upper)
    side = (compared - inside).sign()
    outside = side.abs()
    inside = inside.double()
    for figure, lines in (
        ("statistic", statistic),
        ("statistic_squared", statistic * statistic),
        ("inside", inside),
        ("inside_squared", inside * inside),
        ("side", side),
        ("outside", outside),
    ):
        figures.add_rows([f"rows/{criterion.name}/{figure}" for criterion in criteria], lines)
    rejections = []
    for criterion, line in zip(criteria, outside, strict=True):
        if criterion.aggregate == "token":
            any_outside = figures.mean(f"{criterion.name}/outside").sign()
            figures.add_rows((f"rows/{criterion.name}/rejected",), any_outside[None])
        else:
            rejections.append(line)
    return rejections


@lru_cache(maxsize=64)
def _constant_bounds(
    bounds: tuple[tuple[float, float], ...], dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, " C 1"], Float[Tensor, " C 1"]]:
    """Rounded to the compute dtype, and kept, so that later calls copy nothing to the device."""
    lower, upper = torch.tensor(bounds, dtype=dtype, device=device).unsqueeze(-1).unbind(1)
    return lower, upper


def veto_elements(log_threshold: float, x: Elements, figures: Figures) -> None:
    """Counts valid elements of ``l < log_threshold``; here ``l`` is not clamped."""
    figures.add("veto", x.zero_invalid(flags(torch.lt, x.log_ratio, log_threshold)))


def veto_rows(figures: Figures) -> Float[Tensor, " B"]:
    """Flags of the rows with such an element, which are rejected."""
    rejected = figures.sum("veto").clamp(max=1.0)
    figures.add_rows(("rows/veto",), rejected[None])
    return rejected


def row_statistic(log_ratio: Float[Tensor, "B W"], criterion: Criterion) -> Float[Tensor, " B"]:
    """What a row criterion bounds, in float64: the size of the sum or mean of ``l`` for k1; else of k2 or k3."""
    log_ratio = log_ratio.double()
    statistics = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(log_ratio) - log_ratio}
    statistic = statistics[criterion.statistic]
    reductions = {"seq_sum": statistic.sum(1), "seq_mean": statistic.mean(1), "seq_max": statistic.amax(1)}
    return reductions[criterion.aggregate].abs()
