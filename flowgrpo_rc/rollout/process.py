"""Engines elsewhere: the handle of one, and those in processes of their own on this machine (``placement=process``)."""

import os
import threading
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.processes import ProcessLostError, RemoteError, RemoteObject, without_process_group
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutHandle, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import EngineTimeouts, RolloutConfig, Share, device_groups
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.threads import limit_spinning

_FIELD = "actor_rollout_ref.rollout.devices"


class EngineHandle:
    """A ``RolloutHandle``; a subclass starts the engine in ``_make``.

    Args:
        name: as ``RolloutHandle.name``.
        timeouts: when the engine counts as lost.
    """

    def __init__(self, name: str, timeouts: EngineTimeouts) -> None:
        self.name = name
        self._timeouts = timeouts
        self._engine: Any = None
        # Held during a call.
        self._in_use = threading.Lock()
        self._has_worked = False
        self._closed = False

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return -1 if self._engine is None else self._engine.pid

    def start(self) -> None:
        """Start an engine, in place of one that is there, and wait until its model is loaded.

        Raises:
            EngineLostError: it died, took too long, was closed meanwhile, or failed after it had worked before.
            RolloutError: the engine could not be made the first time. Its cause is in the settings, which stay.
        """
        with self._in_use:
            self._end()
            try:
                if not self._closed:
                    self._engine = self._make()
                # A close while it was made found nothing to end.
                if self._closed or self._engine is None:
                    self._end()
                    raise EngineLostError("it was closed before starting")
                self._engine.wait_until_ready(self._timeouts.start_timeout_s)
            except ProcessLostError as error:
                raise EngineLostError(self._loss(str(error))) from None
            except RemoteError as error:
                # Later the machine may be the cause, and a new start may help.
                raise (EngineLostError if self._has_worked else RolloutError)(self._loss(str(error))) from None
            self._has_worked = True

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutHandle.sync``."""
        return self.call("sync", state, version)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutHandle.generate``."""
        return self.call("generate", request)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine and return its result.

        Raises:
            EngineLostError: the engine died or did not answer; it is gone until ``start``.
            AdapterMismatchError, RolloutError: the method raised.
        """
        syncs = method == "sync"
        limit_s = self._timeouts.sync_timeout_s if syncs else self._timeouts.request_timeout_s
        doing = "taking an adapter" if syncs else "sampling"
        with self._in_use:
            if self._engine is None:
                raise EngineLostError("it has not been started")
            try:
                return self._engine.call(method, *arguments, limit_s=limit_s, doing=doing)
            except ProcessLostError as error:
                raise EngineLostError(self._loss(str(error))) from None
            except RemoteError as error:
                # By name, since classes of the other process are not sent.
                kind = AdapterMismatchError if error.kind == AdapterMismatchError.__name__ else RolloutError
                raise kind(str(error)) from None

    def close(self) -> None:
        """Let the engine end, and end it; in the midst of a call end it at once. Harmless when it is gone."""
        self._closed = True
        # Without the lock a call is in progress, and a polite end would have to wait for it.
        if self._engine is not None and self._in_use.acquire(blocking=False):
            try:
                self._engine.close(self._timeouts.close_timeout_s)
            finally:
                self._in_use.release()
        self._end()

    def _make(self) -> Any:
        """Start the engine; returns an object with the methods of a ``RemoteObject``."""
        raise NotImplementedError

    def _loss(self, error: str) -> str:
        """The reason of a loss in a message."""
        return "it was closed" if self._closed else error

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.end()


class EngineProcess(EngineHandle):
    """An engine in a process, which ends with this one.

    Args:
        name: as ``RolloutHandle.name``.
        make: ``module:class`` of the object in the process, with the methods ``sync``, ``generate`` and ``close``.
        arguments: of ``make``.
        environment: all variables of the process.
        timeouts: when it counts as lost.
        subject: how messages about a loss begin.
    """

    def __init__(
        self,
        name: str,
        make: str,
        *arguments: Any,
        environment: Mapping[str, str],
        timeouts: EngineTimeouts,
        subject: str = "its process",
    ) -> None:
        super().__init__(name, timeouts)
        self._target = (make, *arguments)
        self._environment = environment
        self._subject = subject

    def _make(self) -> RemoteObject:
        return RemoteObject(*self._target, environment=self._environment, silence_s=self._timeouts.silence_timeout_s)

    def _loss(self, error: str) -> str:
        if self._closed:
            return f"{self._subject} {self.pid} was closed"
        assert isinstance(self._engine, RemoteObject)
        # Saved for a loss only: the end after a close is expected.
        log = self._engine.save_output("rollout_engine_")
        return f"{self._subject} {self.pid} {error}; {log}"


class ProcessHandle(EngineProcess):
    """An engine with a model of its own in a process on one device, which sees no other GPU.

    It has the trainer's number of threads, so that it draws the same bits on the same kind of device.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the section ``actor_rollout_ref.model``.
        device: where it computes, as this process names it.
        number: distinguishes it from the other engines in messages.

    Raises:
        ValueError: this process does not see the device.
    """

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: str, number: int = 0) -> None:
        check_devices(device)
        inside, environment = on_one_device(device)
        super().__init__(
            f"process {number} ({device})",
            "flowgrpo_rc.rollout.build:build_engine_alone",
            *(rollout, model, inside),
            environment=environment,
            timeouts=rollout.process,
        )


def process_handles(
    rollout: RolloutConfig, lora: ModelConfig, device: Any, share: Share, model: DiffusionModel
) -> list[RolloutHandle]:
    """This trainer process's engines on this machine, none of them started; arguments as of ``build_engine``.

    Raises:
        ImportError, ValueError: as ``check_process``, ``ProcessHandle`` and the engine's own handle.
    """
    # Numbers are unique on the machine, so that messages of several trainer processes stay apart.
    numbered = enumerate(own_groups(rollout.devices, share) or [(str(device),)])
    groups = {share.index + place * share.count: group for place, group in numbered}
    own = ENGINES[rollout.name].handle
    if own is None:
        return [ProcessHandle(rollout, lora, device, number) for number, (device,) in groups.items()]
    return [resolve_name(own)(rollout, model, lora, devices, number) for number, devices in groups.items()]


def check_process(rollout: RolloutConfig, share: Share) -> None:
    """Raise ``ValueError`` unless this process sees its devices, and there is one for each trainer process."""
    check_devices(*(device for group in own_groups(rollout.devices, share) for device in group))


def engine_environment(*devices: str) -> dict[str, str]:
    """The trainer's environment without its process group, and with these GPUs alone, numbered from 0."""
    own = without_process_group(os.environ)
    # vllm would report each start to its authors, and fill the output with progress.
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | own
    limit_spinning(environment)
    if not torch.accelerator.is_available():
        # vllm cannot find out by itself that there is no accelerator.
        environment.setdefault("VLLM_TARGET_DEVICE", "cpu")
    gpus = [torch.device(device).index or 0 for device in devices if torch.device(device).type == "cuda"]
    if gpus:
        visible = visible_gpus()
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] for gpu in gpus)
    return environment


