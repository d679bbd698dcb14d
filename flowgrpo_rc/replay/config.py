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

    The buffer holds the mini-batches of the last ``batches`` batches, in the folder ``.replay/`` of the run.
    """

    section = "algorithm.replay"

    batches: NonNegativeInt = 0
    """Batches in the buffer; 0 learns from every image once."""
    share: Annotated[float, Check(lambda share: 0 < share < 1, "give a number between 0 and 1")] = 0.5
    """Share of a step's mini-batches that come from the buffer; .5 is one for each new one. It has no more of them than
    those of its batches."""
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
    """Learn from the first so many steps of their windows alone, as OP-GRPO cuts late steps; null: from all. ``kept``
    weights and rejection stay those of the whole window."""

    def reach(self, staleness: int) -> int:
        """Batches that mini-batches are taken from. New images are ``staleness`` batches stale."""
        limit = self.batches if self.max_staleness is None else self.max_staleness - staleness
        return min(self.batches, limit)

    def per_new(self, staleness: int) -> float:
        """Mini-batches from a full buffer for each new one."""
        return min(self.share / (1 - self.share), self.reach(staleness))

    def due(self, step: int, mini_batches: int) -> int:
        """Mini-batches to take from the buffer after batch ``step``, if it has so many; the first batch is 0."""
        if not self.batches:
            return 0
        per_batch = self.share / (1 - self.share) * mini_batches
        # Rounded against a product such as 2.9999999.
        return math.floor(round(per_batch * (step + 1), 6)) - math.floor(round(per_batch * step, 6))

    def in_words(self, mini_batches: int, staleness: int) -> str:
        """For a run's first lines."""
        cut = "" if self.steps is None else f", the first {self.steps} steps of their windows"
        return (
            f"{self.per_new(staleness) * mini_batches:g} more mini-batch(es) a batch, from the last "
            f"{self.reach(staleness)} batch(es), {self.select}{cut}"
        )

    def optimizer_steps(self, batches: int, mini_batches: int, staleness: int) -> int:
        """Optimizer steps from the buffer in a run of so many batches. At its start the buffer has too few."""
        reach = self.reach(staleness)
        return sum(min(self.due(step, mini_batches), min(step, reach) * mini_batches) for step in range(batches))
