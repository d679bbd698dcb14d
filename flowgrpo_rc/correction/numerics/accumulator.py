"""Metrics of several micro-batches, and of all ranks, as if they had been one batch."""

from typing import Any

from flowgrpo_rc.correction.numerics.metrics import PREFIX, metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import Moments, merge_over_ranks
from flowgrpo_rc.correction.numerics.run import RolloutCorrection
from flowgrpo_rc.correction.numerics.slime import slime_metrics


class MetricAccumulator:
    """Merges the moments of results that were computed with the same options.

    ``compute`` leaves the accumulator as it is; ``reset`` empties it.
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None

    def add(self, result: RolloutCorrection | Moments) -> None:
        """Adds a result or its moments."""
        moments = result if isinstance(result, Moments) else result.moments
        self._moments = moments if self._moments is None else self._moments.merge(moments)

    def reset(self) -> None:
        """Forgets what was added."""
        self._moments = None

    def compute(self, dp_group: Any = None, *, prefix: str = PREFIX, slime: bool = False) -> dict[str, float]:
        """Metrics of everything added, on all ranks; empty when nothing was added anywhere.

        With ``torch.distributed`` initialised this is a collective over ``dp_group`` (None: all ranks), so every rank
        of it must call. ``slime=True`` adds the figures under slime's names.
        """
        moments = merge_over_ranks(self._moments, dp_group)
        if moments is None:
            return {}
        metrics = metrics_from_moments(moments, prefix)
        return {**metrics, **slime_metrics(moments)} if slime else metrics
