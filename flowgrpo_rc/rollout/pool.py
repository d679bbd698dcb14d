"""Several rollout engines elsewhere as one: rows are dealt out to whichever is free, and drawn the same by each.

A request is cut into chunks of ``micro_batch_size`` rows, which are what an engine in the trainer's process gives to
one forward. A row's random numbers come from its own seed. So it matters to no bit of the answer which engine draws a
chunk, in which order, or how often one had to be drawn anew.
"""

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import (
    Echo,
    EngineLostError,
    RolloutError,
    RolloutHandle,
    RolloutRequest,
    RolloutSyncError,
    Trajectories,
    batch_of,
    check_has_adapter,
)
from flowgrpo_rc.rollout.proof import HeldAdapter, check_adapter
from flowgrpo_rc.transfers import to_host

LOSSES_OF_A_CHUNK = 3
"""So many engines in a row may be lost over one chunk, before its rows are taken for the cause."""
LOSSES_OF_A_HANDLE = 2
"""So often in a row may an engine be lost without having done anything in between, before it is given up."""
T = TypeVar("T")
OnImages = Callable[[Tensor, Tensor], object]
"""Takes the rows of some images, and these."""
_OF_ITS_ROWS = ("request_id", "window_starts", "seeds")
"""Fields of an echo that belong to the rows of a chunk; the others are the same for all chunks of a request."""


@dataclass(frozen=True)
class Work:
    """Something that an engine did."""

    engine: str
    """Its handle's name."""
    what: str
    """``draw``, ``sync`` or ``start``; ``lost`` for one of these in which the engine was lost."""
    begin: float
    """Seconds of ``time.perf_counter``."""
    end: float
    """Likewise; of what goes on, the moment at which it was asked for."""
    rows: int = 0
    """How many images it has drawn."""
    version: int = -1
    """The version of the adapter."""


@dataclass(frozen=True)
class EngineWork:
    """What one engine has done lately."""

    engine: str
    """Its handle's name."""
    done: list[Work]
    """What it has ended since the last account, in order."""
    doing: Work | None
    """What goes on."""
    given_up: bool
    """Whether it is given nothing any more."""


@dataclass(frozen=True, eq=False)
class _Adapter:
    """An adapter as engines are given it."""

    held: HeldAdapter
    state: Mapping[str, Tensor]
    """On the host, in the engines' dtype."""


@dataclass(eq=False)
class _Chunk:
    """Rows of a request, which one engine draws at a time."""

    number: int
    """Its place among the chunks of the request."""
    request: RolloutRequest
    """For these rows alone."""
    adapter: _Adapter
    """To draw them with."""
    rollout: "PendingRollout"
    losses: int = 0
    """How many engines have been lost while they drew it."""
    lost: float = -math.inf
    """When the last of these was, in seconds of ``time.perf_counter``."""


@dataclass(eq=False)
class _Member:
    """A handle and what the pool knows of it."""

    handle: RolloutHandle
    holds: _Adapter | None = None
    losses: int = 0
    """In a row, without anything drawn in between."""
    started: bool = False
    given_up: str | None = None
    """Why it is given nothing any more."""
    answered: float = -math.inf
    """When it last did something, in seconds of ``time.perf_counter``."""
    doing: Work | None = None
    done: list[Work] = field(default_factory=list)


class PendingRollout:
    """The answer to a request that engines are at work on."""

    def __init__(
        self,
        pool: "RolloutPool",
        request: RolloutRequest,
        rows: Sequence[Tensor],
        on_arrival: OnImages | None = None,
    ) -> None:
        self._pool = pool
        self._request = request
        self._rows = rows
        self._on_arrival = on_arrival
        self._arrived = 0
        """Chunks, from the first on, that ``on_arrival`` has been told of."""
        self._parts: list[Trajectories | None] = [None] * len(rows)

    def result(self, on_images: OnImages | None = None) -> Trajectories:
        """Wait for the answer.

        Args:
            on_images: as ``RolloutRequest.on_images``; called from this thread, chunk by chunk, as they come.

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
        return _joined(self._request, parts)

    def deliver(self, chunk: _Chunk, part: Trajectories) -> None:
        """The chunk has been drawn; the pool's lock is held."""
        self._parts[chunk.number] = part
        if self._on_arrival is None:
            return
        for number in range(self._arrived, len(self._parts)):
            arrived = self._parts[number]
            if arrived is None:
                break
            self._on_arrival(self._rows[number], arrived.images)
            self._arrived += 1


