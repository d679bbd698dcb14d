"""Ending a run early without losing it: signals become a request that the loop honours after the step in flight."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from flowgrpo_rc.trainer import console

SAME_SIGNAL_SECONDS = 2.0
"""Launchers pass on a signal that the terminal has already sent; one that follows this soon is the same one."""
HANGUP = getattr(signal, "SIGHUP", None)
"""Sent when the terminal closes; there is none on Windows."""
STOPPING = tuple(n for n in (signal.SIGINT, signal.SIGTERM, HANGUP) if n is not None)
"""Signals that end a run."""
INTERRUPTED = 130
"""Exit code of a process that one of them ended."""


class StopRequest:
    """Inside ``with``, SIGINT, SIGTERM and SIGHUP set ``requested``; a second SIGINT or SIGTERM, later, raises
    ``KeyboardInterrupt``. A SIGHUP that is ignored (``nohup``) stays ignored.

    Args:
        on_request: called at the first signal, inside the handler: it must not wait, nor write to a buffered stream
            (``console.write_at_once`` does neither).
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
        self._previous = _install(self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        _restore(self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._at is None:
            self._at = time.monotonic()
            console.hurry()
            with suppress(Exception):  # nothing may be raised into whatever the signal interrupted
                self._on_request()
        elif number != HANGUP and time.monotonic() - self._at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise ``KeyboardInterrupt`` once; a later one ends the process where it is,
    with exit code 130. For what comes before and after the loop, where there is nothing to save."""
    at: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not at:
            at.append(time.monotonic())
            console.hurry()
            raise KeyboardInterrupt
        if time.monotonic() - at[0] > SAME_SIGNAL_SECONDS:
            os._exit(INTERRUPTED)

    previous = _install(handle)
    try:
        yield
    finally:
        _restore(previous)


def _install(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Handlers may be set in the main thread alone; returns what there was."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    previous: dict[int, Any] = {int(number): signal.getsignal(number) for number in STOPPING}
    if HANGUP is not None and previous[HANGUP] is signal.SIG_IGN:
        del previous[HANGUP]
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handler(number, frame)
        else:
            _in_child(number)

    for number in previous:
        signal.signal(number, handle)
    return previous


def _in_child(number: int) -> None:
    """In a process that a reward has forked: SIGTERM ends it (``multiprocessing.Pool`` waits for that); what the
    terminal sends to all processes is for the run to answer, which still wants the child's work."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _restore(previous: dict[int, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