def on_one_device(device: str) -> tuple[str, dict[str, str]]:
    """For a process that sees no GPU but ``device``: its name there, and the environment, with this process's number of
    threads. With another number the last bits differ."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return "cuda:0" if device.startswith("cuda") else device, engine_environment(device) | threads


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them: by number or by UUID."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown.split(",") if shown else [str(index) for index in range(torch.cuda.device_count())]


def check_devices(*devices: str, field: str = _FIELD) -> None:
    """Raise ``ValueError`` for GPUs of the setting ``field`` that this process does not see."""
    seen = torch.cuda.device_count()
    for device in devices:
        if torch.device(device).type == "cuda" and (torch.device(device).index or 0) >= seen:
            there = f"cuda:0 to cuda:{seen - 1}" if seen else "no GPU"
            raise ValueError(f"{field}: got {device}, but this process sees {there}; name devices that are there")


def own_groups(devices: list[str] | None, share: Share, field: str = _FIELD) -> list[tuple[str, ...]]:
    """The devices of this trainer process's engines, of the setting ``field``; none where they use the trainer's own.
    Raises ``ValueError`` where some process gets none."""
    if devices is None:
        return []
    groups = device_groups(devices, field)
    if len(groups) < share.count:
        raise ValueError(
            f"{field}: has {len(groups)} engines for the {share.count} trainer processes of this machine; name at "
            "least one for each, or start fewer processes"
        )
    # Dealt in turn, so that every trainer process has as many as the others, or one more.
    return groups[share.index :: share.count]
