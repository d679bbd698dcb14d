"""The section ``algorithm.replay``. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import Check, NonNegativeInt, PositiveInt, Section, one_of

SELECTIONS = ("random", "newest", "spread")
OLD_POLICIES = ("kept", "current")


@documented_fields
@dataclass(kw_only=True, slots=True)
class ReplayConfig(Section):
    """Learn again from the images of earlier batches, after those of the new one.

    The buffer holds the mini-batches of the last ``batches`` batches, in the folder ``replay/`` of the run.
    """

    section = "algorithm.replay"

    batches: NonNegativeInt = 0
    """Batches in the buffer; 0 learns from every image once."""
    share: Annotated[float, Check(lambda share: 0 < share < 1, "give a number between 0 and 1")] = 0.5
    """Share of the optimizer steps that learn from the buffer, a mini-batch each; .5 is one for each new mini-batch."""
    select: Annotated[str, one_of(SELECTIONS)] = "random"
    """Mini-batches to learn from: ``random`` ones, the ``newest``, or those with the largest ``spread`` of rewards, by
    the mean size of their advantages. None is taken twice in a step."""
    old_policy: Annotated[str, one_of(OLD_POLICIES)] = "kept"
    """The old policy of images from the buffer in decoupled mode. ``kept``: of the batch that drew them, with its
    log-probs, weights and rejection, as in a further PPO epoch. ``current``: the actor as it is before the optimizer
    step; weights and rejection then correct for staleness and engine together. In bypass mode it is the rollout's
    policy."""
    max_staleness: PositiveInt | None = None
    """Leave out images whose adapter is more than so many batches older than the actor's; null: no limit."""
    steps: PositiveInt | None = None
    """Learn from the first so many steps of their windows alone, as OP-GRPO cuts late steps; null: from all."""

    @property
    def per_new(self) -> float:
        """Optimizer steps from the buffer for each from new images, once it is full."""
        return self.share / (1 - self.share) if self.batches else 0.0

    def due(self, step: int, mini_batches: int) -> int:
        """Mini-batches to take from the buffer after batch ``step``; the first batch is 0."""
        per_batch = self.per_new * mini_batches
        # Rounded against a product such as 2.9999999.
        return math.floor(round(per_batch * (step + 1), 6)) - math.floor(round(per_batch * step, 6))

    def in_words(self, mini_batches: int) -> str:
        """For a run's first lines."""
        cut = "" if self.steps is None else f", the first {self.steps} steps of their windows"
        stale = "" if self.max_staleness is None else f", at most {self.max_staleness} batches stale"
        return (
            f"{self.per_new * mini_batches:g} more optimizer step(s) a batch from the last {self.batches} "
            f"batch(es){stale}, {self.select}{cut}"
        )

    def optimizer_steps(self, batches: int, mini_batches: int) -> int:
        """Optimizer steps from the buffer in a run of so many batches. At its start the buffer has too few."""
        return sum(min(self.due(step, mini_batches), min(step, self.batches) * mini_batches) for step in range(batches))
