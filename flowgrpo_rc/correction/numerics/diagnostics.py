"""How far the training policy is from the rollout policy: perplexities, divergences and gaps (SPEC section 5)."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, Rows, RowSums, safe_exp
from flowgrpo_rc.correction.numerics.moments import RowFigures


def add_off_policy_sums(x: Elements, sums: RowSums) -> None:
    """Element sums behind the diagnostics."""
    sums.add("log_prob", x.log_prob)
    sums.add("log_ratio", x.log_ratio)
    sums.add("log_ratio_abs", x.log_ratio.abs())
    sums.add("excess", x.excess)
    sums.add("excess_squared", x.excess * x.excess)
    sums.add("k3", x.k3)


def add_off_policy_figures(rows: Rows, figures: RowFigures) -> None:
    """Adds each row's figures; its log perplexity is ``-mean(log_prob)``, its ratio the product of its elements'."""
    difference = -rows.mean("log_ratio")
    training = -rows.mean("log_prob")
    logs = torch.stack([training, training - difference, difference, rows.sum("log_ratio")])
    figures.add(("training_log_ppl", "rollout_log_ppl", "log_ppl_diff", "row_log_ratio"), logs)
    figures.add(("training_ppl", "rollout_ppl", "ppl_ratio", "row_ratio"), safe_exp(logs))
    figures.add(("log_ppl_abs_diff",), difference.abs()[None])


def timestep_table(
    log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"] | None,
    timesteps: Shaped[Tensor, "B T"],
) -> Float[Tensor, "three elements"]:
    """``|l|``, validity and timestep of every element: grouped on the host (``gaps_by_timestep``)."""
    gap = (log_prob.double() - rollout_log_prob.double()).abs()
    valid = torch.ones_like(gap) if mask is None else (mask != 0).double()
    return torch.stack([torch.where(valid > 0, gap, 0.0), valid, timesteps.double()]).flatten(1)


def gaps_by_timestep(table: list[float]) -> dict[float, tuple[float, float]]:
    """``{t: (sum of |l|, valid elements)}``, sorted, of the numbers of a ``timestep_table`` end to end.

    Raises:
        ValueError: the timestep of a valid element is NaN or infinite.
    """
    groups: dict[float, tuple[float, float]] = {}
    n = len(table) // 3
    for gap, valid, t in zip(table[:n], table[n : 2 * n], table[2 * n :], strict=True):
        if not valid:
            continue
        if not math.isfinite(t):
            raise ValueError(f"timesteps: got {t} for a valid element; give finite numbers, or leave timesteps out.")
        total, count = groups.get(t, (0.0, 0.0))
        groups[t] = (total + gap, count + 1.0)
    return dict(sorted(groups.items()))
