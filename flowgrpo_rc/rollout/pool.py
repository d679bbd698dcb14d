"""Several rollout engines as one: chunks of a request go to whichever engine is free.

A chunk has ``micro_batch_size`` rows, as one forward of an engine in the trainer's process has, and each row draws its
random numbers from its own seed. So the images do not depend, to the last bit, on which engine draws a chunk, in which
order, or how often a chunk is drawn again after a loss.
"""

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import (
    EngineLostError,
    RolloutError,
    RolloutHandle,
    RolloutRequest,
    RolloutSyncError,
    Trajectories,
    check_has_adapter,
    joined,
    rows_of,
)
from flowgrpo_rc.rollout.proof import HeldAdapter, check_adapter
from flowgrpo_rc.rollout.sampling import micro_batches
from flowgrpo_rc.transfers import to_host

LOSSES_OF_A_CHUNK = 3
"""Engines lost in a row over one chunk, after which its rows count as the cause."""
LOSSES_OF_A_HANDLE = 2
"""Losses of one engine in a row, without a chunk drawn in between, after which it is not started again."""
T = TypeVar("T")
OnImages = Callable[[Tensor, Tensor], object]
"""Called with the rows of some images, and the images."""


@dataclass(frozen=True)
class Work:
    """One thing that an engine did."""

    engine: str
    """Name of the handle."""
    what: str
    """``draw``, ``sync`` or ``start``; ``lost`` if the engine was lost meanwhile."""
    begin: float
    """Seconds of ``time.perf_counter``."""
    end: float
    """Likewise; for work in progress, the time of the question."""
    rows: int = 0
    """Number of images drawn."""
    version: int = -1
    """Version of the adapter."""


@dataclass(frozen=True)
class EngineWork:
    """The recent work of one engine."""

    engine: str
    """Name of the handle."""
    done: list[Work]
    """Work finished since the last account, in order."""
    doing: Work | None
    """Work in progress."""
    given_up: bool
    """True if the engine is not used any more."""


@dataclass(frozen=True, eq=False)
class _Adapter:
    """An adapter as engines are given it: on the host, in their dtype."""

    held: HeldAdapter
    state: Mapping[str, Tensor]


@dataclass(eq=False)
class _Chunk:
    """Rows of a request that one engine draws in one call."""

    # Position among the chunks of the request.
    number: int
    # For these rows only.
    request: RolloutRequest
    adapter: _Adapter
    rollout: "PendingRollout"
    # Engines that were lost while they drew it.
    losses: int = 0
    # In seconds of time.perf_counter.
    last_loss: float = -math.inf


@dataclass(eq=False)
class _Member:
    """A handle and its state in the pool."""

    handle: RolloutHandle
    holds: _Adapter | None = None
    started: bool = False
    # In a row, without a chunk drawn in between.
    losses: int = 0
    # Reason why it is not used any more.
    given_up: str | None = None
    # In seconds of time.perf_counter.
    last_answer: float = -math.inf
    doing: Work | None = None
    done: list[Work] = field(default_factory=list)


class PendingRollout:
    """A request that engines are drawing."""

    def __init__(
        self, pool: "RolloutPool", request: RolloutRequest, rows: Sequence[Tensor], on_arrival: OnImages | None
    ) -> None:
        self._pool = pool
        self._request = request
        self._rows = rows
        self._on_arrival = on_arrival
        # Number of chunks, from the first on, that were passed to on_arrival.
        self._arrived = 0
        self._parts: list[Trajectories | None] = [None] * len(rows)

    def result(self, on_images: OnImages | None = None) -> Trajectories:
        """Wait for the answer.

        Args:
            on_images: as ``RolloutRequest.on_images``; called in this thread, chunk by chunk, as they arrive.

        Raises:
            RolloutError: an engine answered with an error, or none is left.
            RolloutSyncError: an engine drew with another adapter, or answered another request.
        """
        parts: list[Trajectories] = []
        for number, rows in enumerate(self._rows):
            part = self._pool.wait_for(partial(self._parts.__getitem__, number))
            parts.append(part)
            if on_images is not None:
                on_images(rows, part.images)
        return joined(self._request, parts)

    def deliver(self, chunk: _Chunk, part: Trajectories) -> None:
        """Take a chunk's answer; the caller holds the pool's lock."""
        self._parts[chunk.number] = part
        if self._on_arrival is None:
            return
        for arrived in self._parts[self._arrived :]:
            if arrived is None:
                break
            self._on_arrival(self._rows[self._arrived], arrived.images)
            self._arrived += 1


