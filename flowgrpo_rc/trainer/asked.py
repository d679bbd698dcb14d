"""The batches that rollouts have been asked for: each keeps what it was asked with until it is learned from."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.rollout import RolloutEngine, RolloutPool, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.pool import PendingRollout
from flowgrpo_rc.rollout.proof import HeldAdapter
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.scoring import RolloutScoring


@dataclass(frozen=True)
class BatchRequest:
    """The images of this process that a batch learns from, as they are asked for."""

    step: int
    """How many batches are learned from before it."""
    prompts: list[PromptRecord]
    """The distinct prompts, a row of the request's conditioning each."""
    group: Int[Tensor, " B"]
    """For each image the position of its prompt in the batch of all processes."""
    request: RolloutRequest
    scoring: RolloutScoring
    """What takes its images, and gives their rewards."""


class AskedRollouts:
    """Asks for batches up to ``ahead`` batches early, and has them drawn in turn.

    A ``RolloutPool`` draws them while the actor learns from those before. Any other engine draws a batch when it is
    wanted; all numbers are the same.

    Args:
        engine: draws.
        adapter: gives the engine the adapter of each batch.
        ahead: how early.
        last: how many batches the run has; none is asked for beyond them.
        request: makes the request of a step's batch; called once a step, in order.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        adapter: AdapterSync,
        ahead: int,
        last: int,
        request: Callable[[int], BatchRequest],
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._ahead = ahead
        self._last = last
        self._request = request
        self._asked: deque[tuple[BatchRequest, HeldAdapter, PendingRollout | None]] = deque()

    def next(self, step: int) -> BatchRequest:
        """The batch of this step, after those that are due by then have been asked for."""
        asked_until = self._asked[-1][0].step + 1 if self._asked else step
        for due in range(asked_until, max(step + 1, min(step + self._ahead + 1, self._last))):
            batch = self._request(due)
            try:
                pending = self._submit(batch)
            except BaseException:
                batch.scoring.abandon()  # ``abandon`` does not know of it
                raise
            self._asked.append((batch, self._adapter.held, pending))
        return self._asked[0][0]

    def _submit(self, batch: BatchRequest) -> PendingRollout | None:
        """Have it drawn from now on, where engines do that beside the trainer."""
        if not isinstance(self._engine, RolloutPool):
            return None
        self._adapter.give_for(batch.step)
        return self._engine.submit(batch.request, batch.scoring.take_ahead)

    def draw(self) -> tuple[Trajectories, HeldAdapter]:
        """Wait for the images of the batch that ``next`` gave last, and drop it; its scoring takes them on the way.

        Returns them and the adapter that they must have been drawn with.

        Raises:
            RolloutError: see the engine.
        """
        batch, held, pending = self._asked.popleft()
        if pending is not None:
            return pending.result(batch.scoring.take), held
        self._adapter.give_for(batch.step)
        return self._engine.generate(replace(batch.request, on_images=batch.scoring.take)), self._adapter.held

    def abandon(self) -> None:
        """Nothing that was asked for is wanted any more."""
        for batch, _, _ in self._asked:
            batch.scoring.abandon()
