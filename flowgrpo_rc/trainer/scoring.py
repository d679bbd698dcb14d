"""Scores the images of a rollout while others are drawn, and those of later batches while the actor learns."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.rewards import PartialScoring, RewardError, RewardMix, RewardResult
from flowgrpo_rc.rewards.answer import PARTS
from flowgrpo_rc.rewards.call_queue import AHEAD
from flowgrpo_rc.rollout import RolloutSyncError


def names_of_all(named: Sequence[Collection[str]]) -> list[str]:
    """The names of rewards and of parts of rewards, which must be the same everywhere; in the order of the first.

    Args:
        named: the names that each process, or each image, has.

    Raises:
        RewardError: they differ, so that there is no mean over all images. Every process that gets the same names
            raises it.
    """
    first = list(named[0])
    # Every process compares the same lists, so all raise together and none waits for the others.
    scattered = sorted(set(first).union(*named) - set(first).intersection(*named))
    if scattered:
        function, _, part = scattered[0].partition("/")
        raise RewardError(
            f"reward function {function!r} reported {PARTS}{part} in some processes only; its mean over all of them is "
            f"logged, so report {PARTS}{part} for every image"
        )
    return first


@dataclass(frozen=True)
class BatchScoring:
    """Makes the scoring of each batch of a run."""

    mix: RewardMix
    part: int
    """Images of a micro-batch of a rollout."""
    overlaps: bool
    """Score images while others are drawn."""
    ahead: bool = False
    """Score images of a batch before the trainer comes to it."""

    def __call__(self, records: Sequence[PromptRecord]) -> "RolloutScoring":
        """The scoring of the next batch, given the prompt of every image."""
        return RolloutScoring(self, [record.prompt for record in records], [record.metadata for record in records])


class RolloutScoring(PartialScoring):
    """Scores the images of a rollout as they come; a context manager that scores nothing more on exit."""

    def __init__(self, run: BatchScoring, prompts: Sequence[str], metadata: Sequence[dict]) -> None:
        super().__init__(run.mix, prompts, metadata, run.part)
        # Only functions that other processes compute leave the training its interpreter and its GPU.
        self._early = [name for name in run.mix.queues if run.overlaps and run.ahead]
        self._late = [name for name in run.mix.streaming if run.overlaps and name not in self._early]
        self._drawn: list[np.ndarray] = []

    @property
    def take_ahead(self) -> Callable[[Tensor, Tensor], None] | None:
        """Takes rows and images, in order, from any thread at any time; ``None`` where nothing is scored ahead."""
        if not self._early:
            return None
        return lambda _, images: self.score_ahead(images.numpy(), self._early, urgency=AHEAD)

    def take(self, rows: Tensor, images: Tensor) -> None:
        """``RolloutRequest.on_images``.

        Raises:
            RewardError: a reward failed on earlier images.
            RolloutSyncError: the images do not come in the order of the request.
        """
        if not self._late:
            return
        count = sum(map(len, self._drawn))
        # Rewards are assigned by position.
        if rows.tolist() != list(range(count, count + len(images))):
            raise RolloutSyncError(
                f"the rollout engine delivered rows {rows.tolist()[:8]} after {count} images; it must deliver them in "
                "the order of the request"
            )
        # The run ends here, without drawing the rest of the batch.
        self.raise_failure()
        self._drawn.append(images.numpy())
        self.score_ahead(self._drawn[-1], self._late)

    def result(self, images: np.ndarray) -> RewardResult:
        """The rewards of all images; waits for those that are still being scored.

        Raises:
            RewardError: see ``RewardMix``.
            RolloutSyncError: the engine has answered with other images than it delivered.
        """
        # An engine that reuses a buffer would have had other images scored than it returns.
        first = 0
        for drawn in self._drawn:
            if not np.array_equal(drawn, images[first : first + len(drawn)]):
                raise RolloutSyncError(
                    f"the rollout engine answered with other images than it delivered while it drew, in rows {first} "
                    f"to {first + len(drawn) - 1}; their rewards would be those of other images"
                )
            first += len(drawn)
        return super().result(images)

    def __enter__(self) -> "RolloutScoring":
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()
