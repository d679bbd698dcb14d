"""Signals that end a run: the loop finishes its step and saves a checkpoint, instead of stopping in the middle."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SAME_SIGNAL_SECONDS = 2.0
"""Launchers forward a signal that the terminal has already sent; one that follows this soon is the same one."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""
INTERRUPTED = 130
"""Exit code of a process that one of them ended."""


@contextmanager
def stop_request(on_request: Callable[[], None]) -> Iterator[threading.Event]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP sets the yielded event and calls ``on_request``, in the signal's
    handler. A later SIGINT or SIGTERM raises ``KeyboardInterrupt``. A SIGHUP that is ignored (``nohup``) stays
    ignored."""
    requested = threading.Event()

    def first() -> None:
        requested.set()
        on_request()

    def again(number: int) -> None:
        # A terminal that closes may send several hangups; only the other signals come from an impatient user.
        if number != signal.SIGHUP:
            raise KeyboardInterrupt

    with _handling(first, again):
        yield requested


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Inside, the first of the signals raises ``KeyboardInterrupt``, a later one ends the process with exit code 130.
    For the time before and after the loop, in which there is nothing to save."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, lambda _number: os._exit(INTERRUPTED)):
        yield


@contextmanager
def _handling(first: Callable[[], None], again: Callable[[int], None]) -> Iterator[None]:
    """Inside, the first of the signals ``STOPPING`` calls ``first``, and later ones ``again``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers in the main thread only
        return
    owner = os.getpid()
    first_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if os.getpid() != owner:
            # A child that a reward has forked. ``multiprocessing.Pool`` ends its workers by SIGTERM; signals of the
            # terminal are for the run to answer, which still needs the child's work.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif first_at is None:
            first_at = time.monotonic()
            first()
        elif time.monotonic() - first_at > SAME_SIGNAL_SECONDS:
            again(number)

    previous = {number: signal.getsignal(number) for number in STOPPING}
    if previous[signal.SIGHUP] is signal.SIG_IGN:
        del previous[signal.SIGHUP]
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
