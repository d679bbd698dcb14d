"""The trainer's side of engines on a Ray cluster."""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.processes import without_process_group
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.build import check_elsewhere
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.placement import ALONE, JOINED, Share
from flowgrpo_rc.rollout.ray.actor import LIFE, EngineActor

ADAPTERS = 2
"""How many adapters Ray's store keeps: with requests ahead, engines may still need the one before the newest."""
# Seconds that an address is tried for. Ray itself tries for two minutes and then ends the process.
_CONNECT_S = 10.0
_HERE = "actor_rollout_ref.rollout"


def check_cluster(rollout: RolloutConfig, share: Share) -> None:
    """As ``PlacementEntry.check``; connects to no cluster.

    Raises:
        ImportError: Ray is not installed; the message names the extra.
        ValueError: no cluster is named, and several trainer processes would each start one.
    """
    if find_spec("ray") is None:
        raise ImportError(
            f"{_HERE}.placement=ray needs Ray, which is not installed: pip install 'flowgrpo_rc[ray]' on every node, "
            f"or set {_HERE}.placement=process"
        )
    if _address(rollout) is None and share.count > 1:
        field = f"{_HERE}.ray.address"
        raise ValueError(
            f"{field}: got null with {share.count} trainer processes on this machine, each of which would start a Ray "
            f"of its own; start one with `ray start --head` and set {field}=auto"
        )


def ray_handles(
    rollout: RolloutConfig,
    lora: ModelConfig,
    device: Any,
    share: Share = ALONE,
    model: DiffusionModel | None = None,
) -> list["RayHandle"]:
    """As ``PlacementEntry.handles``: the ``rollout.engines`` engines of one trainer process, none of them started.

    Connects to Ray, or starts it on this machine; then it keeps off the trainer's ``device``. ``model`` is not needed.

    Raises:
        ImportError, ValueError: see ``check_cluster``; or the engine runs in the trainer's process only.
        EngineLostError: no cluster answers at the address.
    """
    check_cluster(rollout, share)
    check_elsewhere(rollout)
    cluster = _Cluster(rollout, lora, device)
    return [RayHandle(cluster, index) for index in range(rollout.engines)]


