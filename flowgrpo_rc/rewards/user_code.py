"""Calls of a user's own code: its faults with file and line, a deadline, and torch's settings as before.

Reward functions run in the trainer's process, since they use its GPU. ``UserCode.run`` makes one call; ``gather``
awaits the coroutines that asynchronous functions return.
"""

import asyncio
import atexit
import faulthandler
import inspect
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rewards.answer import RewardError, shortened

GRACE_S = 10.0
"""Seconds from the interrupt of a call to the end of the process, for calls that do not come back."""


class Overrun(KeyboardInterrupt):
    """A call passed its deadline.

    No ``except Exception`` of the user's code swallows this kind, and an event loop passes it on at once instead of
    going on with its next task.
    """

    levels: Sequence[tuple[FrameType, int]] = ()
    """Frames and lines of the interrupted code, where its traceback does not have them: a suspended coroutine is on no
    thread's stack, and a call may swallow the interrupt. Innermost first."""


@dataclass
class UserCode:
    """One piece of a user's own code, and how its faults are reported."""

    what: str
    """The beginning of every message: ``reward function 'x'``."""
    file: str | None = None
    """The user's file; messages point at its lines."""
    timeout_s: float | None = None
    """The longest time in seconds that a call may take; None for no limit."""
    error: type[Exception] = RewardError
    """The exception that reports the code's faults."""

    def run(self, function: Callable[..., Any], *args: Any, passing: type[Exception] | tuple[()] = ()) -> Any:
        """``function(*args)``, with the working folder and torch's gradient mode, default dtype and default device
        restored afterwards.

        Working folder and default dtype, which all threads share, are restored in the main thread alone.

        Args:
            passing: an exception of our own checks, which is raised unchanged.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
            Exception: of the class ``error``, for any other exception and for ``SystemExit``, which would end the
                command with exit code 0; and where the call passed its deadline.
        """
        try:
            with _deadline(self.timeout_s), _working_folder_restored(), _torch_settings_restored():
                return function(*args)
        except passing:
            raise
        except Overrun as overrun:
            place, line = self._place(overrun.levels or _levels(overrun))
            raise self.error(
                f"{self.what} did not return within reward.timeout_s={self.timeout_s:g} s; it was{place} ({line}). "
                "Mend it, or for a slow one raise reward.timeout_s (null for no limit)"
            ) from None
        except KeyboardInterrupt:
            raise
        # SystemExit, CancelledError and the like are no Exceptions.
        except BaseException as error:
            raise self.error(f"{self.what} raised {self._described(error)}{_remedy(error)}") from error

    def _described(self, error: BaseException) -> str:
        """``KeyError: 'gone' at /home/me/mine.py:12, in compute_score``: type, text and place of an exception."""
        name = type(error).__name__
        text = one_line(error)
        described = name if text == name else f"{name}: {shortened(text)}"
        # The traceback of a syntax error ends in the import, not in the line.
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            return f"{described} at {error.filename}:{error.lineno}"
        # The outermost level is this package's call itself.
        levels = _levels(error)[:-1]
        return described + (self._place(levels)[0] if levels else "")

    def _place(self, levels: Sequence[tuple[FrameType, int]]) -> tuple[str, str]:
        """`` at FILE:LINE, in FUNCTION`` and that line: the innermost level in the user's file, or else of all."""
        # A fault inside a library is the user's to find from the line that calls it.
        frame, number = next((level for level in levels if level[0].f_code.co_filename == self.file), levels[0])
        path = frame.f_code.co_filename
        return f" at {path}:{number}, in {frame.f_code.co_name}", linecache.getline(path, number).strip()


def _levels(error: BaseException) -> list[tuple[FrameType, int]]:
    """Frames and lines of its traceback, innermost first."""
    return [*walk_tb(error.__traceback__)][::-1]


def _remedy(error: BaseException) -> str:
    """A remedy for exceptions whose text does not show the cause."""
    if isinstance(error, SystemExit):
        return (
            "; remove the call that ends the program, and put what only a script should do under "
            "if __name__ == '__main__'"
        )
    # numpy's words for an assignment and for ``out=``.
    if "read-only" in str(error):
        return "; images are handed over read-only: work on a copy, images.copy()"
    return ""


_lock = threading.Lock()
_due: dict[object, float] = {}
"""The end of each call that goes on, in seconds of ``time.monotonic``. Python's fault handler, one for the process,
waits for the first."""


