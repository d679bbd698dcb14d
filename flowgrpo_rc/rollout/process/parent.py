"""The trainer's hold on an engine's process: start, call, notice death and silence, end."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError
from flowgrpo_rc.rollout.placement import EngineTimeouts
from flowgrpo_rc.rollout.process.protocol import READY, Call, Reply, Start, receive, send
from flowgrpo_rc.rollout.process.spawned import Spawned


@dataclass(frozen=True)
class Launch:
    """How an engine's process is started."""

    module: str
    """What ``python -m`` runs; it calls ``child.serve``."""
    settings: Any
    """What the server there is made from."""
    environment: Mapping[str, str]
    """All its variables."""
    starts_others: bool = False
    """Whether it starts processes of its own. Then it ends them and itself with the trainer; else the kernel may do
    it, which takes it alone."""
    subject: str = "its process"
    """What messages about it begin with."""
    explain: Callable[[str], str] = str
    """Adds to an error of the process's what is known about it."""


class EngineProcess:
    """One process that serves one call at a time, and that can be started again and again.

    Any thread may call; ``close`` ends a call that another thread is in the midst of.
    """

    def __init__(self, launch: Launch, timeouts: EngineTimeouts) -> None:
        self._launch = launch
        self._timeouts = timeouts
        self._in_use = threading.Lock()
        """Held by whoever reads and writes the pipe."""
        self._process: Spawned | None = None
        self._connection: Connection | None = None
        """``None``: there is no process to call."""
        self._started = False
        """Whether it has ever been ready."""
        self._closed = False
        self._last_id = 0

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return -1 if self._process is None else self._process.pid

    @property
    def log(self) -> Path:
        """What the process that was started last writes; kept where it was lost."""
        return Path(os.devnull) if self._process is None else self._process.log

    def start(self) -> None:
        """Start the process, in place of one that is there, and wait until it is ready.

        Raises:
            EngineLostError: it died, took too long, or was closed meanwhile; or it ended with an error after it had
                worked before.
            RolloutError: it ended with an error at its first start.
        """
        with self._in_use:
            self._end()
            if not self._closed:
                self._spawn()
            if self._closed:
                self._end()
                raise EngineLostError(f"{self._launch.subject} was closed before starting")
            main_thread = threading.current_thread() is threading.main_thread()
            die_with_thread = main_thread and not self._launch.starts_others
            self._send(Start(self._launch.settings, os.getpid(), die_with_thread), "starting")
            self._wait(READY, self._timeouts.start_timeout_s, "starting")
            self._started = True

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer to this call and no other.

        Raises:
            EngineLostError: the process died or did not answer; it is gone then, until ``start``.
            AdapterMismatchError, RolloutError: it answered with an error.
        """
        doing, limit = "sampling", self._timeouts.request_timeout_s
        if method == "sync":
            doing, limit = "taking an adapter", self._timeouts.sync_timeout_s
        with self._in_use:
            if self._connection is None:
                raise EngineLostError(f"{self._launch.subject} {self.pid} is gone; log: {self.log}")
            self._last_id += 1
            self._send(Call(self._last_id, method, arguments), doing)
            reply = self._wait(self._last_id, limit, doing)
        if reply.error is not None:
            kind = AdapterMismatchError if reply.error_type == "AdapterMismatchError" else RolloutError
            raise kind(self._launch.explain(reply.error))
        return reply.value

    def close(self) -> None:
        """Ask it to end, and end it; in the midst of a call end it at once. Harmless when it is gone."""
        self._closed = True
        if not self._in_use.acquire(blocking=False):
            if self._process is not None:
                self._process.end()  # who is in the midst of a call notices
            return
        try:
            if self._connection is not None:
                self._ask_to_end(self._connection)
            self._end()
        finally:
            self._in_use.release()

    def _spawn(self) -> None:
        self._process = Spawned(self._launch.module, self._launch.environment, "rollout_engine_")
        self._connection = self._process.connection
        _limit_waits(self._connection, self._timeouts.silence_timeout_s)

    def _ask_to_end(self, connection: Connection) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeouts.close_timeout_s
        with suppress(OSError, EOFError):  # it has ended
            send(connection, Call(0, "close"))
            # Signs of life that nobody has read since the last call fill the pipe and would hold up its end.
            while (left := deadline - time.monotonic()) > 0 and connection.poll(left):
                connection.recv_bytes()
        self._process.wait(max(0.0, deadline - time.monotonic()))

    def _end(self, *, keep_log: bool = False) -> None:
        """End it now, with what it has started, and let go of it."""
        if self._process is not None:
            self._process.end()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            if not keep_log:
                self.log.unlink(missing_ok=True)

    def _send(self, message: Any, doing: str) -> None:
        assert self._connection is not None
        try:
            send(self._connection, message)
        except BlockingIOError:  # a stopped process reads nothing, and the pipe is full
            self._lost(f"did not take a request for {self._timeouts.silence_timeout_s:g} s while {doing}; it was ended")
        except OSError:
            self._lost(f"{self._exit()} before {doing}")

    def _wait(self, id: int, limit: float, doing: str) -> Reply:
        """The reply of this id; heartbeats, and replies to calls that were given up, are dropped."""
        assert self._connection is not None
        deadline = time.monotonic() + limit
        # Loading a large model may keep the interpreter busy for long.
        silence = limit if id == READY else self._timeouts.silence_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                heard = self._connection.poll(min(left, silence))
                message = receive(self._connection) if heard else None
            except BlockingIOError:  # stopped in the midst of a message
                self._lost(f"gave no sign of life for {silence:g} s while {doing}; it was ended")
            except (EOFError, OSError):
                self._lost(f"{self._exit()} while {doing}")
            if not heard and left > silence:
                self._lost(f"gave no sign of life for {silence:g} s while {doing}; it was ended")
            if isinstance(message, Reply) and message.id == id:
                return message
        self._lost(f"took more than {limit:g} s for {doing}; it was ended")

    def _exit(self) -> str:
        """How it ended, whose pipe is closed."""
        assert self._process is not None
        return "was closed" if self._closed else self._process.how_it_ended()

    def _lost(self, what: str) -> NoReturn:
        assert self._process is not None
        # An error of its own at the first start comes from what it was given, which would not change.
        final = not self._started and self._process.failed
        self._end(keep_log=not self._closed)
        last_line = "" if self._closed else self._process.last_line(self._launch.explain)
        kind = RolloutError if final else EngineLostError
        raise kind(f"{self._launch.subject} {self.pid} {what}{last_line}")


def _limit_waits(connection: Connection, seconds: float) -> None:
    """A read or write of ``connection`` that moves no byte for so long raises ``BlockingIOError``."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
