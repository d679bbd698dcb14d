"""Awaits what asynchronous reward functions return, a whole batch at once, on one event loop for the whole process.

One loop, because such functions keep connections, queues and background tasks from call to call, and those belong to
the loop that they were made on.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import sys
import threading
import warnings
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

_lock = threading.RLock()
_shared_loop: asyncio.AbstractEventLoop | None = None
_in_progress: list[Any] = []
"""The awaitables of the present call, for ``levels``."""


def gather(values: Sequence[Any]) -> list[Any]:
    """The values in order, the awaitables among them awaited side by side; the first that raises ends the others.

    Works in a thread whose own event loop is running too (a notebook): the coroutines then run in another thread.
    """
    awaitables = [value for value in values if inspect.isawaitable(value)]
    if not awaitables:
        return list(values)
    a_loop_runs_here = asyncio._get_running_loop() is not None
    # Reentrant: a coroutine may itself call asynchronous rewards.
    with _lock:
        _in_progress[:] = awaitables
        try:
            results = _run_in_another_thread(awaitables) if a_loop_runs_here else _run(awaitables)
        finally:
            _in_progress.clear()
    left = iter(results)
    return [next(left) if inspect.isawaitable(value) else value for value in values]


def levels() -> list[tuple[FrameType, int]]:
    """Where the first unfinished coroutine of the present call waits: frames and their lines, innermost first."""
    for awaitable in list(_in_progress):
        chain = []
        inner = awaitable
        while inner is not None:
            frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
            if frame is not None:
                chain.append((frame, frame.f_lineno))
            inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        if chain:
            return chain[::-1]
    return []


def wake() -> None:
    """Have the loop return to Python, so that an exception set on its thread is raised."""
    if _shared_loop is not None and _shared_loop.is_running():
        _shared_loop.call_soon_threadsafe(lambda: None)


def close_unawaited(values: Sequence[Any]) -> None:
    """Close the coroutines that nothing has begun, which would otherwise say so at a random later moment."""
    for value in values:
        if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
            value.close()


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    loop = _free_loop()
    tasks = [asyncio.ensure_future(awaitable, loop=loop) for awaitable in awaitables]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*tasks)

    together = loop.create_task(all_of_them())
    try:
        # Interrupts, exits and the deadline leave from here at once: asyncio passes `KeyboardInterrupt` and
        # `SystemExit` on without beginning another coroutine, which might block and need an interrupt of its own.
        return loop.run_until_complete(together)
    finally:
        # Whatever is left ends when the loop runs next, or with the process.
        for task in (*tasks, together):
            task.cancel()


def _run_in_another_thread(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    outcome: Future[list[Any]] = Future()

    def work() -> None:
        try:
            outcome.set_result(_run(awaitables))
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon, so that a coroutine which never ends does not keep the process from ending.
    threading.Thread(target=work, name="reward coroutines", daemon=True).start()
    return outcome.result()


def _free_loop() -> asyncio.AbstractEventLoop:
    """The shared loop, or a new one where that is running, as inside a coroutine that itself calls rewards."""
    global _shared_loop
    if _shared_loop is not None and _shared_loop.is_running():
        return asyncio.new_event_loop()
    if _shared_loop is None or _shared_loop.is_closed():
        _shared_loop = asyncio.new_event_loop()
        _shared_loop.set_exception_handler(_warn_of_background_failure)
        atexit.register(_close, _shared_loop)
    return _shared_loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """End background tasks with the process; one that is still on the loop afterwards would print a traceback."""
    if loop.is_closed() or loop.is_running():
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=1))
    loop.close()


def _warn_of_background_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """One line for a background task that died; none for tasks that an interrupt or an ending process leaves."""
    error = context.get("exception")
    if error is None or isinstance(error, (KeyboardInterrupt, SystemExit)) or sys.is_finalizing():
        return
    warnings.warn(f"a background task of a reward ended with {type(error).__name__}: {error}", stacklevel=2)
