"""The process that speaks to Ray for one trainer process: ``python -m flowgrpo_rc.rollout.ray.driver FD``.

Ray takes over a process that connects to it: it answers SIGTERM, writes to the standard output, and ends the process
when the cluster's head or the node's daemon is gone for a while, or lets it wait where nothing can interrupt it. None
of this is done to a trainer. It has this process between Ray and itself, at the other end of a pipe, FD, and where this
one ends, engines are lost and no more. It also outlives the trainer, for the moment that it takes to end the actors and
a Ray that it has started itself.

Bytes are passed on as they are, so that torch is not loaded here.
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rollout.placement import JOINED
from flowgrpo_rc.rollout.process.protocol import receive, send
from flowgrpo_rc.rollout.ray.actor import LIFE, EngineActor
from flowgrpo_rc.rollout.ray.messages import CLOSE, LOST, READY, Answer, Ask, DriverSettings

_HERE = "actor_rollout_ref.rollout.ray"
_REACH_SECONDS = 10.0
"""So long an address is tried. Ray itself would try for two minutes, and end the process then."""
_LOOK_SECONDS = 0.5
"""Between two looks whether the trainer and the engines are there."""


class EngineFailed(Exception):
    """An engine is gone, or has answered with an error."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def main() -> None:
    """Serve until the trainer closes the pipe or is gone."""
    connection = Connection(int(sys.argv[1]))
    settings: DriverSettings = receive(connection)
    threading.Thread(target=_end_with_trainer, args=(settings,), daemon=True).start()
    answers = _Answers(connection)
    try:
        cluster = _Cluster(settings)
    except Exception as error:
        answers.send(Answer(READY, error=one_line(error, 600), kind=LOST))
        _leave(settings)
    answers.send(Answer(READY))
    with suppress(EOFError, OSError):
        while True:
            ask: Ask = receive(connection)
            if ask.method == CLOSE:
                break
            payload = connection.recv_bytes() if ask.has_payload else b""
            threading.Thread(target=_serve, args=(cluster, ask, payload, answers), daemon=True).start()
    _leave(settings)


def _serve(cluster: "_Cluster", ask: Ask, payload: bytes, answers: "_Answers") -> None:
    """Do what is asked, and answer."""
    try:
        value = getattr(cluster, ask.method)(ask.engine, ask.argument, payload)
    except EngineFailed as failed:
        answers.send(Answer(ask.id, error=str(failed), kind=failed.kind))
    except Exception as error:  # Ray's own: of an actor or object, or of a cluster that cannot be reached
        cluster.end(ask.engine)
        answers.send(Answer(ask.id, error=_reason(error), kind=LOST))
    else:
        if isinstance(value, bytes):
            answers.send(Answer(ask.id, has_payload=True), value)
        else:
            answers.send(Answer(ask.id, value))


