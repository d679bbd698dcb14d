"""Scores of a batch of images, which may come in parts and may be scored in the background.

Functions that declare ``streams = True`` are called once for every part, with the same images whether or not anything
is drawn meanwhile; all others once, with all images. Scores and the functions' reports therefore do not depend on when
the parts come, nor on the thread that scores them.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo_rc.rewards.answer import Scores, check_parts, joined

if TYPE_CHECKING:
    from flowgrpo_rc.rewards.mix import RewardMix, RewardResult

NOW = 0
"""Urgency of calls that the trainer waits for."""
AHEAD = 1
"""Urgency of calls for batches to come."""
THREAD_NAME = "reward scoring"


class CallQueue:
    """Makes one call at a time in a thread of its own: by urgency, then in the order of ``submit``.

    The thread exists only while there are calls. It computes with as many threads, and on the same GPU, as the thread
    that made the queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._order = itertools.count()
        self._works = False
        torch = sys.modules.get("torch")
        self._threads = None if torch is None else torch.get_num_threads()
        # Torch starts every thread on the first GPU, whatever the GPU of this process is.
        self._device = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

    def submit(self, urgency: int, call: Callable[[], Any]) -> Future[Any]:
        """Make ``call`` after those that are more urgent; returns at once."""
        future: Future[Any] = Future()
        with self._lock:
            # The order decides between equal urgencies; futures cannot be compared.
            heapq.heappush(self._waiting, (urgency, next(self._order), future, call))
            if not self._works:
                self._works = True
                # A daemon, unlike the threads of an executor: a run that fails must not wait for a slow score.
                threading.Thread(target=self._work, name=THREAD_NAME, daemon=True).start()
        return future

    def _work(self) -> None:
        if self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)
        if self._device is not None:
            sys.modules["torch"].cuda.set_device(self._device)
        while True:
            with self._lock:
                if not self._waiting:
                    # Under the lock, so that no call is added to a queue whose thread is about to end.
                    self._works = False
                    return
                *_, future, call = heapq.heappop(self._waiting)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised in the thread that waits for the result
                    future.set_exception(error)
            # The last images would otherwise stay in memory until the next call.
            del future, call


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
