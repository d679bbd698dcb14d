"""Who calls a reward function when, where images of batches to come are scored while the trainer learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RewardTurns:
    """One thread at a time calls a reward function. What the trainer waits for goes before what it will want later.

    The two threads are that of the trainer, which scores a validation, and the one that scores images of batches to
    come. With a plain lock the second could go on and on: a lock does not heed who has waited longest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calling = False
        self._wanted = 0
        """How many threads wait for ``now``."""

    @contextmanager
    def now(self) -> Iterator[None]:
        """For a call that the trainer waits for: it comes as soon as the one that goes on has ended."""
        with self._changed:
            self._wanted += 1
            try:
                self._changed.wait_for(lambda: not self._calling)
            finally:  # also where the wait was interrupted
                self._wanted -= 1
                self._changed.notify_all()
            self._calling = True
        with self._turn():
            yield

    @contextmanager
    def later(self) -> Iterator[None]:
        """For a call whose answer is not wanted yet: it comes when nobody waits for ``now``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._calling and not self._wanted)
            self._calling = True
        with self._turn():
            yield

    @contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._calling = False
                self._changed.notify_all()