class RayHandle:
    """An engine in an actor of a Ray cluster.

    An actor that dies, hangs or is on a node that is gone raises ``EngineLostError``. ``start`` then places another
    one, which may be on another node.
    """

    def __init__(self, cluster: "_Cluster", index: int) -> None:
        self.name = f"ray {index}"
        self.place: tuple[str, int] | None = None
        """The node's name and the process id there, of the engine that was started last."""
        self._cluster = cluster
        self._timeouts = cluster.rollout.process
        self._actor: Any = None
        self._has_worked = False
        self._closed = False
        # Held during a call.
        self._in_use = threading.Lock()
        cluster.users.add(self.name)

    def start(self) -> None:
        """Place an actor, and load the model there.

        Raises:
            EngineLostError: no node has room, or a model that has been loaded before cannot be loaded there.
            RolloutError: the model cannot be loaded.
        """
        with self._in_use:
            self._kill()
            if self._closed:
                raise EngineLostError("it was closed")
            self._place_and_load()
            self._has_worked = True

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Send the adapter, which goes to Ray's store once for all engines; returns the digest read back from this one.

        Raises:
            EngineLostError, AdapterMismatchError, RolloutError: see ``RolloutHandle``.
        """
        with self._in_use:
            answer = self._running().sync.remote(self._cluster.stored(state), version)
            return self._result(answer, self._timeouts.sync_timeout_s, "taking an adapter")

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            EngineLostError, RolloutError: see ``RolloutHandle``.
        """
        with self._in_use:
            answer = self._running().generate.remote(request)
            return self._result(answer, self._timeouts.request_timeout_s, "sampling")

    def close(self) -> None:
        """End the actor; the last handle also disconnects from Ray."""
        self._closed = True
        self._kill()
        # A call in progress ends with its actor. Ray must not be shut down in the midst of one.
        if self._in_use.acquire(timeout=self._timeouts.close_timeout_s):
            self._in_use.release()
        self._cluster.leave(self.name)

    def _place_and_load(self) -> None:
        cluster = self._cluster
        limit = self._timeouts.start_timeout_s
        deadline = time.monotonic() + limit
        cluster.check_room()
        self._actor = cluster.new_actor()
        where = self._actor.where.remote()
        ready, _ = cluster.ray.wait([where], timeout=limit)
        if not ready:
            self._kill()
            raise EngineLostError(
                f"no node of the Ray cluster had room for it within {limit:g} s: {cluster.describe_room()}"
            )
        self.place = self._result(where, limit, "starting")
        # A method of its own, so that a full cluster and a broken model give different errors.
        loading = self._actor.load.remote(cluster.rollout, cluster.model, cluster.device, cluster.threads)
        # Loading a large model may keep the interpreter busy for longer than a silence may last.
        left = max(0.0, deadline - time.monotonic())
        try:
            self._result(loading, left, "starting", silence=left)
        except EngineLostError:
            raise
        except RolloutError as error:
            # At the first start the settings are the cause; later the machine may be.
            raise (EngineLostError if self._has_worked else RolloutError)(str(error)) from None

    def _running(self) -> Any:
        if self._actor is None:
            raise EngineLostError("it has not been started")
        return self._actor

    def _kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(Exception):
                self._cluster.ray.kill(actor)

    def _result(self, answer: Any, limit: float, doing: str, silence: float | None = None) -> Any:
        """The actor's answer.

        Raises:
            EngineLostError: it died, took longer than ``limit`` seconds, or gave no sign of life for ``silence``.
            AdapterMismatchError, RolloutError: it raised.
        """
        ray = self._cluster.ray
        silence = self._timeouts.silence_timeout_s if silence is None else silence
        deadline = time.monotonic() + limit
        actor = self._running()
        try:
            # Ray itself waits for good for a process that is stopped.
            sign = actor.alive.options(concurrency_group=LIFE).remote()
            asked = time.monotonic()
            while (left := deadline - time.monotonic()) > 0:
                if ray.wait([answer], timeout=min(left, silence / 4))[0]:
                    return ray.get(answer)
                if ray.wait([sign], timeout=0)[0]:
                    ray.get(sign)
                    sign = actor.alive.options(concurrency_group=LIFE).remote()
                    asked = time.monotonic()
                elif time.monotonic() - asked > silence:
                    self._kill()
                    raise EngineLostError(f"gave no sign of life for {silence:g} s while {doing}; it was ended")
        except ray.exceptions.RayTaskError as error:
            kind = AdapterMismatchError if isinstance(error.cause, AdapterMismatchError) else RolloutError
            raise kind(one_line(error.cause, 1000)) from None
        except ray.exceptions.RayError as error:
            self._kill()
            raise EngineLostError("it was closed" if self._closed else _reason(error)) from None
        self._kill()
        raise EngineLostError(f"took more than {limit:g} s for {doing}; it was ended")


