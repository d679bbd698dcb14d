"""Ending a run early without losing it: signals become a request that the loop honours after the step in flight."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SAME_SIGNAL_SECONDS = 2.0
"""Launchers pass on a signal that the terminal has already sent; one that follows this soon is the same one."""
HANGUP = getattr(signal, "SIGHUP", None)
"""Sent when the terminal closes; there is none on Windows."""
STOPPING = tuple(n for n in (signal.SIGINT, signal.SIGTERM, HANGUP) if n is not None)
"""Signals that end a run."""
INTERRUPTED = 130
"""Exit code of a process that one of them ended."""


@contextmanager
def stop_request(on_request: Callable[[], None]) -> Iterator[threading.Event]:
    """Inside, SIGINT, SIGTERM and SIGHUP set the event that is given: this process was asked to stop. A second SIGINT
    or SIGTERM, later, raises ``KeyboardInterrupt``. A SIGHUP that is ignored (``nohup``) stays ignored.

    Args:
        on_request: called at the first signal, inside the handler: it must not wait, nor write to a buffered stream
            (``os.write`` does neither).
    """
    requested = threading.Event()

    def first() -> None:
        requested.set()
        with suppress(Exception):  # nothing may be raised into whatever the signal interrupted
            on_request()

    def again(number: int) -> None:
        # A terminal that closes may send several hangups; nobody grew impatient.
        if number != HANGUP:
            raise KeyboardInterrupt

    with _handling(first, again):
        yield requested


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise ``KeyboardInterrupt`` once; a later one ends the process where it is,
    with exit code 130. For what comes before and after the loop, where there is nothing to save."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, lambda _number: os._exit(INTERRUPTED)):
        yield


@contextmanager
def _handling(first: Callable[[], None], again: Callable[[int], None]) -> Iterator[None]:
    """Inside, the first of the signals ``STOPPING`` calls ``first``, and those that are not an echo of it ``again``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets handlers in the main thread alone
        return
    owner = os.getpid()
    first_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if os.getpid() != owner:
            _answer_in_child(number)
        elif first_at is None:
            first_at = time.monotonic()
            first()
        elif time.monotonic() - first_at > SAME_SIGNAL_SECONDS:
            again(number)

    previous = {number: signal.getsignal(number) for number in STOPPING}
    if HANGUP is not None and previous[HANGUP] is signal.SIG_IGN:
        del previous[HANGUP]
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _answer_in_child(number: int) -> None:
    """In a process that a reward has forked: SIGTERM ends it (``multiprocessing.Pool`` waits for that); what the
    terminal sends to all processes is for the run to answer, which still wants the child's work."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