@contextmanager
def _deadline(timeout_s: float | None) -> Iterator[None]:
    """Interrupt the main thread with ``Overrun`` at the deadline; end the process where that is not possible.

    Only the main thread can be interrupted, and only where it runs Python or waits in a system call. Otherwise the
    fault handler prints the stack of every thread and ends the process with exit code 1. It needs no lock of the
    interpreter, so it also ends calls that are stuck in compiled code.
    """
    if timeout_s is None:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    call = object()
    # Behind the interrupt, for calls that swallow it; at once where there can be none.
    _set_fault_handler(call, timeout_s + GRACE_S if in_main else timeout_s)
    try:
        with _interrupt_after(timeout_s) if in_main else nullcontext():
            yield
    finally:
        _set_fault_handler(call, None)


@contextmanager
def _interrupt_after(seconds: float) -> Iterator[None]:
    """Raise ``Overrun`` in the main thread, which runs this, after so many seconds; and at the end of a call that has
    swallowed it, for its result was made up."""
    calling = True
    interrupted: list[tuple[FrameType, int]] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if calling:
            interrupted[:] = walk_stack(frame)
            raise Overrun

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            # The timer may run out between any two lines, also of what follows; it must not interrupt that.
            calling = False
        if interrupted:
            overrun = Overrun()
            overrun.levels = interrupted
            raise overrun
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


def _set_fault_handler(call: object, seconds: float | None) -> None:
    """Add a call's end, or remove it with ``None``, and arm the fault handler for the first of all ends."""
    with _lock:
        if seconds is None:
            _due.pop(call, None)
        else:
            _due[call] = time.monotonic() + seconds
        if not _due:
            faulthandler.cancel_dump_traceback_later()
            return
        wait_s = max(min(_due.values()) - time.monotonic(), 0.01)
        with suppress(OSError, ValueError):  # no standard error stream
            faulthandler.dump_traceback_later(wait_s, exit=True, file=2)


@contextmanager
def _working_folder_restored() -> Iterator[None]:
    """Restore the working folder: the run's own paths may be relative to it."""
    folder = None
    with suppress(FileNotFoundError):  # it has been removed
        folder = os.getcwd()
    try:
        yield
    finally:
        # A background thread would undo the change of another thread's function.
        if folder is not None and threading.current_thread() is threading.main_thread():
            os.chdir(folder)


@contextmanager
def _torch_settings_restored() -> Iterator[None]:
    """Restore gradient mode, default dtype and default device; training would go on with the function's."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    gradients = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        yield
    finally:
        # A background thread would undo the change of another thread's function, in the midst of its call.
        if threading.current_thread() is threading.main_thread():
            torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        if torch.get_default_device() != device:
            # None for the CPU: with any default device, the CPU too, torch intercepts every factory function.
            torch.set_default_device(None if device.type == "cpu" else device)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: clients and queues that a function keeps are bound to the loop that made them."""
    loop = asyncio.new_event_loop()

    def end() -> None:
        # Tasks that outlive a call, such as the worker of a queue.
        left = [task for task in asyncio.all_tasks(loop) if task.cancel()]
        if left and not loop.is_running():
            loop.run_until_complete(asyncio.wait(left, timeout=1))

    atexit.register(end)
    return loop


def gather(values: Sequence[Any]) -> list[Any]:
    """The values in order, with awaitables awaited concurrently; the first that raises cancels the others."""
    awaitables = [value for value in values if inspect.isawaitable(value)]
    if not awaitables:
        return list(values)
    if asyncio._get_running_loop() is None:
        results = _run(awaitables)
    else:
        # A notebook's own loop runs in this thread, and a thread can run only one.
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(_run, awaitables).result()
    left = iter(results)
    return [next(left) if inspect.isawaitable(value) else value for value in values]


def _run(awaitables: Sequence[Any]) -> list[Any]:
    loop = _event_loop()
    if loop.is_running():  # in another thread, whose coroutine calls rewards itself
        loop = asyncio.new_event_loop()
    tasks = [asyncio.ensure_future(awaitable, loop=loop) for awaitable in awaitables]
    together = asyncio.gather(*tasks)
    try:
        return loop.run_until_complete(together)
    except Overrun as overrun:
        waiting = next((task.get_stack() for task in tasks if not task.done()), [])
        overrun.levels = [*_levels(overrun), *((frame, frame.f_lineno) for frame in waiting)]
        raise
    finally:
        # Tasks that are left would go on in the next call.
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, together, return_exceptions=True))
