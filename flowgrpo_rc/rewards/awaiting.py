"""Runs coroutines of reward functions, all at once, on one event loop that lives as long as the process.

One loop, because asynchronous rewards keep connections, queues and background tasks from call to call, and those
belong to the loop that they were made on.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import sys
import threading
import warnings
from collections.abc import Awaitable, Sequence
from types import FrameType
from typing import Any

_lock = threading.RLock()
_loop: asyncio.AbstractEventLoop | None = None
_running: list[Any] = []
"""The awaitables of the call in progress, for `frames`."""


def gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all, in order, awaited side by side; the first that raises ends the others.

    Works in a thread whose own event loop is running too (a notebook): the coroutines then run in another one.
    """
    with _lock:
        _running[:] = awaitables
        try:
            return _run(awaitables) if _has_no_loop() else _run_elsewhere(awaitables)
        finally:
            _running.clear()


def frames() -> list[FrameType]:
    """Where the first unfinished coroutine of the call in progress waits, outermost frame first."""
    for awaitable in list(_running):
        chain = []
        inner = awaitable
        while inner is not None:
            frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
            if frame is not None:
                chain.append(frame)
            inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        if chain:
            return chain
    return []


def wake() -> None:
    """Have the loop return to Python, so that an exception set on its thread is raised."""
    if _loop is not None and _loop.is_running():
        _loop.call_soon_threadsafe(lambda: None)


def _has_no_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


class _Leave(KeyboardInterrupt):
    """Ends the loop at once: of the exceptions of a task, asyncio passes on only this kind and `SystemExit`."""


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    loop = _the_loop()
    endings: list[BaseException] = []
    tasks = [loop.create_task(_settle(awaitable, endings)) for awaitable in awaitables]
    all_of_them = loop.create_task(_all(tasks))
    try:
        outcomes = loop.run_until_complete(all_of_them)
    except _Leave:
        raise endings[0] from None
    finally:
        for task in (*tasks, all_of_them):
            task.cancel()
        for awaitable in awaitables:
            if inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
                awaitable.close()
    failed = next((error for _, error in outcomes if error is not None), None)
    if failed is not None:
        raise failed
    return [value for value, _ in outcomes]


def _run_elsewhere(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((_run(awaitables), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="reward coroutines", daemon=True)
    thread.start()
    thread.join()
    values, error = outcome[0]
    if error is not None:
        raise error
    return values


async def _all(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """The outcomes of all, or up to the first failure, with it first."""
    pending: set[asyncio.Task[Any]] = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        failed = [task.result() for task in done if task.result()[1] is not None]
        if failed:
            return failed
    return [task.result() for task in tasks]


async def _settle(awaitable: Awaitable[Any], endings: list[BaseException]) -> tuple[Any, BaseException | None]:
    """Its result or what it raised. An interrupt or an exit goes into `endings` and leaves the loop.

    The other coroutines are then not begun, or one that blocks would need an interrupt of its own.
    """
    try:
        return await awaitable, None
    except (Exception, asyncio.CancelledError, GeneratorExit) as error:
        return None, error
    except BaseException as error:
        endings.append(error)
        raise _Leave from None


def _the_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is not None and _loop.is_running():
        return asyncio.new_event_loop()  # a coroutine that itself calls rewards
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
        _loop.set_exception_handler(_say_background_failure)
        atexit.register(_close, _loop)
    return _loop


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


def _say_background_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """One line for a background task that died; none for tasks that an ending process leaves."""
    error = context.get("exception")
    if error is not None and not isinstance(error, _Leave) and not sys.is_finalizing():
        warnings.warn(f"a background task of a reward ended with {type(error).__name__}: {error}", stacklevel=2)


def is_awaitable(value: Any) -> bool:
    """Whether `value` has to be awaited."""
    return inspect.isawaitable(value)
