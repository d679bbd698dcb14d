"""Results of a correction, and the moments by which metrics merge exactly over micro-batches and ranks.

A metric is a function of a few numbers, its moments, which are sums or minima over elements or rows. Merging those
makes a merged metric equal to the metric of the merged batch, which a mean of standard deviations would not be.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.correction.plan import CorrectionPlan

PREFIX = "rollout_corr/"
BATCH_NORM_FACTOR = "rollout_is_batch_norm_factor"
ROUNDING = 2.0**-50
"""Share of the mean square below which a variance is only rounding: that of a deviation of 3e-8 of the mean."""
Metrics = dict[str, float]
_SLIME_ONLY = "mis_"
"""Metrics that only slime has carry its names from the start."""
_SLIME = {
    **{f"mismatch_{name}": name for name in ("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl")},
    **{f"mismatch_{name}": name for name in ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")},
    "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
    "mis_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
    "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    "mis_ratio_mean_after_mis": "rollout_is_mean",
    "mis_batch_norm_factor": BATCH_NORM_FACTOR,
}
"""Names of our metrics in slime's MIS helper."""


# Metrics as functions of their merged moments; the first is the number of elements or rows.


def mean(n: float, total: float) -> float:
    """``E[x]``."""
    return total / n


def mean_excess(n: float, total: float) -> float:
    """``E[x] - 1``."""
    return total / n - 1.0


def mean_from_one(n: float, excess: float) -> float:
    """``E[x]`` from sums of ``x - 1``."""
    return 1.0 + excess / n


def chi_squared(n: float, excess: float, squares: float) -> float:
    """``E[r^2] - 1`` of ``r - 1``."""
    return (squares + 2.0 * excess) / n


def deviation(n: float, total: float, squares: float) -> float:
    """``sqrt(E[x^2] - E[x]^2)``; 0 for a single value."""
    mean = total / n
    variance = squares / n - mean * mean
    # A difference of two equal squares is rounding noise, which the root would make visible.
    return math.sqrt(variance) if n > 1 and variance > ROUNDING * squares / n else 0.0


def sample_deviation(n: float, total: float, squares: float) -> float:
    """``deviation`` with ``n - 1`` in the denominator."""
    return deviation(n, total, squares) * math.sqrt(n / (n - 1.0)) if n > 1 else 0.0


def _of_weights(
    n: float, weight: float, squares: float, excess: float, excess_squares: float
) -> tuple[float, float, float]:
    """``E[w]``, ``E[w^2]`` and the deviation, from sums of ``w`` or of ``w - 1``, which is the more exact near 1."""
    if weight / n <= 0.5:
        return weight / n, squares / n, deviation(n, weight, squares)
    square = 1.0 + 2.0 * (excess / n) + excess_squares / n
    return 1.0 + excess / n, square, deviation(n, excess, excess_squares)


def weight_mean(*sums: float) -> float:
    """``E[w]``."""
    return _of_weights(*sums)[0]


def weight_deviation(*sums: float) -> float:
    """``deviation`` of weights."""
    return _of_weights(*sums)[2]


def weight_sample_deviation(n: float, *sums: float) -> float:
    """``sample_deviation`` of weights."""
    return weight_deviation(n, *sums) * math.sqrt(n / (n - 1.0)) if n > 1 else 0.0


def effective_size(*sums: float) -> float:
    """``E[w]^2 / E[w^2]``, the effective sample size as a share."""
    mean, square, _ = _of_weights(*sums)
    return mean * mean / square if square > 0.0 and mean > 0.0 else 0.0


def batch_divisor(n: float, weight: float, excess: float) -> float:
    """The mean weight, by which batch normalisation divides; 1 where it is tiny."""
    mean = weight_mean(max(n, 1.0), weight, 0.0, excess, 0.0)
    return mean if mean > 1e-8 else 1.0


def least(least: float) -> float:
    """The minimum."""
    return least


def most(minus_most: float) -> float:
    """The maximum, kept as the minimum of the negative, so that all extremes merge in one way."""
    return -minus_most


class Figure(NamedTuple):
    """One metric: a function of its moments, and the moments on the host."""

    finish: Callable[..., float]
    numbers: tuple[float, ...]

    @property
    def value(self) -> float:
        """The metric."""
        return self.finish(*self.numbers)

    def merge(self, other: "Figure") -> "Figure":
        """The same metric of both batches together."""
        join = min if self.finish in (least, most) else operator.add
        return Figure(self.finish, tuple(join(a, b) for a, b in zip(self.numbers, other.numbers, strict=True)))


