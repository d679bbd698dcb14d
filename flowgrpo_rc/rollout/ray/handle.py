"""The trainer's side of engines on a Ray cluster."""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.processes import ProcessLostError, RemoteError
from flowgrpo_rc.rollout.base import EngineLostError
from flowgrpo_rc.rollout.config import ALONE, JOINED, RolloutConfig, Share
from flowgrpo_rc.rollout.process import EngineHandle, visible_gpus
from flowgrpo_rc.rollout.ray.actor import LIFE, EngineActor

# Seconds that an address is tried for. Ray itself tries for minutes and then ends the process.
_CONNECT_S = 10.0
_HERE = "actor_rollout_ref.rollout"


def check_cluster(rollout: RolloutConfig, share: Share) -> None:
    """Check that Ray is there and a cluster named where one is needed, without connecting to it.

    Raises:
        ImportError: Ray is not installed; the message names the extra.
        ValueError: no cluster is named, and several trainer processes would each start one.
    """
    if find_spec("ray") is None:
        raise ImportError(
            f"{_HERE}.placement=ray needs Ray, which is not installed: pip install '.[ray]' in a checkout on every "
            f"node, or set {_HERE}.placement=process"
        )
    if _address(rollout) is None and share.count > 1:
        field = f"{_HERE}.ray.address"
        raise ValueError(
            f"{field}: got null with {share.count} trainer processes on this machine, each of which would start a Ray "
            f"of its own; start one with `ray start --head` and set {field}=auto"
        )


def ray_handles(
    rollout: RolloutConfig, lora: ModelConfig, device: Any, share: Share = ALONE, model: DiffusionModel | None = None
) -> list["RayHandle"]:
    """The ``rollout.engines`` engines of one trainer process, none of them started; arguments as of ``build_engine``.

    Connects to Ray, or starts it on this machine; then it keeps off the trainer's ``device``. ``model`` is not needed.

    Raises:
        ImportError, ValueError: see ``check_cluster``.
        EngineLostError: no cluster answers at the address.
    """
    check_cluster(rollout, share)
    cluster = _Cluster(rollout, lora, device)
    return [RayHandle(cluster, index) for index in range(rollout.engines)]


class RayHandle(EngineHandle):
    """An engine in an actor of a Ray cluster; a new start may place it on another node."""

    def __init__(self, cluster: "_Cluster", index: int) -> None:
        super().__init__(f"ray {index}", cluster.rollout.process)
        self._cluster = cluster
        cluster.users.add(self.name)

    def close(self) -> None:
        """End the actor; the last handle also disconnects from Ray."""
        super().close()
        # A call in progress ends with its actor. Ray must not be shut down in the midst of one.
        if self._in_use.acquire(timeout=self._timeouts.close_timeout_s):
            self._in_use.release()
        self._cluster.leave(self.name)

    def _make(self) -> "_RayEngine":
        return _RayEngine(self._cluster)


class _RayEngine:
    """An engine in an actor, with the methods of a ``RemoteObject``; errors of Ray are ``ProcessLostError``."""

    def __init__(self, cluster: "_Cluster") -> None:
        self.pid = -1
        self._cluster = cluster
        self._ray = cluster.ray
        self._actor: Any = None
        with self._ends_on_errors():
            cluster.check_room()
            self._actor = cluster.actor.remote()

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait until Ray has placed the actor and the model is loaded there; errors as of ``RemoteObject``."""
        deadline = time.monotonic() + limit_s
        with self._ends_on_errors():
            pid = self._actor.pid.remote()
            if not self._ray.wait([pid], timeout=limit_s)[0]:
                room = self._cluster.describe_room()
                raise ProcessLostError(f"no node of the Ray cluster had room for it within {limit_s:g} s: {room}")
            self.pid = self._ray.get(pid)
        # A method of its own, so that a full cluster and a broken model give different errors.
        left = max(0.0, deadline - time.monotonic())
        self.call("load", *self._cluster.arguments, limit_s=left, doing="starting")

    def call(self, method: str, *arguments: Any, limit_s: float, doing: str) -> Any:
        """Call a method of the actor; arguments and errors as of ``RemoteObject.call``."""
        # Loading a large model may keep the interpreter busy for longer than a silence may last.
        silence_s = limit_s if method == "load" else self._cluster.rollout.process.silence_timeout_s
        deadline = time.monotonic() + limit_s
        with self._ends_on_errors():
            if method == "sync":
                arguments = (self._cluster.stored(arguments[0]), *arguments[1:])
            answer = getattr(self._actor, method).remote(*arguments)
            while (left := deadline - time.monotonic()) > 0:
                # Ray itself waits for good for a process that is stopped.
                sign = self._actor.alive.options(concurrency_group=LIFE).remote()
                if not self._ray.wait([answer, sign], timeout=min(left, silence_s))[0] and left > silence_s:
                    raise ProcessLostError(f"gave no sign of life for {silence_s:g} s while {doing}; it was ended")
                if self._ray.wait([answer], timeout=min(left, silence_s / 4))[0]:
                    return self._ray.get(answer)
            raise ProcessLostError(f"took more than {limit_s:g} s for {doing}; it was ended")

    def close(self, limit_s: float) -> None:
        """End the actor."""
        self.end()

    def end(self) -> None:
        """End the actor, also in the midst of a call."""
        with suppress(Exception):
            self._ray.kill(self._actor)

    @contextmanager
    def _ends_on_errors(self) -> Iterator[None]:
        """Raise the engine's errors as ``RemoteError``, and any other as ``ProcessLostError`` with the actor ended."""
        try:
            yield
        except self._ray.exceptions.RayTaskError as error:
            raise RemoteError(one_line(error.cause, 1000), type(error.cause).__name__) from None
        except Exception as error:
            self.end()
            text = one_line(error)
            # Ray writes the names of classes and ids before the reason.
            raise ProcessLostError(text[max(0, text.find("The actor is dead because")) :][:600]) from None