class _Cluster:
    """Ray, as the engines of one trainer process share it.

    Raises:
        EngineLostError: no cluster answers at the address.
    """

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: Any) -> None:
        self.rollout = rollout
        self.model = model
        self.device = actor_device(rollout.ray.num_gpus)
        # On the host the last bits depend on it; beside a GPU it would be more than Ray has set aside.
        self.threads = None if rollout.ray.num_gpus else torch.get_num_threads()
        self.users: set[str] = set()
        """Names of the handles that are not closed."""
        self._lock = threading.Lock()
        # The last that were put into Ray's store, with their places there.
        self._adapters: list[tuple[Mapping[str, Tensor], Any]] = []
        address = _address(rollout)
        self._is_local = address is None
        _check_reachable(address)
        environment = local_environment(device) if address is None else os.environ
        with _variables(environment):
            # Ray reads some of its variables when it is imported.
            import ray

            self.ray: Any = ray
            self._started_here = not ray.is_initialized()
            if self._started_here:
                self._connect(address)
        # No restarts by Ray: a new actor has no model, and the pool must know of the loss.
        actor: Any = self.ray.remote(concurrency_groups={LIFE: 1}, max_restarts=0)(EngineActor)
        self._actor = actor.options(num_gpus=rollout.ray.num_gpus, num_cpus=rollout.ray.num_cpus)

    def new_actor(self) -> Any:
        """An actor, which Ray places when a node has room."""
        return self._actor.remote()

    def stored(self, state: Mapping[str, Tensor]) -> Any:
        """The place of this adapter in Ray's store."""
        with self._lock:
            for known, place in self._adapters:
                if known is state:
                    return place
            # Once for all engines, instead of once in every call.
            place = self.ray.put(dict(state))
            self._adapters = [*self._adapters[1 - ADAPTERS :], (state, place)]
            return place

    def leave(self, user: str) -> None:
        """Disconnect when no handle is left."""
        with self._lock:
            self.users.discard(user)
            # A connection that the user made before is the user's to end.
            last = not self.users and self._started_here
            self._started_here = self._started_here and not last
        if last:
            self.ray.shutdown()

    def check_room(self) -> None:
        """Refuse what will never fit: nobody adds nodes to a Ray that was started here."""
        has = self.ray.cluster_resources() if self._is_local else None
        if has is not None and any(has.get(kind, 0) < wanted for kind, wanted in self._wanted().items()):
            raise EngineLostError(f"Ray on this machine has no room for it: {self.describe_room()}")

    def describe_room(self) -> str:
        """The resources that an engine needs and those that the cluster has."""
        has = self.ray.cluster_resources()
        free = self.ray.available_resources()
        wanted = " and ".join(f"{number:g} {kind}" for kind, number in self._wanted().items())
        found = " and ".join(f"{has.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in self._wanted())
        nodes = sum(node["Alive"] for node in self.ray.nodes())
        return (
            f"asked for {wanted} ({_HERE}.ray.num_gpus, num_cpus) on one node, the {nodes} nodes have {found}; "
            f"ask for less, lower {_HERE}.engines or add nodes"
        )

    def _wanted(self) -> dict[str, float]:
        return {"GPU": self.rollout.ray.num_gpus, "CPU": self.rollout.ray.num_cpus}

    def _connect(self, address: str | None) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                configure_logging=False,
                # Outputs of engines would mix with the trainer's; Ray keeps them in its own logs.
                log_to_driver=False,
            )
        except Exception as error:
            raise EngineLostError(one_line(error, 600)) from None
        # Ray takes SIGTERM, which the trainer answers with a checkpoint.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def actor_device(num_gpus: float) -> str:
    """The device of an engine for which Ray sets aside so many GPUs; Ray shows it no others."""
    return JOINED.join(f"cuda:{index}" for index in range(max(1, int(num_gpus)))) if num_gpus else "cpu"


def local_environment(device: Any) -> dict[str, str]:
    """Variables with which Ray is started on this machine, to run on all of its GPUs but the trainer's ``device``."""
    environment = without_process_group(os.environ)
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's memory monitor ends the largest processes, which engines are, when any other process fills the memory.
    environment.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray listens to the network, and runs what it is sent. A library that was imported without a token knows none.
    if "RAY_AUTH_MODE" not in environment and "ray" not in sys.modules:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    device = torch.device(device)
    # Ray would otherwise place an engine beside the trainer, whose memory is full.
    if device.type == "cuda":
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        every = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        own = device.index or 0
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(every[:own] + every[own + 1 :])
    return environment


def _address(rollout: RolloutConfig) -> str | None:
    """Of the cluster that engines run on; ``None``: Ray is started on this machine."""
    return rollout.ray.address or os.environ.get("RAY_ADDRESS") or None


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these environment variables, which Ray's daemons inherit."""
    before = dict(os.environ)
    inside = dict(environment)
    os.environ.clear()
    os.environ.update(inside)
    try:
        yield
    finally:
        # Ray's library reads its own again.
        rays = {name: value for name, value in inside.items() if name.startswith("RAY_")}
        os.environ.clear()
        os.environ.update(before | rays)


def _check_reachable(address: str | None) -> None:
    """Raise where nothing listens at ``host:port``; Ray checks other forms of address itself."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise EngineLostError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with "
            f"`ray start --head` and give its address in {_HERE}.ray.address or RAY_ADDRESS"
        ) from None


def _reason(error: Exception) -> str:
    """Ray's words without the names of classes and ids before them and the general advice after."""
    text = one_line(error)
    for start in ("The actor is dead because", "The actor died because"):
        _, found, rest = text.partition(start)
        text = found + rest if found else text
    for advice in ("Some common causes", "There are some potential root causes"):
        text = text.partition(advice)[0]
    return text.strip()[:400]
