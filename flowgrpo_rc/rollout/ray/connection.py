"""A trainer process's hold on the process that speaks to Ray."""

import os
import pickle
import queue
import secrets
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.process.environment import without_process_group
from flowgrpo_rc.rollout.process.protocol import receive, send
from flowgrpo_rc.rollout.process.spawned import Spawned
from flowgrpo_rc.rollout.ray.messages import CLOSE, LOST, READY, Answer, Ask, DriverSettings

ADAPTERS = 2
"""How many adapters Ray's store keeps: with requests ahead, engines may still want the one before the newest."""
_REACH_S = 10.0
"""Seconds for an answer that has come to reach the thread that waits for it."""
_HERE = "actor_rollout_ref.rollout"


def cluster_address(rollout: RolloutConfig) -> str | None:
    """Of the cluster that engines run on; ``None``: Ray is started on this machine."""
    return rollout.ray.address or os.environ.get("RAY_ADDRESS") or None


class RayConnection:
    """What the handles of a trainer process share: the process that speaks to Ray, which is started when it is needed
    and started anew where it has ended."""

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: Any) -> None:
        address = cluster_address(rollout)
        self._timeouts = rollout.process
        self._settings = DriverSettings(
            address=address,
            num_gpus=rollout.ray.num_gpus,
            num_cpus=rollout.ray.num_cpus,
            sections=pickle.dumps((rollout, model)),
            # On the host, the last bits depend on it; beside a GPU it would be more than Ray has set aside.
            threads=None if rollout.ray.num_gpus else torch.get_num_threads(),
            timeouts=rollout.process,
            parent=os.getpid(),
        )
        self._environment = _environment(device, starts_ray=address is None)
        self._lock = threading.Lock()
        """Guards what follows, but for what is in a driver."""
        self._driver: _Driver | None = None
        self._engines: set[int] = set()
        self._sending = threading.Lock()
        """Held while an adapter is sent, so that it is sent once."""
        self._adapters: list[tuple[int, _Driver, Mapping[str, Tensor]]] = []
        """The last that were sent: key, to which process, and the tensors."""
        self._syncing: dict[int, int] = {}
        """By engine: key of the adapter that it is being given."""
        self._keys = count(1)

    def join(self, engine: int) -> None:
        """One handle more needs the connection."""
        self._engines.add(engine)

    def leave(self, engine: int) -> None:
        """End this engine; with the last one the process ends."""
        with self._lock:
            self._engines.discard(engine)
            driver = self._driver
            last = not self._engines
        if driver is not None:
            driver.end_engine(engine)
            if last:
                driver.close()

    def start(self, engine: int) -> tuple[str, int]:
        """Start an engine; returns its node's name and its process there."""
        return self._running(engine).call(engine, "start", limit=self._timeouts.start_timeout_s).value

    def sync(self, engine: int, state: Mapping[str, Tensor], version: int) -> str:
        """Give an engine an adapter; returns the digest of what it holds then."""
        driver = self._current()
        with self._sending:
            key = self._keep(driver, engine, state)
            self._syncing[engine] = key
        try:
            return driver.call(engine, "sync", (key, version), limit=self._timeouts.sync_timeout_s).value
        finally:
            self._syncing.pop(engine, None)

    def generate(self, engine: int, request: RolloutRequest) -> Trajectories:
        """Have an engine draw."""
        payload = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        limit = self._timeouts.request_timeout_s
        return pickle.loads(self._current().call(engine, "generate", payload=payload, limit=limit).payload)

    def _keep(self, driver: "_Driver", engine: int, state: Mapping[str, Tensor]) -> int:
        """Have Ray hold this adapter, and return its key."""
        self._adapters = [kept for kept in self._adapters if kept[1] is driver]
        for key, _, kept in self._adapters:
            if kept is state:
                return key
        key = next(self._keys)
        others = self._adapters[1 - ADAPTERS :]
        wanted = [*(other[0] for other in others), *self._syncing.values()]
        payload = pickle.dumps(dict(state), protocol=pickle.HIGHEST_PROTOCOL)
        driver.call(engine, "keep", (key, wanted), payload=payload, limit=self._timeouts.sync_timeout_s)
        self._adapters = [*others, (key, driver, state)]
        return key

    def _current(self) -> "_Driver":
        with self._lock:
            if self._driver is None:
                raise EngineLostError("it has not been started")
            return self._driver

    def _running(self, engine: int) -> "_Driver":
        """The process, connected to Ray; one of several threads starts it."""
        with self._lock:
            if engine not in self._engines:
                raise EngineLostError("it has been closed")
            if self._driver is None or self._driver.has_ended:
                self._driver = _Driver(self._settings, self._environment)
            driver = self._driver
        driver.wait_until_ready()
        return driver


class _Reply:
    """An answer with the bytes that came with it."""

    def __init__(self, answer: Answer, payload: bytes) -> None:
        self.value = answer.value
        self.payload = payload