class _Answers:
    """The way back to the trainer, for several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, answer: Answer, payload: bytes = b"") -> None:
        with self._lock, suppress(OSError):  # the trainer is gone, which another thread notices
            send(self._connection, answer)
            if answer.has_payload:
                self._connection.send_bytes(payload)


class _Cluster:
    """Ray, and the engines of this trainer in it.

    Raises:
        ConnectionError: no cluster answers at the address.
    """

    def __init__(self, settings: DriverSettings) -> None:
        import ray

        self._ray: Any = ray
        self._settings = settings
        self._actors: dict[int, Any] = {}
        self._adapters: dict[int, Any] = {}
        """By key: where in Ray's store it is."""
        if settings.address is not None:
            _reach(settings.address)
        else:
            # It would end engines, which are the largest processes, when any other process fills the machine's memory.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        ray.init(
            address=settings.address or "local",
            include_dashboard=None if settings.address else False,
            configure_logging=False,
            log_to_driver=False,
        )
        self._head = self._ray.get_runtime_context().gcs_address
        actor = self._ray.remote(concurrency_groups={LIFE: 1}, max_restarts=0)(EngineActor)
        self._new = actor.options(num_gpus=settings.num_gpus, num_cpus=settings.num_cpus)

    def start(self, engine: int, argument: None, payload: bytes) -> tuple[str, int]:
        """Start an engine, in the place of one that is gone; returns its node's name and its process."""
        self.end(engine)
        _reach(self._head)
        limit = self._settings.timeouts.start_timeout_s
        deadline = time.monotonic() + limit
        if self._settings.address is None:
            self._check_room()
        actor = self._new.remote()
        self._actors[engine] = actor
        where = actor.where.remote()
        ready, _ = self._ray.wait([where], timeout=limit)
        if not ready:
            self.end(engine)
            raise EngineFailed(LOST, f"no node of the Ray cluster had room for it within {limit:g} s: {self._room()}")
        place = self._ray.get(where)
        device = _device(self._settings.num_gpus)
        loading = actor.load.remote(self._settings.sections, device, self._settings.threads)
        # Loading a large model may keep the interpreter busy for long.
        left = deadline - time.monotonic()
        _raise_failure(self._wait(engine, loading, left, "starting", silence=left))
        return place

    def keep(self, engine: int, argument: tuple[int, list[int]], payload: bytes) -> None:
        """Put an adapter into Ray's store, once for all engines, and give up those that are no longer wanted."""
        key, wanted = argument
        self._adapters[key] = self._ray.put(payload)
        for old in set(self._adapters) - {key, *wanted}:
            self._adapters.pop(old, None)

    def sync(self, engine: int, argument: tuple[int, int], payload: bytes) -> str:
        """Give an engine an adapter; returns the digest of what it holds then."""
        key, version = argument
        answer = self._actor(engine).sync.remote(self._adapters[key], version)
        failure, digest = self._wait(engine, answer, self._settings.timeouts.sync_timeout_s, "taking an adapter")
        _raise_failure(failure)
        return digest

    def generate(self, engine: int, argument: None, payload: bytes) -> bytes:
        """Have an engine draw."""
        failed, answer = self._actor(engine).generate.options(num_returns=2).remote(payload)
        limit = self._settings.timeouts.request_timeout_s
        _raise_failure(self._wait(engine, failed, limit, "sampling"))
        return self._wait(engine, answer, limit, "sampling")

    def end(self, engine: int, argument: None = None, payload: bytes = b"") -> None:
        """End an engine; what it is asked fails."""
        actor = self._actors.pop(engine, None)
        if actor is not None:
            with suppress(Exception):
                self._ray.kill(actor)

    def _actor(self, engine: int) -> Any:
        if engine not in self._actors:
            raise EngineFailed(LOST, "its actor has ended")
        return self._actors[engine]

    def _wait(self, engine: int, answer: Any, limit: float, doing: str, *, silence: float | None = None) -> Any:
        """An actor's answer.

        Raises:
            EngineFailed: it took too long or gave no sign of life, and was ended.
            RayError: it has died.
        """
        actor = self._actor(engine)
        silence = self._settings.timeouts.silence_timeout_s if silence is None else silence
        deadline = time.monotonic() + limit
        asked = time.monotonic()
        sign = actor.alive.options(concurrency_group=LIFE).remote()
        while (left := deadline - time.monotonic()) > 0:
            ready, _ = self._ray.wait([answer], timeout=min(left, silence / 4))
            if ready:
                return self._ray.get(answer)
            if self._ray.wait([sign], timeout=0)[0]:
                self._ray.get(sign)
                asked = time.monotonic()
                sign = actor.alive.options(concurrency_group=LIFE).remote()
            elif time.monotonic() - asked > silence:
                self.end(engine)
                raise EngineFailed(LOST, f"gave no sign of life for {silence:g} s while {doing}; it was ended")
        self.end(engine)
        raise EngineFailed(LOST, f"took more than {limit:g} s for {doing}; it was ended")

    def _check_room(self) -> None:
        """Nobody adds nodes to a Ray that was started here."""
        has = self._ray.cluster_resources()
        if any(has.get(kind, 0) < asked for kind, asked in self._asked().items()):
            raise EngineFailed(LOST, f"Ray on this machine has no room for it: {self._room()}")

    def _asked(self) -> dict[str, float]:
        return {"GPU": self._settings.num_gpus, "CPU": self._settings.num_cpus}

    def _room(self) -> str:
        has = self._ray.cluster_resources()
        free = self._ray.available_resources()
        asked = " and ".join(f"{number:g} {kind}" for kind, number in self._asked().items())
        found = " and ".join(f"{has.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in self._asked())
        return (
            f"asked for {asked} ({_HERE}.num_gpus, num_cpus) on one node, the {len(self._alive())} nodes have {found}; "
            "ask for less, lower actor_rollout_ref.rollout.engines or add nodes"
        )

    def _alive(self) -> list[Any]:
        return [node for node in self._ray.nodes() if node["Alive"]]


def _raise_failure(failure: tuple[str, str] | None) -> None:
    if failure is not None:
        raise EngineFailed(*failure)


def _device(num_gpus: float) -> str:
    """Where an engine computes: Ray shows it the GPUs that it was given and no others."""
    return JOINED.join(f"cuda:{index}" for index in range(max(1, int(num_gpus)))) if num_gpus else "cpu"


def _reach(address: str) -> None:
    """Raise ``ConnectionError`` where nothing listens at ``host:port``; another form of address is Ray's to judge."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with "
            f"`ray start --head` and give its address in {_HERE}.address or RAY_ADDRESS"
        ) from None


def _reason(error: Exception) -> str:
    """Ray's words without names of classes and ids before, and general advice after."""
    text = one_line(error)
    for start in ("The actor is dead because", "The actor died because"):
        _, found, rest = text.partition(start)
        text = found + rest if found else text
    for advice in ("Some common causes", "There are some potential root causes"):
        text = text.partition(advice)[0]
    return text.strip()[:400]


def _end_with_trainer(settings: DriverSettings) -> None:
    """Notice that the trainer is gone, also where a process that it has forked keeps the pipe open."""
    while os.getppid() == settings.parent:
        time.sleep(_LOOK_SECONDS)
    _leave(settings)


def _leave(settings: DriverSettings) -> NoReturn:
    """End the actors, and Ray where it was started here, whose daemons are of this process's group; without waiting for
    a cluster that does not answer."""

    def shut_down() -> None:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()

    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    thread.join(settings.timeouts.close_timeout_s)
    if settings.address is None and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