class RolloutPool:
    """A ``RolloutEngine`` over engines elsewhere, which can also be asked ahead of time.

    Each handle is called from a thread of its own. A free one takes the next chunk, so that a slow one gets fewer; it
    is given the chunk's adapter first where it holds another. One without work takes the adapter that was pushed last.

    Where an engine is lost, the next free one draws its chunk, and it is started anew, with the adapter of its next
    chunk. One that is lost ``LOSSES_OF_A_HANDLE`` times in a row, or does not start again, is given up; the rollout
    fails when none is left, or when a chunk has cost ``LOSSES_OF_A_CHUNK`` engines.

    Args:
        handles: at least one; the pool starts and closes them.
        digest_of: the digest of an adapter that holds exactly this state, after the engines' rounding.
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
        self._size = micro_batch_size
        self._changed = threading.Condition()
        """Guards all that follows; notified when any of it has changed."""
        self._chunks: deque[_Chunk] = deque()
        self._current: _Adapter | None = None
        """The adapter of requests that are submitted."""
        self._failure: Exception | None = None
        """Why nothing can be drawn any more."""
        self._notices: list[str] = []
        """What is to be told, by the thread that waits."""
        self._closed = False
        self._members = [_Member(handle) for handle in handles]
        self._threads = [
            threading.Thread(target=self._serve, args=(member,), name=f"rollout {member.handle.name}", daemon=True)
            for member in self._members
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._wait_until_started()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ what the trainer calls

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of an adapter that holds exactly ``state``, after the engines' rounding."""
        return self._digest_of(state)

    def push(self, state: Mapping[str, Tensor], version: int) -> HeldAdapter:
        """Give the engines this adapter for all requests to come; does not wait for them.

        Returns what they must hold. Each engine reads its digest back, and one that differs ends the run.
        """
        held = HeldAdapter(version, self.digest_of(state))
        # Copies of their own: the actor goes on learning while they are on their way, and a view is sent with all that
        # it is a view of.
        sent = to_host({name: tensor.detach().to(self._dtype) for name, tensor in state.items()})
        copies = {name: tensor.clone().contiguous() for name, tensor in sent.items()}
        with self._changed:
            self._raise_failure()
            self._current = _Adapter(held, copies)
            self.adapter_version = version
            self._changed.notify_all()
        return held

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """``push``, and wait until every engine holds it; what is in flight is drawn before that.

        Raises:
            AdapterMismatchError: some tensor does not bind.
            RolloutError: no engine is left.
            RolloutSyncError: an engine does not hold what it was given.
        """
        held = self.push(state, version)
        pushed = self._current
        self.wait_for(lambda: all(m.holds is pushed or m.given_up for m in self._members) or None)
        return held.digest

    def submit(self, request: RolloutRequest, on_arrival: OnImages | None = None) -> PendingRollout:
        """Have the images of a request drawn after those of earlier ones, with the adapter that was pushed last.

        Args:
            request: what to draw.
            on_arrival: called with rows and images of each chunk, in order, as soon as it is there, whether or not
                anybody waits for the answer; by an engine's thread, so that it must return at once.
        """
        check_has_adapter(self.adapter_version)
        assert self._current is not None
        rows = torch.arange(len(request.prompt_index)).split(self._size)
        pending = PendingRollout(self, request, rows, on_arrival)
        chunks = [_Chunk(i, _chunk_of(request, part), self._current, pending) for i, part in enumerate(rows)]
        with self._changed:
            self._raise_failure()
            self._chunks.extend(chunks)
            self._changed.notify_all()
        return pending

    def generate(self, request: RolloutRequest) -> Trajectories:
        """``submit``, and wait."""
        return self.submit(request).result(request.on_images)

    def close(self) -> None:
        """End all engines, in the midst of what they do."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()
        closing = [threading.Thread(target=member.handle.close, daemon=True) for member in self._members]
        for thread in closing:
            thread.start()
        for thread in (*closing, *self._threads):
            thread.join()

    def take_work(self) -> list[Work]:
        """What the engines have done since the last call, in the order in which it began."""
        done = [work for engine in self.take_account() for work in engine.done]
        return sorted(done, key=lambda work: work.begin)

    def take_account(self) -> list[EngineWork]:
        """What each engine has done since the last call, or since the last one of ``take_work``, and what it does."""
        with self._changed:
            account = []
            for member in self._members:
                doing = None if member.doing is None else replace(member.doing, end=time.perf_counter())
                account.append(EngineWork(member.handle.name, member.done, doing, member.given_up is not None))
                member.done = []
        return account

    def wait_for(self, found: Callable[[], T | None]) -> T:
        """Wait until ``found`` finds something, and return that; for the pool and its ``PendingRollout``.

        Raises:
            RolloutError: there will be nothing to find.
        """
        with self._changed:
            while True:
                self._tell()
                answer = found()
                if answer is not None:
                    return answer
                self._raise_failure()
                self._changed.wait()

    # ------------------------------------------------------------------ what each handle's thread does

    def _serve(self, member: _Member) -> None:
        """Start the engine, and do what there is to do with it, until the pool is closed or it is given up."""
        while self._do(member, self._next_task(member)):
            """A task holds a whole rollout, so this frame, which waits for the next one, keeps none."""

    def _do(self, member: _Member, task: Callable[[], None] | None) -> bool:
        """Do this; whether anything may come after it."""
        if task is None:
            return False
        try:
            task()
        except EngineLostError as error:
            self._lost(member, error)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _next_task(self, member: _Member) -> Callable[[], None] | None:
        """What this thread does next; ``None``: nothing any more."""
        with self._changed:
            while not (self._closed or self._failure or member.given_up):
                if not member.started:
                    return lambda: self._start(member)
                if self._chunks:
                    chunk = self._chunks.popleft()
                    return lambda: self._draw(member, chunk)
                current = self._current
                if current is not None and member.holds is not current:
                    return lambda: self._give(member, current)
                self._changed.wait()
        return None

    def _start(self, member: _Member) -> None:
        self._begin(member, "start")
        with _naming(member):
            member.handle.start()
        with self._changed:
            member.holds = None
            member.started = True
            self._end(member)

    def _give(self, member: _Member, adapter: _Adapter) -> None:
        """Have the engine hold this adapter.

        Raises:
            RolloutSyncError: it does not.
        """
        self._begin(member, "sync", version=adapter.held.version)
        member.holds = None  # whatever becomes of it
        with _naming(member):
            digest = member.handle.sync(adapter.state, adapter.held.version)
            check_adapter(adapter.held, adapter.held.version, digest)
        with self._changed:
            member.holds = adapter
            self._end(member)

    def _draw(self, member: _Member, chunk: _Chunk) -> None:
        try:
            if member.holds is not chunk.adapter:
                self._give(member, chunk.adapter)
            rows = len(chunk.request.prompt_index)
            self._begin(member, "draw", rows=rows, version=chunk.adapter.held.version)
            with _naming(member):
                part = member.handle.generate(chunk.request)
                _check_part(chunk, part)
        except EngineLostError as error:
            # Engines that go down together are lost to the chunk once, however many find that out with it.
            if self._is_drawing(member) and member.answered > chunk.lost:
                chunk.losses += 1
                chunk.lost = time.perf_counter()
            if chunk.losses == LOSSES_OF_A_CHUNK:
                raise RolloutError(
                    f"images {_shown_rows(chunk)} of a rollout have cost {chunk.losses} engines one after the other, "
                    f"the last one {member.handle.name}: {one_line(error)}"
                ) from error
            with self._changed:
                self._chunks.appendleft(chunk)
            raise
        with self._changed:
            chunk.rollout.deliver(chunk, part)
            member.losses = 0
            self._end(member)

    def _begin(self, member: _Member, what: str, **more: int) -> None:
        """Something begins."""
        now = time.perf_counter()
        with self._changed:
            member.doing = Work(member.handle.name, what, now, now, **more)

    def _is_drawing(self, member: _Member) -> bool:
        return member.doing is not None and member.doing.what == "draw"

    def _end(self, member: _Member, **changes: str) -> None:
        """What was begun has ended; the lock is held."""
        if not changes:
            member.answered = time.perf_counter()
        if member.doing is not None:
            member.done.append(replace(member.doing, end=time.perf_counter(), **changes))
            member.doing = None
        self._changed.notify_all()

    def _lost(self, member: _Member, error: EngineLostError) -> None:
        """Have the engine started anew, or give it up; its chunk is in the queue again."""
        with self._changed:
            self._end(member, what="lost")
            starting = not member.started
            member.holds = None
            member.started = False
            member.losses += 1
            if self._closed:
                return
            if starting or member.losses >= LOSSES_OF_A_HANDLE:
                member.given_up = one_line(error)
            what = "is given up" if member.given_up else "is started anew"
            self._notices.append(f"rollout engine {member.handle.name} {what}: {one_line(error)}")
            self._changed.notify_all()
        if member.given_up:
            with suppress(Exception):
                member.handle.close()
        if all(m.given_up for m in self._members):
            reasons = "; ".join(f"{m.handle.name}: {m.given_up}" for m in self._members)
            self._fail(RolloutError(f"no rollout engine is left of {len(self._members)}: {reasons}"))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._closed and self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _tell(self) -> None:
        """Warn of what has become of engines; the lock is held."""
        notices, self._notices = self._notices, []
        for notice in notices:
            warnings.warn(notice, stacklevel=4)

    def _raise_failure(self) -> None:
        """Raise what keeps anything from being drawn, after what led to it was told; the lock is held."""
        if self._failure is not None:
            self._tell()
            raise self._failure
        if self._closed:
            raise RolloutError("the rollout engines are closed")

    def _wait_until_started(self) -> None:
        self.wait_for(lambda: all(member.started or member.given_up for member in self._members) or None)
        for member in self._members:
            if member.given_up:
                raise RolloutError(f"rollout engine {member.handle.name} does not start: {member.given_up}")


def _chunk_of(request: RolloutRequest, rows: Tensor) -> RolloutRequest:
    """The request for these rows alone, with the prompts that they show; padded as in the whole request, so that an
    engine computes on the same shapes."""
    prompts, index = request.prompt_index[rows].unique(return_inverse=True)
    first = int(rows[0])
    starts = request.window_starts
    return replace(
        request,
        conditioning=request.conditioning.rows(prompts, torch.device("cpu")),
        prompt_index=index,
        seeds=list(request.seeds[first : first + len(rows)]),
        window_starts=None if starts is None else starts[rows].cpu(),
        on_images=None,
        request_id=f"{request.request_id}/{first}",
    )


def _check_part(chunk: _Chunk, part: Trajectories) -> None:
    """The answer is to this chunk, drawn with its adapter.

    Raises:
        RolloutSyncError: it is not.
    """
    asked = chunk.request
    if part.echo.request_id != asked.request_id or len(part.images) != len(asked.prompt_index):
        raise RolloutSyncError(
            f"asked for the {len(asked.prompt_index)} images of {asked.request_id}, got {len(part.images)} of "
            f"{part.echo.request_id}; the engine has mixed up its results"
        )
    check_adapter(chunk.adapter.held, part.echo.adapter_version, part.echo.adapter_digest)


@contextmanager
def _naming(member: _Member) -> Iterator[None]:
    """Adds the engine to an error that ends the run. To its loss the notice does."""
    try:
        yield
    except EngineLostError:
        raise
    except (RolloutError, AdapterMismatchError) as error:
        raise type(error)(f"rollout engine {member.handle.name}: {error}") from error


def _joined(request: RolloutRequest, parts: Sequence[Trajectories]) -> Trajectories:
    """The parts of a request, in order, as its answer.

    Raises:
        RolloutSyncError: engines have used different settings.
    """
    echoes = [part.echo for part in parts]
    first = echoes[0]
    for name in (f.name for f in fields(Echo) if f.name not in _OF_ITS_ROWS):
        for other in echoes[1:]:
            if not _same(getattr(first, name), getattr(other, name)):
                raise RolloutSyncError(
                    f"{name}: images of one rollout were drawn with {getattr(first, name)} and "
                    f"{getattr(other, name)}; the rollout engines do not run the same program or model"
                )
    starts = [echo.window_starts for echo in echoes if echo.window_starts is not None]
    echo = replace(
        first,
        request_id=request.request_id,
        seeds=tuple(seed for one in echoes for seed in one.seeds),
        window_starts=torch.cat(starts) if starts else None,
    )
    batches = [part.batch.exclude(Key.PROMPT_INDEX) for part in parts if part.batch is not None]
    record = {name: torch.cat([batch[name] for batch in batches]) for name in (batches[0].keys() if batches else ())}
    return Trajectories(torch.cat([part.images for part in parts]), batch_of(record, request), echo)


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def _shown_rows(chunk: _Chunk) -> str:
    first = int(chunk.request.request_id.rpartition("/")[2])
    return f"{first} to {first + len(chunk.request.prompt_index) - 1}"
