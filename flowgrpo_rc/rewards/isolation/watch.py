"""Watches a call of a user's own code: a deadline that ends it, a Ctrl-C that it cannot hide, no exit of the process.

The call stays in the thread that makes it, since reward functions use signals, event loops and CUDA. A daemon thread
waits for the deadline. When it passes, that thread notes what the call is doing and interrupts it: in the main thread
with a signal whose handler raises, so that a blocking system call returns too; in another thread, or where threads
cannot be signalled (Windows), with an exception that Python raises at the next line of Python. A call that has not
come back ``GRACE_S`` later is stuck in compiled code, or keeps swallowing exceptions: then the watching thread writes
the message itself and ends the process. Compiled code that never gives up the interpreter's lock stops that thread
too; after another ``GRACE_S`` Python's fault handler, which needs no lock, prints where every thread is and ends the
process with exit code 1.

Calls may be watched in several threads at a time, and one inside another.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

GRACE_S = 10.0
"""Seconds from the interrupt to the end of the process."""

WAKE = getattr(signal, "SIGURG", None)
"""The signal that interrupts the main thread. Whoever has no handler ignores it, so that a late one does no harm."""

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals whose handlers may raise ``KeyboardInterrupt`` to end a run."""

_exit_process = os._exit
_lock = threading.RLock()
"""Guards what the watches of a process share. A signal's handler may raise inside it, and begin another watch."""
_open: list[Watch] = []
"""The watches that have been entered and not left yet."""
_end_is_arranged = threading.Event()


class DeadlinePassed(KeyboardInterrupt):
    """Raised inside a call at its deadline. No ``except Exception`` stops it, and an event loop passes it on at once,
    which of all exceptions it does only with this kind and ``SystemExit``."""


