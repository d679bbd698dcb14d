"""How far the training policy is from the rollout policy: perplexities, divergences and gaps (SPEC section 5)."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, safe_exp
from flowgrpo_rc.correction.numerics.figures import Figures


def add_elements(x: Elements, figures: Figures) -> None:
    """What the diagnostics need of elements."""
    figures.add("log_prob", x.log_prob)
    figures.add("rollout_log_prob", x.rollout_log_prob)
    figures.add("log_ratio", x.log_ratio)
    figures.add("log_ratio_abs", x.log_ratio.abs())
    figures.add("excess", x.excess)
    figures.add("excess_squared", x.excess * x.excess)
    figures.add("k3", x.k3)


def add_rows(figures: Figures) -> None:
    """And of rows: a row's log perplexity is ``-mean(log_prob)``, its ratio the product of its elements'."""
    log_perplexities = -figures.means("log_prob", "log_ratio")
    figures.add_rows(("training_ppl", "rollout_ppl", "ppl_ratio"), safe_exp(log_perplexities))
    figures.add_rows(("log_ppl_abs_diff",), log_perplexities[2:].abs())
    figures.add_rows(("row_ratio_squared",), safe_exp(figures.sum("log_ratio")[None]).square())


def timestep_table(
    log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"] | None,
    timesteps: Shaped[Tensor, "B T"],
) -> Float[Tensor, " numbers"]:
    """``|l|``, validity and timestep of every element: grouped on the host (``gaps_by_timestep``)."""
    gap = (log_prob.double() - rollout_log_prob.double()).abs()
    valid = torch.ones_like(gap) if mask is None else (mask != 0).double()
    return torch.stack([torch.where(valid > 0, gap, 0.0), valid, timesteps.double()]).flatten()


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
        if not math.isfinite(t):
            raise ValueError(f"timesteps: got {t} for a valid element; give finite numbers, or leave timesteps out.")
        total, count = groups.get(t, (0.0, 0.0))
        groups[t] = (total + gap, count + 1.0)
    return dict(sorted(groups.items()))