@dataclass(frozen=True, slots=True)
class Moments:
    """The numbers behind the metrics of a batch, of several micro-batches or of all ranks, as Python floats."""

    plan: CorrectionPlan
    figures: Mapping[str, Figure]
    """Every metric by its name. Metrics of single timesteps need not be in every batch."""

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both batches together.

        Raises:
            ValueError: they were computed with different options.
        """
        if self.plan != other.plan:
            # Bounds enter the numbers, so those of other options would mix two meanings.
            raise ValueError("Only results computed with the same options can be merged.")
        both = {
            name: figure.merge(other.figures[name]) for name, figure in self.figures.items() if name in other.figures
        }
        return Moments(self.plan, {**self.figures, **other.figures, **both})


def metrics_from_moments(moments: Moments, prefix: str = PREFIX) -> Metrics:
    """Every metric that the moments' options give, as Python floats."""
    shown = {name: figure for name, figure in moments.figures.items() if not name.startswith(_SLIME_ONLY)}
    return {prefix + name: figure.value for name, figure in shown.items()}


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Result of one call; unpacks as ``weights, mask, metrics = result``. Nothing in it carries a gradient."""

    weights: Tensor | None
    """Importance weights, float32 (float64 for float64 input), 0 at invalid elements; None without ``rollout_is``."""
    mask: Tensor
    """``mask * keep`` in the mask's dtype (bool when no mask was given)."""
    metrics: dict[str, float]
    """Named figures, prefixed ``rollout_corr/``."""
    moments: Moments
    """The numbers behind ``metrics``; ``MetricAccumulator`` merges them exactly over micro-batches and ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weights, self.mask, self.metrics))


class MetricAccumulator:
    """Metrics of several micro-batches, and of all ranks, as if they had been one batch.

    Merges the moments of results that were computed with the same options. ``compute`` leaves the accumulator as it
    is; ``reset`` empties it.
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None

    def add(self, result: RolloutCorrection | Moments) -> None:
        """Adds a result or its moments."""
        moments = _moments(result)
        self._moments = moments if self._moments is None else self._moments.merge(moments)

    def reset(self) -> None:
        """Forgets what was added."""
        self._moments = None

    def compute(self, dp_group: Any = None, *, prefix: str = PREFIX, slime: bool = False) -> Metrics:
        """Metrics of everything added, on all ranks; empty when nothing was added anywhere.

        With ``torch.distributed`` initialised this is a collective over ``dp_group`` (None: all ranks), so every rank
        of it must call. ``slime=True`` adds the figures under slime's names.
        """
        moments = merge_over_ranks(self._moments, dp_group)
        if moments is None:
            return {}
        metrics = metrics_from_moments(moments, prefix)
        return {**metrics, **slime_metrics(moments)} if slime else metrics


def slime_metrics(result: RolloutCorrection | Moments, *, ppo_ratio_mean: float | None = None) -> Metrics:
    """The figures under slime's names (``mismatch_*``, ``mis_*``, ...), without a prefix.

    Args:
        result: of a correction, or its ``Moments``.
        ppo_ratio_mean: mean of pi_theta / pi_old, which the caller has; reported as ``ois``.
    """
    moments = _moments(result)
    # slime's figures are ours under other names, and a few of weights before their bounds.
    ours = metrics_from_moments(moments, "")
    out = {name: ours[source] for name, source in _SLIME.items() if source in ours}
    out |= {name: figure.value for name, figure in moments.figures.items() if name.startswith(_SLIME_ONLY)}
    return out if ppo_ratio_mean is None else {**out, "ois": ppo_ratio_mean}


def merge_over_ranks(moments: Moments | None, dp_group: Any = None) -> Moments | None:
    """Merges each rank's moments (None where a rank has none); the same result on every rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return moments
    # Ranks may hold nothing, so sizes differ: gather objects, not tensors.
    gathered: list[Moments | None] = [None] * torch.distributed.get_world_size(dp_group)
    torch.distributed.all_gather_object(gathered, moments, group=dp_group)
    merged = MetricAccumulator()
    for each in gathered:
        if each is not None:
            merged.add(each)
    return merged._moments


def _moments(result: RolloutCorrection | Moments) -> Moments:
    return result if isinstance(result, Moments) else result.moments