@dataclass(eq=False)
class Watch:
    """``with Watch(...) as watch: watch.call(...)``, once."""

    timeout_s: float | None
    """Seconds until the deadline; None for no deadline."""
    describe: Callable[[FrameType | None], str]
    """Given the frame in which the call is (None if unknown), the whole message for the user."""
    exit_code: int
    """Of the process where the call cannot be interrupted."""
    wake: Callable[[], None] = lambda: None
    """Has a call that waits in another thread than the main one return to Python, where the interrupt is raised."""
    expired: str | None = None
    """The message, once the call was interrupted at its deadline."""
    stopped: BaseException | None = None
    """What the handler of Ctrl-C, or of another signal that ends a run, raised during the call, even if the call
    swallowed it."""

    def __post_init__(self) -> None:
        self._thread = threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()
        self._process = os.getpid()
        self._calling = False
        self._ended = threading.Event()
        self._previous_handlers: dict[int, Any] = {}
        self._watcher: threading.Thread | None = None
        self._message: str | None = None
        self._last_resort: float | None = None

    def __enter__(self) -> Watch:
        if self._in_main:
            for number in STOPPING:
                if callable(signal.getsignal(number)):  # one of Python, which may raise
                    self._handle(number, self._on_interrupt)
            if WAKE is not None and self.timeout_s is not None:
                self._handle(WAKE, self._on_wake)
        with _lock:
            _open.append(self)
            # No exception handler sees os._exit: the run would end without a word and without its last checkpoint.
            os._exit = _refuse_exit  # type: ignore[assignment]
        return self

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``; the deadline may pass between any two instructions in here, but it raises only once."""
        try:
            self._calling = True
            if self.timeout_s is not None:
                self._watcher = threading.Thread(target=self._wait, args=[self.timeout_s], name="reward deadline")
                self._watcher.daemon = True
                self._watcher.start()
                with _lock:
                    self._last_resort = time.monotonic() + self.timeout_s + 2 * GRACE_S
                    _set_fault_handler()
            return function(*args)
        finally:
            self._calling = False  # nothing is raised from here on

    def __exit__(self, *error: object) -> None:
        self._calling = False
        self._ended.set()
        if os.getpid() != self._process:
            _exit_process(1)  # a fork's child that came back from the call must not train too
        if self._watcher is not None:
            with _lock:
                _set_fault_handler()
            self._watcher.join()
            # The interrupt may have been set just before the call returned.
            if not self._in_main:
                _raise_in(self._thread, None)
        with _lock:
            _open.remove(self)
            if not _open:
                os._exit = _exit_process
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    # ------------------------------------------------------------------ the deadline

    def _wait(self, timeout_s: float) -> None:
        if self._ended.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            return
        # Before the interrupt, after which the call is no longer where it was.
        self._message = self.describe(sys._current_frames().get(self._thread))
        self._interrupt()
        # After the interrupt: before it, a call could be waiting again when that comes.
        self.wake()
        if not self._ended.wait(GRACE_S):
            end_process(self._message, self.exit_code)

    def _interrupt(self) -> None:
        if self._in_main and WAKE is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(self._thread, WAKE)
        elif self._calling:
            self.expired = self._message
            _raise_in(self._thread, DeadlinePassed)

    def _on_wake(self, number: int, frame: FrameType | None) -> None:
        if self._message is not None and self._calling and self.expired is None:
            self.expired = self._message
            raise DeadlinePassed
        previous = self._previous_handlers.get(number)
        if callable(previous):  # the deadline of a call around this one
            previous(number, frame)

    # ------------------------------------------------------------------ Ctrl-C (and its like) and exits

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous_handlers[number](number, frame)
        # Kept, because the call may swallow it: `except BaseException` catches Ctrl-C as well.
        except BaseException as error:
            self.stopped = error
            raise

    @property
    def last_resort(self) -> float | None:
        """When the fault handler is due for it, in seconds of ``time.monotonic``; ``None``: no deadline runs."""
        return self._last_resort if self._calling else None

    @property
    def is_here(self) -> bool:
        """Whether its call goes on in this process and this thread."""
        return self._calling and os.getpid() == self._process and threading.get_ident() == self._thread

    def _handle(self, number: int, handler: Callable[..., None]) -> None:
        previous = signal.getsignal(number)
        if previous is not None:  # None: not installed by Python, which could not put it back
            self._previous_handlers[number] = previous
            signal.signal(number, handler)


def _refuse_exit(status: int) -> None:
    """``os._exit`` of a call itself becomes an exception; that of a child process or another thread is obeyed."""
    if any(watch.is_here for watch in tuple(_open)):
        raise SystemExit(f"os._exit({status})")
    _exit_process(status)


def _set_fault_handler() -> None:
    """Have the fault handler, of which a process has one, come when the first watch is due; the lock is held."""
    # A call of another thread may end between two looks.
    times = [due for watch in _open if (due := watch.last_resort) is not None]
    if not times:
        faulthandler.cancel_dump_traceback_later()
        return
    wait_s = max(min(times) - time.monotonic(), 0.01)
    with suppress(OSError, OverflowError, ValueError, RuntimeError):  # no standard error stream
        faulthandler.dump_traceback_later(min(wait_s, threading.TIMEOUT_MAX / 2), exit=True, file=2)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have ``error`` raised in a thread at its next line of Python; None takes back one that was not raised yet."""
    pending = ctypes.c_void_p(None) if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), pending)


def end_process(message: str, exit_code: int) -> None:
    """Write ``message`` to the standard error stream and end the process, whatever its other threads do."""

    def write() -> None:
        os.write(2, f"error: {message}\n".encode(errors="backslashreplace"))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(2)  # a full pipe, or a lock that the stuck thread holds, must not keep the process
    _exit_process(exit_code)


def end_despite_threads(message: str, exit_code: int) -> None:
    """Have the process end even where a thread that the interrupted call started never does.

    The interpreter waits for such threads at its end. From then on it gets ``GRACE_S``. Once a process will do.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None or _end_is_arranged.is_set():
        return
    _end_is_arranged.set()
    ending = threading.Event()
    threads_have_ended = threading.Event()

    def wait() -> None:
        ending.wait()
        if not threads_have_ended.wait(GRACE_S):
            end_process(f"{message} (a thread that it started still runs)", exit_code)

    try:
        register(ending.set)
        atexit.register(threads_have_ended.set)  # which come when the threads have been waited for
        threading.Thread(target=wait, name="reward exit", daemon=True).start()
    except RuntimeError:  # the interpreter is ending already
        return
