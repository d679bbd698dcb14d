"""The trainer's hold on the engine's process: start, call, notice death and silence, end."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import RolloutError
from flowgrpo_rc.rollout.config import VllmOmniConfig
from flowgrpo_rc.rollout.vllm_omni.plain_torch import with_cause
from flowgrpo_rc.rollout.vllm_omni.protocol import READY, Call, Reply, Settings, receive, send
from flowgrpo_rc.threads import limit_spinning

_DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The trainer's process group is not the engine's."""


class EngineDownError(RolloutError):
    """The engine's process died, or was ended because it hung; another start may help."""


class EngineProcess:
    """One process that serves one call at a time."""

    def __init__(self, settings: Settings, timeouts: VllmOmniConfig, environment: Mapping[str, str]) -> None:
        self._timeouts = timeouts
        self._last_id = 0
        descriptor, name = tempfile.mkstemp(prefix="vllm_omni_", suffix=".log")
        self.log = Path(name)
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "flowgrpo_rc.rollout.vllm_omni.server", str(theirs.fileno())]
        with os.fdopen(descriptor, "wb") as log, theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the trainer's to answer
            )
        main_thread = threading.current_thread() is threading.main_thread()
        self._send(replace(settings, parent=os.getpid(), die_with_thread=main_thread), "starting")
        self._wait(READY, timeouts.start_timeout_s, "starting")

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, argument: Any) -> Any:
        """The answer to this call and no other.

        Raises:
            EngineDownError: the process died or did not answer; it is gone then.
            AdapterMismatchError, RolloutError: it answered with an error.
        """
        self._last_id += 1
        doing, limit = "sampling", self._timeouts.request_timeout_s
        if method == "sync":
            doing, limit = "taking an adapter", self._timeouts.sync_timeout_s
        self._send(Call(self._last_id, method, argument), doing)
        reply = self._wait(self._last_id, limit, doing)
        if reply.error is not None:
            kind = AdapterMismatchError if reply.error_type == "AdapterMismatchError" else RolloutError
            raise kind(with_cause(reply.error))
        return reply.value

    def close(self) -> None:
        """Ask it to end, and end it; harmless when it is gone."""
        deadline = time.monotonic() + self._timeouts.close_timeout_s
        with suppress(OSError, EOFError):  # it has ended
            send(self._connection, Call(0, "close", None))
            # Signs of life that nobody has read since the last call fill the pipe and would hold up its end.
            while (left := deadline - time.monotonic()) > 0 and self._connection.poll(left):
                self._connection.recv_bytes()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self, *, keep_log: bool = False) -> None:
        """End it now."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._connection.close()
        if not keep_log:
            self.log.unlink(missing_ok=True)

    def _send(self, message: Any, doing: str) -> None:
        """A stopped process reads nothing, and a full pipe blocks: hence a thread."""
        errors: list[OSError] = []

        def send_message() -> None:
            try:
                send(self._connection, message)
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=send_message, daemon=True)
        thread.start()
        thread.join(self._timeouts.silence_timeout_s)
        if thread.is_alive():
            self._down(f"did not take a request for {self._timeouts.silence_timeout_s:g} s while {doing}; it was ended")
        if errors:
            self._down(f"{self._exit()} before {doing}")

    def _wait(self, id: int, limit: float, doing: str) -> Reply:
        """The reply of this id; heartbeats, and replies to calls that were given up, are dropped."""
        deadline = time.monotonic() + limit
        # Loading a large model may keep the interpreter busy for long.
        silence = limit if id == READY else self._timeouts.silence_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                heard = self._connection.poll(min(left, silence))
                message = receive(self._connection) if heard else None
            except (EOFError, OSError):
                self._down(f"{self._exit()} while {doing}")
            if not heard and left > silence:
                self._down(f"gave no sign of life for {silence:g} s while {doing}; it was ended")
            if isinstance(message, Reply) and message.id == id:
                return message
        self._down(f"took more than {limit:g} s for {doing}; it was ended")

    def _exit(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"died of signal {-code}" if code < 0 else f"ended with code {code}"

    def _down(self, what: str) -> NoReturn:
        self.kill(keep_log=True)
        raise EngineDownError(f"the vllm_omni engine's process {self.pid} {what}; log: {self.log}{self._last_line()}")

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = self.log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
            return f", which ends: {with_cause(lines[-1].strip()[:600])}" if lines else ", which is empty"
        return ""


def engine_environment(device: Any) -> dict[str, str]:
    """The trainer's environment without its process group; with one GPU, the trainer's, if it has one."""
    import torch

    own = {k: v for k, v in os.environ.items() if k not in _DISTRIBUTED and not k.startswith("TORCHELASTIC_")}
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | own
    limit_spinning(environment)
    if not torch.accelerator.is_available():
        environment.setdefault("VLLM_TARGET_DEVICE", "cpu")
    device = torch.device(device)
    if device.type == "cuda":
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        index = device.index or 0
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return environment