class _Driver:
    """A process that runs ``driver``, and the threads that write to it and read from it."""

    def __init__(self, settings: DriverSettings, environment: Mapping[str, str]) -> None:
        self._timeouts = settings.timeouts
        self._process = Spawned("flowgrpo_rc.rollout.ray.driver", environment, "flowgrpo_rc_ray_")
        self._connection = self._process.connection
        self._lock = threading.Lock()
        self._ids = count(READY + 1)
        self._waiting: dict[int, Future[_Reply]] = {READY: Future()}
        self._ready = self._waiting[READY]
        self._over: str | None = None
        """Why nothing is answered any more."""
        self._outgoing: queue.SimpleQueue[tuple[Any, bytes | None] | None] = queue.SimpleQueue()
        self._outgoing.put((settings, None))
        self._finish = weakref.finalize(self, _end, self._process)
        # A stopped process reads nothing, and a full pipe blocks: hence a thread to write.
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        with self._lock:
            return self._over is not None

    def wait_until_ready(self) -> None:
        """Wait until Ray is there.

        Raises:
            EngineLostError: it is not.
        """
        try:
            self._result(self._ready, self._timeouts.start_timeout_s, "connecting to Ray")
        except RolloutError as error:
            if not self.has_ended:  # it has said all there is in its log
                self._end(str(error))
                self._process.log.unlink(missing_ok=True)
            raise

    def call(
        self, engine: int, method: str, argument: Any = None, *, payload: bytes | None = None, limit: float
    ) -> _Reply:
        """The answer to this.

        Raises:
            EngineLostError, AdapterMismatchError, RolloutError: what it says, or it does not answer.
        """
        future: Future[_Reply] = Future()
        with self._lock:
            if self._over is not None:
                raise EngineLostError(self._over)
            id = next(self._ids)
            self._waiting[id] = future
        self._outgoing.put((Ask(id, engine, method, argument, has_payload=payload is not None), payload))
        # It keeps the time itself, and ends engines that take too long; so this is for itself.
        return self._result(future, limit + self._timeouts.silence_timeout_s, f"a call of {method}")

    def end_engine(self, engine: int) -> None:
        """End an engine; its calls fail. Does not wait."""
        self._outgoing.put((Ask(next(self._ids), engine, "end"), None))

    def close(self) -> None:
        """Have it leave Ray and end; harmless when it has."""
        self._outgoing.put((Ask(next(self._ids), 0, CLOSE), None))
        self._process.wait(self._timeouts.close_timeout_s)
        self._end("it has been closed")
        self._process.log.unlink(missing_ok=True)

    def _result(self, future: "Future[_Reply]", limit: float, doing: str) -> _Reply:
        try:
            return future.result(limit)
        except FutureTimeoutError:
            self._end(f"the process that speaks to Ray did not answer {doing} within {limit:g} s and was ended")
            return future.result(_REACH_S)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                send(self._connection, message[0])
                if message[1] is not None:
                    self._connection.send_bytes(message[1])

    def _read(self) -> None:
        with suppress(Exception):  # whatever it is, there will be no answers, and nobody is to wait for any
            while True:
                answer: Answer = receive(self._connection)
                payload = self._connection.recv_bytes() if answer.has_payload else b""
                self._settle(answer, payload)
        self._end(f"the process that speaks to Ray {self._process.how_it_ended()}{self._process.last_line()}")
        self._connection.close()

    def _settle(self, answer: Answer, payload: bytes) -> None:
        with self._lock:
            future = self._waiting.pop(answer.id, None)
        if future is None:
            return
        if answer.error is None:
            future.set_result(_Reply(answer, payload))
        elif answer.kind == LOST:
            future.set_exception(EngineLostError(answer.error))
        elif answer.kind == AdapterMismatchError.__name__:
            future.set_exception(AdapterMismatchError(answer.error))
        else:
            future.set_exception(RolloutError(answer.error))

    def _end(self, why: str) -> None:
        """End it now; all that wait for it are told."""
        with self._lock:
            first = self._over is None
            if first:
                self._over = why
            waiting, self._waiting = self._waiting, {}
        if first:
            self._outgoing.put(None)
            self._finish.detach()
            self._process.end()
        for future in waiting.values():
            future.set_exception(EngineLostError(why))


def _end(process: Spawned) -> None:
    process.end()
    process.log.unlink(missing_ok=True)


def _environment(device: Any, *, starts_ray: bool) -> dict[str, str]:
    """The trainer's environment without its process group; a Ray that is started in it has all GPUs but the trainer's,
    and does the bidding of those alone who have its token, since it listens to the network.

    The actors' own is that of their node, where Ray sets ``CUDA_VISIBLE_DEVICES`` to the GPUs that it gave them.
    """
    environment = without_process_group(os.environ)
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if starts_ray and "RAY_AUTH_MODE" not in environment:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    device = torch.device(device)
    if starts_ray and device.type == "cuda":
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        every = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        own = device.index or 0
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(every[:own] + every[own + 1 :])
    return environment