class RolloutPool:
    """A ``RolloutEngine`` made of engines elsewhere, which can also draw ahead of time.

    A thread for each handle starts its engine and draws chunk after chunk, so that a slow engine gets fewer chunks.
    Before a chunk it gives the engine the chunk's adapter if the engine holds another one; without a chunk, it gives
    the adapter that was pushed last.

    If an engine is lost, the next free engine draws its chunk, and the lost one is started again. An engine that is
    lost ``LOSSES_OF_A_HANDLE`` times in a row, or does not start again, is given up. The rollout fails if no engine is
    left, or if one chunk has cost ``LOSSES_OF_A_CHUNK`` engines.

    Args:
        handles: at least one; the pool starts and closes them.
        digest_of: the digest of an adapter with exactly this state, after the engines' rounding.
        dtype: of the engines' adapters, in which they are sent.
        micro_batch_size: rows of a chunk.

    Raises:
        RolloutError: an engine did not start; all are closed then.
    """

    def __init__(
        self,
        handles: Sequence[RolloutHandle],
        *,
        digest_of: Callable[[Mapping[str, Tensor]], str],
        dtype: torch.dtype,
        micro_batch_size: int,
    ) -> None:
        self._digest_of = digest_of
        self.adapter_version = -1
        self._dtype = dtype
        self._chunk_size = micro_batch_size
        # Guards everything below, and is notified of every change of it.
        self._changed = threading.Condition()
        self._chunks: deque[_Chunk] = deque()
        # The adapter of requests that are submitted from now on.
        self._current: _Adapter | None = None
        # Reason why no chunk can be drawn any more.
        self._failure: Exception | None = None
        # Warnings for the thread that waits: a warning in an engine's thread might be lost, or end the thread.
        self._notices: list[str] = []
        self._closed = False
        self._members = [_Member(handle) for handle in handles]
        # Threads suffice: they wait for other processes. As daemons they never keep a trainer alive.
        self._threads = [
            threading.Thread(target=self._serve, args=(member,), name=f"rollout {member.handle.name}", daemon=True)
            for member in self._members
        ]
        for thread in self._threads:
            thread.start()
        try:
            self.wait_for(lambda: all(member.started or member.given_up for member in self._members) or None)
            for member in self._members:
                if member.given_up:
                    raise RolloutError(f"rollout engine {member.handle.name} does not start: {member.given_up}")
        except BaseException:
            self.close()
            raise

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of an adapter with exactly this state, after the engines' rounding."""
        return self._digest_of(state)

    def push(self, state: Mapping[str, Tensor], version: int) -> HeldAdapter:
        """Set the adapter of all requests from now on, without waiting for the engines. Returns the adapter that they
        must hold. Each engine's digest is read back and checked."""
        # From the actor's tensors, before anything is sent, so that a change on the way is found.
        held = HeldAdapter(version, self.digest_of(state))
        # Copies: the actor changes its tensors while they are sent, and pickling a view would send all of its storage.
        sent = to_host({name: tensor.detach().to(self._dtype) for name, tensor in state.items()})
        copies = {name: tensor.clone().contiguous() for name, tensor in sent.items()}
        with self._changed:
            self._raise_failure()
            self._current = _Adapter(held, copies)
            self.adapter_version = version
            self._changed.notify_all()
        return held

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """``push``, and wait until every engine holds the adapter; requests in flight are drawn first.

        Raises:
            AdapterMismatchError: a tensor does not bind.
            RolloutError: no engine is left.
            RolloutSyncError: an engine does not hold the adapter that it was given.
        """
        held = self.push(state, version)
        pushed = self._current
        self.wait_for(lambda: all(m.holds is pushed or m.given_up for m in self._members) or None)
        return held.digest

    def submit(self, request: RolloutRequest, on_arrival: OnImages | None = None) -> PendingRollout:
        """Queue a request behind earlier ones, for the adapter that was pushed last.

        Args:
            request: the images to draw.
            on_arrival: called with rows and images of each chunk, in order, as soon as it has arrived, also if nobody
                waits for the answer. An engine's thread calls it, so it must return at once.
        """
        check_has_adapter(self.adapter_version)
        assert self._current is not None
        # As an engine beside the actor splits a request, so that forwards have the same shapes.
        rows = micro_batches(request, self._chunk_size)
        pending = PendingRollout(self, request, rows, on_arrival)
        chunks = [_Chunk(i, rows_of(request, part), self._current, pending) for i, part in enumerate(rows)]
        with self._changed:
            self._raise_failure()
            self._chunks.extend(chunks)
            self._changed.notify_all()
        return pending

    def generate(self, request: RolloutRequest) -> Trajectories:
        """``submit``, and wait."""
        return self.submit(request).result(request.on_images)

    def close(self) -> None:
        """End all engines, also in the middle of a call."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()
        # Side by side, because each handle may wait for its process for seconds.
        with ThreadPoolExecutor(len(self._members)) as threads:
            list(threads.map(lambda member: member.handle.close(), self._members))
        for thread in self._threads:
            thread.join()

    def take_account(self) -> list[EngineWork]:
        """The work of each engine since the last call, and its work in progress."""
        with self._changed:
            account = []
            for member in self._members:
                doing = None if member.doing is None else replace(member.doing, end=time.perf_counter())
                account.append(EngineWork(member.handle.name, member.done, doing, member.given_up is not None))
                member.done = []
        return account

    def wait_for(self, find: Callable[[], T | None]) -> T:
        """Wait until ``find`` returns something, and return it. For the pool and its ``PendingRollout``.

        Raises:
            RolloutError: the engines failed or are closed.
        """
        with self._changed:
            while True:
                self._warn()
                if (found := find()) is not None:
                    return found
                self._raise_failure()
                self._changed.wait()

    def _serve(self, member: _Member) -> None:
        """In the handle's thread: start the engine and use it until the pool is closed or the engine is given up."""
        while (task := self._next_task(member)) is not None:
            try:
                task()
            except EngineLostError as error:
                self._lose(member, error)
            except Exception as error:
                self._fail(error)
                return
            del task  # it may hold a whole rollout, which must not live until the next one

    def _next_task(self, member: _Member) -> Callable[[], None] | None:
        """Wait for the next task of this thread; ``None`` ends it."""
        with self._changed:
            while not (self._closed or self._failure or member.given_up):
                # First of all: an engine that was lost needs a start before anything else.
                if not member.started:
                    return partial(self._start, member)
                if self._chunks:
                    return partial(self._draw, member, self._chunks.popleft())
                # Only without chunks, so that a new adapter never delays the rollout before it.
                if self._current is not None and member.holds is not self._current:
                    return partial(self._give, member, self._current)
                self._changed.wait()
        return None

    def _start(self, member: _Member) -> None:
        with self._working(member, "start"):
            member.handle.start()
            member.holds = None
            member.started = True

    def _give(self, member: _Member, adapter: _Adapter) -> None:
        """Have the engine hold this adapter; raises ``RolloutSyncError`` if it does not."""
        with self._working(member, "sync", version=adapter.held.version):
            member.holds = None  # unknown until the digest is back
            digest = member.handle.sync(adapter.state, adapter.held.version)
            check_adapter(adapter.held, adapter.held.version, digest)
            member.holds = adapter

    def _draw(self, member: _Member, chunk: _Chunk) -> None:
        request = chunk.request
        try:
            if member.holds is not chunk.adapter:
                self._give(member, chunk.adapter)
            version = chunk.adapter.held.version
            with self._working(member, "draw", rows=len(request.prompt_index), version=version):
                part = member.handle.generate(request)
                _check_part(chunk, part)
        except EngineLostError as error:
            # Engines that go down together, with their node, count once: all but the first were lost before they were
            # given the chunk.
            if member.holds is chunk.adapter and member.last_answer > chunk.last_loss:
                chunk.losses += 1
                chunk.last_loss = time.perf_counter()
            if chunk.losses == LOSSES_OF_A_CHUNK:
                first = int(request.request_id.rpartition("/")[2])
                raise RolloutError(
                    f"images {first} to {first + len(request.prompt_index) - 1} of a rollout have cost {chunk.losses} "
                    f"engines one after the other, the last one {member.handle.name}: {one_line(error)}"
                ) from error
            with self._changed:
                # In front, because the trainer waits for the chunks in order.
                self._chunks.appendleft(chunk)
            raise
        with self._changed:
            chunk.rollout.deliver(chunk, part)
            member.losses = 0
            self._changed.notify_all()

    @contextmanager
    def _working(self, member: _Member, what: str, **details: int) -> Iterator[None]:
        """Account for the work inside, and add the engine's name to an error that ends the run."""
        now = time.perf_counter()
        work = Work(member.handle.name, what, now, now, **details)
        with self._changed:
            member.doing = work
        try:
            yield
            member.last_answer = time.perf_counter()
        except EngineLostError:  # the notice of the loss names the engine
            what = "lost"
            raise
        except (RolloutError, AdapterMismatchError) as error:
            raise type(error)(f"rollout engine {member.handle.name}: {error}") from error
        finally:
            with self._changed:
                member.done.append(replace(work, what=what, end=time.perf_counter()))
                member.doing = None
                self._changed.notify_all()

    def _lose(self, member: _Member, error: EngineLostError) -> None:
        """Let the engine be started again, or give it up."""
        with self._changed:
            if self._closed:
                return
            member.losses += 1
            # A start that fails would most likely fail again, for minutes each time.
            if not member.started or member.losses >= LOSSES_OF_A_HANDLE:
                member.given_up = one_line(error)
            member.holds = None
            member.started = False
            fate = "is given up" if member.given_up else "is started anew"
            self._notices.append(f"rollout engine {member.handle.name} {fate}: {one_line(error)}")
            self._changed.notify_all()
        if member.given_up:
            with suppress(Exception):  # the engine is lost already, and its remains must not hide why
                member.handle.close()
        if all(m.given_up for m in self._members):
            reasons = "; ".join(f"{m.handle.name}: {m.given_up}" for m in self._members)
            self._fail(RolloutError(f"no rollout engine is left of {len(self._members)}: {reasons}"))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._closed and self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _warn(self) -> None:
        """Issue the pending warnings; the caller holds the lock."""
        notices, self._notices = self._notices, []
        for notice in notices:
            warnings.warn(notice, stacklevel=4)

    def _raise_failure(self) -> None:
        """Raise if nothing can be drawn any more; the caller holds the lock."""
        if self._failure is not None:
            self._warn()
            raise self._failure
        if self._closed:
            raise RolloutError("the rollout engines are closed")


def _check_part(chunk: _Chunk, part: Trajectories) -> None:
    """Raise ``RolloutSyncError`` unless ``part`` is an answer to this chunk, drawn with its adapter."""
    wanted = chunk.request
    if part.echo.request_id != wanted.request_id or len(part.images) != len(wanted.prompt_index):
        raise RolloutSyncError(
            f"asked for the {len(wanted.prompt_index)} images of {wanted.request_id}, got {len(part.images)} of "
            f"{part.echo.request_id}; the engine has mixed up its results"
        )
    check_adapter(chunk.adapter.held, part.echo.adapter_version, part.echo.adapter_digest)
