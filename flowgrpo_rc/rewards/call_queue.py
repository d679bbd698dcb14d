"""Calls in a background thread, the most urgent first."""

import heapq
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

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
