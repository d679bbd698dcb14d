"""How far the training policy is from the rollout policy: perplexities, divergences and gaps (SPEC section 5)."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import Elements, extremes, row_sums, safe_exp
from flowgrpo_rc.correction.numerics.moments import RowFigures
from flowgrpo_rc.correction.plan import SAFETY_BOUND


def off_policy(x: Elements, rows: Shaped[Tensor, " B"] | None) -> RowFigures:
    """Sums behind the diagnostics; ``rows`` are those that count in averages over rows (``None``: all).

    A row's log perplexity is ``-mean(log_prob)``. chi-squared is ``mean(r^2) - 1``.
    """
    gap = x.log_ratio.abs()
    sums = row_sums(x.log_prob, x.log_ratio, gap, x.excess, x.excess.square(), x.excess - x.clamped)
    log_prob, log_ratio, gap_sum, excess, excess_squared, k3 = sums.unbind()
    train, difference = x.row_mean(-sums[:2]).unbind()
    log_ppl = torch.stack([train, train - difference, difference])
    training_ppl, rollout_ppl, ppl_ratio = safe_exp(log_ppl).unbind()
    figures = RowFigures(
        {
            "elements": x.count,
            "rows": torch.ones_like(x.count),
            "nonempty_rows": x.nonempty.double(),
            "log_ratio": log_ratio,
            "log_ratio_abs": gap_sum,
            "excess": excess,
            "excess_squared": excess_squared,
            "k3": k3,
            "training_ppl": training_ppl,
            "training_log_ppl": train,
            "rollout_ppl": rollout_ppl,
            "rollout_log_ppl": log_ppl[1],
            "log_ppl_diff": difference,
            "log_ppl_abs_diff": difference.abs(),
            "ppl_ratio": ppl_ratio,
            "chi2_seq": torch.expm1(2.0 * log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)),
        }
    )
    figures.add_extremes("log_ppl_diff", extremes(difference, rows))
    figures.maxima["log_ratio_abs"] = gap.amax().double()
    return figures


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
