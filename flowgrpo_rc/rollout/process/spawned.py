"""A process that is started for engines: how it begins, how it is ended, and what it said last."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path


class Spawned:
    """``python -m`` a module, whose first argument is the descriptor of its end of a pipe; its outputs go to a log.

    It is a session of its own, so that Ctrl-C in the terminal is the trainer's to answer, and it leads the group of all
    that it starts.

    Args:
        module: what to run.
        environment: all its variables.
        log_prefix: what the log's name begins with.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log_prefix: str) -> None:
        descriptor, name = tempfile.mkstemp(prefix=log_prefix, suffix=".log")
        self.log = Path(name)
        self.connection, theirs = Pipe()
        """The trainer's end of the pipe, which the user of this object reads, writes and closes."""
        self._ended = False
        """Whether it has been ended; its number may be another's by then."""
        with os.fdopen(descriptor, "wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The number of the process, which is also that of its group."""
        return self._process.pid

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error of its own."""
        return (self._process.poll() or 0) > 0

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or for so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self) -> None:
        """End it and what it has started; waits for itself alone. Harmless when it has ended."""
        if self._ended:
            return
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._ended = True

    def how_it_ended(self) -> str:
        """For a message, after its end of the pipe was closed: ``died of signal 9``."""
        self.wait(5.0)
        code = self._process.returncode
        if code is None:
            return "closed its pipe"
        return f"died of signal {-code}" if code < 0 else f"ended with code {code}"

    def last_line(self, explain: Callable[[str], str] = str) -> str:
        """For a message: ``; log: FILE, which ends: ...``; ``explain`` adds to the line what is known about it."""
        said = f"; log: {self.log}"
        with suppress(OSError):
            lines = self.log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
            return f"{said}, which ends: {explain(lines[-1].strip()[:600])}" if lines else f"{said}, which is empty"
        return said