class _Cluster:
    """Ray, as the engines of one trainer process share it; ``EngineLostError`` if no cluster answers."""

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: Any) -> None:
        self.rollout = rollout
        # On the host the last bits depend on it; beside a GPU it would be more than Ray has set aside.
        threads = None if rollout.ray.num_gpus else torch.get_num_threads()
        self.arguments = (rollout, model, actor_device(rollout.ray.num_gpus), threads)
        """Of ``EngineActor.load``."""
        self.users: set[str] = set()
        """Names of the handles that are not closed."""
        self._lock = threading.Lock()
        # The last two that were put into Ray's store, with their places there: with requests ahead, engines may still
        # need the one before the newest.
        self._adapters: deque[tuple[Mapping[str, Tensor], Any]] = deque(maxlen=2)
        self._wanted = {"GPU": rollout.ray.num_gpus, "CPU": rollout.ray.num_cpus}
        address = _address(rollout)
        self._is_local = address is None
        if address is None:
            set_variables_of_ray()
        else:
            _check_reachable(address)
        # Ray reads some of its variables when it is imported.
        import ray

        self.ray: Any = ray
        self._started_here = not ray.is_initialized()
        if self._started_here:
            self._connect(address, device)
        # No restarts by Ray: a new actor has no model, and the pool must know of the loss.
        actor: Any = self.ray.remote(concurrency_groups={LIFE: 1}, max_restarts=0)(EngineActor)
        self.actor = actor.options(num_gpus=rollout.ray.num_gpus, num_cpus=rollout.ray.num_cpus)

    def stored(self, state: Mapping[str, Tensor]) -> Any:
        """The place of this adapter in Ray's store, where it is put once for all engines."""
        with self._lock:
            if not any(known is state for known, _ in self._adapters):
                self._adapters.append((state, self.ray.put(state)))
            return next(place for known, place in self._adapters if known is state)

    def leave(self, user: str) -> None:
        """Disconnect when no handle is left."""
        with self._lock:
            self.users.discard(user)
            # A connection that the user made before is the user's to end.
            if self._started_here and not self.users:
                self._started_here = False
                self.ray.shutdown()

    def check_room(self) -> None:
        """Refuse what will never fit: nobody adds nodes to a Ray that was started here."""
        has = self.ray.cluster_resources()
        if self._is_local and any(has.get(kind, 0) < wanted for kind, wanted in self._wanted.items()):
            raise ProcessLostError(f"Ray on this machine has no room for it: {self.describe_room()}")

    def describe_room(self) -> str:
        """The resources that an engine needs and those that the cluster has."""
        has = self.ray.cluster_resources()
        free = self.ray.available_resources()
        wanted = " and ".join(f"{number:g} {kind}" for kind, number in self._wanted.items())
        found = " and ".join(f"{has.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in self._wanted)
        nodes = sum(node["Alive"] for node in self.ray.nodes())
        return (
            f"asked for {wanted} ({_HERE}.ray.num_gpus, num_cpus) on one node, the {nodes} nodes have {found}; "
            f"ask for less, lower {_HERE}.engines or add nodes"
        )

    def _connect(self, address: str | None, device: Any) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        # Outputs of engines would mix with the trainer's; Ray keeps them in its own logs.
        quiet = {"configure_logging": False, "log_to_driver": False}
        try:
            if address is None:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                os.environ.update(gpus_beside(device))
                try:
                    self.ray.init("local", include_dashboard=False, **quiet)
                finally:
                    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                    os.environ.update({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
            else:
                self.ray.init(address, **quiet)
        except Exception as error:
            raise EngineLostError(one_line(error, 600)) from None
        # Ray takes SIGTERM, which the trainer answers with a checkpoint.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def actor_device(num_gpus: float) -> str:
    """The device of an engine for which Ray sets aside so many GPUs; Ray shows it no others."""
    return JOINED.join(f"cuda:{index}" for index in range(max(1, int(num_gpus)))) if num_gpus else "cpu"


def set_variables_of_ray() -> None:
    """Set this process's variables for a Ray that it starts, unless the user has set them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's memory monitor ends the largest processes, which engines are, when any other process fills the memory.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray listens to the network, and runs what it is sent. A library that was imported without a token knows none.
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def gpus_beside(device: Any) -> dict[str, str]:
    """``CUDA_VISIBLE_DEVICES`` without the trainer's ``device``, beside which Ray would otherwise place an engine."""
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    others = visible_gpus()
    del others[device.index or 0]
    return {"CUDA_VISIBLE_DEVICES": ",".join(others)}


def _address(rollout: RolloutConfig) -> str | None:
    """Of the cluster that engines run on; ``None``: Ray is started on this machine."""
    return rollout.ray.address or os.environ.get("RAY_ADDRESS") or None


def _check_reachable(address: str) -> None:
    """Raise where nothing listens at ``host:port``; Ray checks other forms of address itself."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise EngineLostError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with "
            f"`ray start --head` and give its address in {_HERE}.ray.address or RAY_ADDRESS"
        ) from None
