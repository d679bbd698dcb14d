"""An engine elsewhere as a ``RolloutHandle``: started again after a loss, called and closed from any thread."""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.processes import ProcessLostError, RemoteError
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import EngineTimeouts


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
