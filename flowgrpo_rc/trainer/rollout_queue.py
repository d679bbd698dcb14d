"""The queue of rollouts: batches are submitted up to ``rollout.ahead`` batches before the actor learns from them."""

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
    """The images of this process in one batch, before they are drawn."""

    step: int
    """Number of batches that are learned from before it."""
    prompts: list[PromptRecord]
    """The distinct prompts; each is a row of the request's conditioning."""
    group: Int[Tensor, " B"]
    """For each image the position of its prompt in the batch of all processes."""
    request: RolloutRequest
    scoring: RolloutScoring
    """Takes the images and returns their rewards."""


class RolloutQueue:
    """Submits batches up to ``ahead`` batches early, and returns their images in order.

    A ``RolloutPool`` draws them while the actor learns from earlier batches. Any other engine draws a batch when it is
    wanted, with the same numbers.

    Args:
        engine: draws the images.
        adapter: gives the engine the adapter of each batch.
        ahead: number of batches that are submitted early.
        last: number of batches of the run; none is submitted beyond it.
        request: makes the request of a step's batch. It is called once a step, in order.
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
        self._queue: deque[tuple[BatchRequest, HeldAdapter, PendingRollout | None]] = deque()

    def next(self, step: int) -> BatchRequest:
        """The batch of this step, after the batches that are due by then have been submitted."""
        first = self._queue[-1][0].step + 1 if self._queue else step
        # The batch of this step is drawn also beyond the run's last one.
        end = max(step + 1, min(step + self._ahead + 1, self._last))
        for due in range(first, end):
            batch = self._request(due)
            try:
                pending = self._submit(batch)
            except BaseException:
                batch.scoring.abandon()  # it is not in the queue, where ``abandon`` would find it
                raise
            self._queue.append((batch, self._adapter.held, pending))
        return self._queue[0][0]

    def _submit(self, batch: BatchRequest) -> PendingRollout | None:
        if not isinstance(self._engine, RolloutPool):
            return None
        self._adapter.give_for(batch.step)
        return self._engine.submit(batch.request, batch.scoring.take_ahead)

    def draw(self) -> tuple[Trajectories, HeldAdapter]:
        """Wait for the images of the batch that ``next`` returned last, and remove it.

        Its scoring takes images as they arrive. Returns them and the adapter that they must have been drawn with.

        Raises:
            RolloutError: see the engine.
        """
        batch, held, pending = self._queue.popleft()
        # A pool has drawn since the request; its adapter is the one of that time.
        if pending is not None:
            return pending.result(batch.scoring.take), held
        self._adapter.give_for(batch.step)
        return self._engine.generate(replace(batch.request, on_images=batch.scoring.take)), self._adapter.held

    def abandon(self) -> None:
        """Stop the scoring of all batches in the queue."""
        for batch, _, _ in self._queue:
            batch.scoring.abandon()
