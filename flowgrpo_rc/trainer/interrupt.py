"""Ending a run early without losing it: signals become a request that the loop honours after the step in flight."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SAME_SIGNAL_SECONDS = 2.0
"""Launchers pass on a signal that the terminal has already sent; one that follows this soon is the same one."""


class StopRequest:
    """Inside ``with``, SIGINT and SIGTERM set ``requested``; a second one, later, raises ``KeyboardInterrupt``.

    Args:
        on_request: called at the first signal.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self._on_request = on_request
        self._at: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._at is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._at is None:
            self._at = time.monotonic()
            self._on_request()
        elif time.monotonic() - self._at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
