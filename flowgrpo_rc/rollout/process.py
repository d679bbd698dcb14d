"""Engines in processes of their own on this machine: ``placement=process``."""

import threading
import weakref
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.processes import ProcessLostError, RemoteError, RemoteObject
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutHandle, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.build import check_elsewhere
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.devices import check_devices, engine_environment, inside, with_threads
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.rollout.placement import EngineTimeouts, Share, device_groups


class EngineProcess:
    """An engine's process, which can be started again after a loss.

    Any thread may call; ``close`` also ends a call in progress in another thread.

    Args:
        make: ``module:class`` of the object in the process, with the methods ``sync``, ``generate`` and ``close``.
        arguments: of ``make``.
        environment: all variables of the process.
        timeouts: when it counts as lost.
        subject: how messages begin.
        explain: adds to an error of the process what is known about it.
    """

    def __init__(
        self,
        make: str,
        *arguments: Any,
        environment: Mapping[str, str],
        timeouts: EngineTimeouts,
        subject: str = "its process",
        explain: Callable[[str], str] = str,
    ) -> None:
        self._make = make
        self._arguments = arguments
        self._environment = environment
        self._timeouts = timeouts
        self._subject = subject
        self._explain = explain
        # Held during a call.
        self._in_use = threading.Lock()
        self._process: RemoteObject | None = None
        self._has_worked = False
        self._closed = False

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return -1 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a process, in place of one that is there, and wait until the engine has been made.

        Raises:
            EngineLostError: it died, took too long, was closed meanwhile, or failed after it had worked before.
            RolloutError: the engine could not be made the first time. Its cause is in the settings, which stay.
        """
        with self._in_use:
            if self._process is not None:
                self._process.end()
            if not self._closed:
                self._process = RemoteObject(
                    self._make,
                    *self._arguments,
                    environment=self._environment,
                    silence_s=self._timeouts.silence_timeout_s,
                )
            if self._closed or self._process is None:
                self._end()
                raise EngineLostError(f"{self._subject} was closed before starting")
            try:
                self._process.wait_until_ready(self._timeouts.start_timeout_s)
            except ProcessLostError as error:
                # A positive code is an exception in Python; a signal is negative, and may come from a full memory.
                failed = (self._process.exit_code or 0) > 0
                raise self._loss(error, RolloutError if failed and not self._has_worked else EngineLostError) from None
            self._has_worked = True

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine and return its result.

        Raises:
            EngineLostError: the process died or did not answer; it is gone until ``start``.
            AdapterMismatchError, RolloutError: the method raised.
        """
        limit_s = self._timeouts.request_timeout_s
        doing = "sampling"
        if method == "sync":
            limit_s = self._timeouts.sync_timeout_s
            doing = "taking an adapter"
        with self._in_use:
            if self._process is None:
                raise EngineLostError(f"{self._subject} has not been started")
            try:
                return self._process.call(method, *arguments, limit_s=limit_s, doing=doing)
            except ProcessLostError as error:
                raise self._loss(error, EngineLostError) from None
            except RemoteError as error:
                # By name, since classes of the other process are not sent.
                kind = AdapterMismatchError if error.kind == AdapterMismatchError.__name__ else RolloutError
                raise kind(self._explain(str(error))) from None

    def close(self) -> None:
        """Let the process end, and end it; in the midst of a call end it at once. Harmless when it is gone."""
        self._closed = True
        # Without the lock a call is in progress, and a polite end would have to wait for it.
        if self._process is not None and self._in_use.acquire(blocking=False):
            try:
                self._process.close(self._timeouts.close_timeout_s)
            finally:
                self._in_use.release()
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()

    def _loss(self, error: ProcessLostError, kind: type[RolloutError]) -> RolloutError:
        assert self._process is not None
        if self._closed:
            return EngineLostError(f"{self._subject} {self.pid} was closed")
        # Saved for a loss only: the end after a close is expected.
        log = self._process.save_output("rollout_engine_", self._explain)
        return kind(f"{self._subject} {self.pid} {error}; {log}")


class ProcessHandle:
    """An engine with a model of its own in a process on one device.

    It has the trainer's number of threads, so that it draws the same bits on the same kind of device, and sees no GPU
    but its own. Its time limits are in ``rollout.process``.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the section ``actor_rollout_ref.model``.
        device: where it computes, as this process names it.
        number: distinguishes it from the other engines in messages.

    Raises:
        ValueError: this process does not see the device, or the engine runs in the trainer's process only.
    """

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: str, number: int = 0) -> None:
        self.name = f"process {number} ({device})"
        check_elsewhere(rollout)
        check_devices(device)
        self._process = EngineProcess(
            "flowgrpo_rc.rollout.build:build_engine_alone",
            *(rollout, model, inside(device)),
            environment=with_threads(engine_environment(device)),
            timeouts=rollout.process,
        )
        self._at_exit = weakref.finalize(self, self._process.close)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._process.pid

    def start(self) -> None:
        """As ``RolloutHandle.start``; returns when the model is loaded."""
        self._process.start()

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutHandle.sync``; pickling a view would send all of its storage."""
        return self._process.call("sync", dict(state), version)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutHandle.generate``."""
        return self._process.call("generate", request)

    def close(self) -> None:
        """As ``RolloutHandle.close``."""
        self._process.close()


def process_handles(
    rollout: RolloutConfig, lora: ModelConfig, device: Any, share: Share, model: DiffusionModel
) -> list[RolloutHandle]:
    """As ``PlacementEntry.handles``: this trainer process's engines on this machine, none of them started.

    Raises:
        ImportError, ValueError: as ``check_process``, ``ProcessHandle`` and the engine's own handle.
    """
    # Numbers are unique on the machine, so that messages of several trainer processes stay apart.
    numbered = enumerate(_own_groups(rollout, share) or [(str(device),)])
    groups = {share.index + place * share.count: group for place, group in numbered}
    own = ENGINES[rollout.name].handle
    if own is None:
        return [ProcessHandle(rollout, lora, device, number) for number, (device,) in groups.items()]
    make = resolve_name(own).from_config
    return [make(rollout, model, lora, devices, number) for number, devices in groups.items()]


def check_process(rollout: RolloutConfig, share: Share) -> None:
    """As ``PlacementEntry.check``: this process sees its devices, and there is one for each trainer process."""
    check_devices(*(device for group in _own_groups(rollout, share) for device in group))


def _own_groups(rollout: RolloutConfig, share: Share) -> list[tuple[str, ...]]:
    """The devices of this trainer process's engines; none where they use the trainer's own."""
    if rollout.devices is None:
        return []
    groups = device_groups(rollout.devices)
    if len(groups) < share.count:
        raise ValueError(
            f"actor_rollout_ref.rollout.devices: has {len(groups)} engines for the {share.count} trainer processes of "
            "this machine; name at least one for each, or start fewer processes"
        )
    # Dealt in turn, so that every trainer process has as many as the others, or one more.
    return groups[share.index :: share.count]
