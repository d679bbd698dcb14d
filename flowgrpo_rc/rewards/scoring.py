"""Scores of a batch of images, which may come in parts and may be scored in the background.

Functions that declare ``streams = True`` are called once for every part, with the same images whether or not anything
is drawn meanwhile; all others once, with all images. Scores and the functions' reports therefore do not depend on when
the parts come, nor on the thread that scores them.
"""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import Scores, check_parts, joined
from flowgrpo_rc.rewards.call_queue import NOW, CallQueue
from flowgrpo_rc.rewards.mix import RewardMix, RewardResult


class PartialScoring:
    """The rewards of one batch.

    Args:
        mix: the reward functions.
        prompts, metadata: of all images of the batch.
        part: images of a part; the last one may be smaller.
    """

    def __init__(self, mix: RewardMix, prompts: Sequence[str], metadata: Sequence[dict[str, Any]], part: int) -> None:
        self._mix = mix
        self._prompts = list(prompts)
        self._metadata = list(metadata)
        self._part = part
        self._queue = CallQueue()
        self._parts: dict[str, list[Future[Scores]]] = {name: [] for name in mix.streaming}
        self._count = dict.fromkeys(mix.streaming, 0)
        self._seconds: list[float] = []
        self._abandoned = False

    @property
    def seconds(self) -> float:
        """Time spent in reward functions so far, in all threads."""
        return sum(self._seconds)

    def score_ahead(self, images: np.ndarray, names: Collection[str] | None = None, *, urgency: int = NOW) -> None:
        """Have the next images scored in the background; returns at once, from any thread.

        Args:
            images: the part that follows those of earlier calls with these names.
            names: of functions that stream; by default all of them.
            urgency: ``AHEAD`` for a batch that the trainer comes to later.
        """
        # Engines may deliver more after the run has failed.
        if self._abandoned:
            return
        for name in self._parts if names is None else names:
            self._submit(name, images, self._mix.queues.get(name, self._queue), urgency)

    def raise_failure(self) -> None:
        """Raise the ``RewardError`` of a part that has failed already."""
        for futures in self._parts.values():
            for future in futures:
                if future.done() and not future.cancelled():
                    future.result()

    def result(self, images: np.ndarray) -> RewardResult:
        """The rewards of all ``images``; waits for those in the background, and scores the others by parts.

        Raises:
            RewardError: see ``RewardMix``. Nothing more is scored then.
        """
        try:
            # Part by part as in the background: functions that share a random generator draw in the same order.
            while lacking := [name for name in self._parts if self._count[name] < len(images)]:
                for name in lacking:
                    start = self._count[name]
                    # A function with a queue may be in the midst of a later batch.
                    self._submit(name, images[start : start + self._part], self._mix.queues.get(name), NOW)
            scored = {}
            # The background first: a function of this thread must not run beside one of the other.
            for name, futures in self._parts.items():
                # The first error is raised; those of later parts follow from it more often than not.
                parts = [future.result() for future in futures]
                check_parts(name, parts)
                scored[name] = joined(parts)
            for name in self._mix.functions:
                if name not in scored:
                    scored[name] = self._score(name, images, slice(None))
        except BaseException:
            self.abandon()
            raise
        return self._mix.combine({name: scored[name] for name in self._mix.functions}, self._prompts)

    def abandon(self) -> None:
        """Score nothing more; a call in progress is left to itself."""
        self._abandoned = True
        for futures in self._parts.values():
            for future in futures:
                future.cancel()

    def _submit(self, name: str, images: np.ndarray, queue: CallQueue | None, urgency: int) -> None:
        """Score the next images of a function: in the queue, or in this thread."""
        rows = slice(self._count[name], self._count[name] + len(images))
        self._count[name] = rows.stop
        work = partial(self._score, name, images, rows)
        future: Future[Scores] = Future() if queue is None else queue.submit(urgency, work)
        self._parts[name].append(future)
        # In this thread an error is raised at once, before the next function is called.
        if queue is None:
            future.set_result(work())

    def _score(self, name: str, images: np.ndarray, rows: slice) -> Scores:
        begin = time.perf_counter()
        found = self._mix.score(name, images, self._prompts[rows], self._metadata[rows])
        # A list, since threads append to it without a lock.
        self._seconds.append(time.perf_counter() - begin)
        return found
