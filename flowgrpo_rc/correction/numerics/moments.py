"""Results of a correction, and the moments by which metrics merge exactly over micro-batches and ranks."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.correction.numerics.metrics import BATCH_NORM_FACTOR, Figure
from flowgrpo_rc.correction.plan import CorrectionPlan

PREFIX = "rollout_corr/"
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
    return {prefix + name: f.value for name, f in moments.figures.items() if not name.startswith(_SLIME_ONLY)}


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
    there = [each for each in gathered if each is not None]
    return functools.reduce(Moments.merge, there) if there else None


def _moments(result: RolloutCorrection | Moments) -> Moments:
    return result if isinstance(result, Moments) else result.moments
