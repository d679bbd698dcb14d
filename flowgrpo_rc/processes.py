"""Start, watch and end child processes; every process that this package starts comes from here.

A child is a fresh interpreter: a fork would inherit CUDA contexts, thread pools and locks in an unknown state. It
imports what its parent imports, since it gets the parent's ``sys.path``; the working folder is not on it. It leads a
session and a process group of its own, so that Ctrl-C in a terminal reaches the parent alone. Its whole group ends when
it ends or when the parent does, whatever it is doing then. ``ChildProcess`` is such a process, and ``RemoteObject`` is
one that holds an object whose methods the parent calls.
"""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flowgrpo_rc.messages import one_line, printable

HEARTBEAT_S = 0.5
"""Seconds between two signs of life of a ``RemoteObject``."""
# Seconds between two looks of a child's guard at the processes that it watches.
_GUARD_S = 0.25
# How much of a child's output is kept.
_LOG_BYTES = 64 * 1024
# Id of the first reply, which answers no call: the object has been made.
_READY = 0
# Variables by which torchrun makes processes one group.
_PROCESS_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PACKAGE_ROOT = str(Path(__file__).parents[1])
# -c puts the working folder first on the path, so the path is replaced before anything else is imported. The root comes
# first for one import, since the child must run this package and not another copy of it.
_PROGRAM = """\
import sys
sys.path[:] = [{root!r}, *{path!r}]
import flowgrpo_rc
sys.path[:] = [*{path!r}, {root!r}]
from flowgrpo_rc.processes import _run_child
_run_child({descriptor}, {parent})
"""


class ProcessLostError(RuntimeError):
    """A child died, hung or was ended, so that it will not answer."""


class RemoteError(RuntimeError):
    """The object in a child raised; the text is the error's, in a line, and ``kind`` the name of its class."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class ChildProcess:
    """A Python process that calls ``target(connection, *arguments)`` and ends when that returns.

    Args:
        target: ``module:function``, which the child imports. An error that it raises is the last line of the output.
        arguments: of the function, after the child's end of the pipe; they are pickled.
        environment: all variables of the child; ``None`` takes the parent's.
    """

    def __init__(self, target: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> None:
        self.connection, theirs = Pipe()
        """The parent's end of the pipe."""
        path = [folder for folder in sys.path if folder]
        program = _PROGRAM.format(root=_PACKAGE_ROOT, path=path, descriptor=theirs.fileno(), parent=os.getpid())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=None if environment is None else dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._output = b""
        # In memory and bounded: a file would grow without end, and stay behind when the parent is killed.
        self._reader = threading.Thread(target=self._read_output, name=f"output of process {self.pid}", daemon=True)
        self._reader.start()
        with suppress(OSError):  # it has ended already, which the first read notices
            _send(self.connection, (target, pickle.dumps(arguments, protocol=pickle.HIGHEST_PROTOCOL)))

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, at most so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self) -> None:
        """Kill it with its process group. Harmless when it has ended: then its guard ends the group."""
        if self.exit_code is None:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        # Another thread may be reading the pipe, so it is left to notice by itself.
        self._process.wait()

    def how_it_ended(self) -> str:
        """``died of signal 9`` or ``ended with code 1``, once its end of the pipe is closed."""
        self.wait(5.0)
        code = self.exit_code
        if code is None:
            return "closed its pipe"
        return f"died of signal {-code}" if code < 0 else f"ended with code {code}"

    def output(self) -> str:
        """The last of what it has written to its standard output and error."""
        if self.exit_code is not None:
            self._reader.join(5.0)
        return self._output.decode(errors="replace")

    def save_output(self, prefix: str) -> str:
        """Write ``output`` to a temporary file, for a message: ``log: FILE, which ends: LINE``."""
        text = self.output().strip()
        with tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".log", delete=False) as log:
            log.write(text)
        if not text:
            return f"log: {log.name}, which is empty"
        return f"log: {log.name}, which ends: {printable(text.splitlines()[-1].strip()[:600])}"

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while chunk := stream.read(_LOG_BYTES):
                self._output = (self._output + chunk)[-_LOG_BYTES:]


class RemoteObject(ChildProcess):
    """A child that makes an object and answers calls of its methods, one at a time.

    It gives signs of life during computations too, which distinguishes a slow process from a stopped one.

    Args:
        make: ``module:function`` (or class) that makes the object; its method ``close`` is called at the end.
        arguments: of ``make``.
        environment: as ``ChildProcess``.
        silence_s: seconds without a sign of life, after which it is ended.
    """

    def __init__(
        self, make: str, *arguments: Any, environment: Mapping[str, str] | None = None, silence_s: float = 60.0
    ) -> None:
        super().__init__(f"{__name__}:_serve", make, *arguments, environment=environment)
        self._silence_s = silence_s
        self._ids = count(_READY + 1)
        # A read or write that moves no byte for so long raises ``BlockingIOError``.
        limit = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait until the object has been made.

        Raises:
            ProcessLostError: the process died, or took longer than ``limit_s`` seconds.
            RemoteError: the object could not be made; its error is in the output.
        """
        try:
            # Loading a large model may keep the interpreter busy for longer than a silence may last.
            self._receive(_READY, limit_s, silence_s=limit_s, doing="starting")
        except ProcessLostError as error:
            # A positive code is an exception in Python; a signal is negative, and may come from a full memory.
            if (self.exit_code or 0) > 0:
                raise RemoteError(str(error)) from None
            raise

    def call(self, method: str, *arguments: Any, limit_s: float, doing: str) -> Any:
        """Call a method and return its result.

        Args:
            method: its name.
            arguments: its positional arguments; they are pickled, as is the answer.
            limit_s: seconds, after which the process is ended.
            doing: names the call in messages, e.g. ``sampling``.

        Raises:
            ProcessLostError: the process died or did not answer in time; it is gone.
            RemoteError: the method raised.
        """
        id = next(self._ids)
        with self._losses(self._silence_s, doing):
            _send(self.connection, (id, method, arguments))
        value, error = self._receive(id, limit_s, self._silence_s, doing)
        if error is not None:
            raise RemoteError(*error)
        return value

    def close(self, limit_s: float) -> None:
        """Have the object closed and the process end by itself; end it after ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        with suppress(OSError, EOFError):  # it has ended
            _send(self.connection, (next(self._ids), "close", ()))
            # Signs of life since the last call fill the pipe, and would keep the process from ending.
            while (left := deadline - time.monotonic()) > 0 and self.connection.poll(left):
                self.connection.recv_bytes()
        self.wait(max(0.0, deadline - time.monotonic()))
        self.end()

    def _receive(self, id: int, limit_s: float, silence_s: float, doing: str) -> tuple[Any, tuple[str, str] | None]:
        """Value and error of the reply with this id; signs of life are dropped."""
        deadline = time.monotonic() + limit_s
        with self._losses(silence_s, doing):
            while (left := deadline - time.monotonic()) > 0:
                if self.connection.poll(min(left, silence_s)):
                    message = _receive(self.connection)
                    if message is not None and message[0] == id:
                        return message[1:]
                elif left > silence_s:
                    raise BlockingIOError
            raise TimeoutError(f"took more than {limit_s:g} s for {doing}; it was ended")

    @contextmanager
    def _losses(self, silence_s: float, doing: str) -> Iterator[None]:
        """End the process on errors of the pipe, and raise them as ``ProcessLostError``."""
        try:
            yield
        except TimeoutError as error:
            reason = str(error)
        except BlockingIOError:  # nothing came, or it is stopped in the midst of a message
            reason = f"gave no sign of life for {silence_s:g} s while {doing}; it was ended"
        except (EOFError, OSError):
            reason = f"{self.how_it_ended()} while {doing}"
        else:
            return
        self.end()
        raise ProcessLostError(reason)


def without_process_group(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without a launcher's variables, for a child that is not one of the launched processes."""
    return {k: v for k, v in environment.items() if k not in _PROCESS_GROUP and not k.startswith("TORCHELASTIC_")}


def run_command(connection: Connection, command: Sequence[str]) -> None:
    """Target of a ``ChildProcess`` that becomes another program; it ends with the parent like every child."""
    connection.close()
    os.execvp(command[0], list(command))


def _run_child(descriptor: int, parent: int) -> None:
    """The whole life of a child."""
    _fork_guard(descriptor, parent)
    # A parent that was started by nohup or by a script in the background hands ignored signals down.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    connection = Connection(descriptor)
    target, arguments = _receive(connection)
    resolve_name(target)(connection, *pickle.loads(arguments))


def _fork_guard(descriptor: int, parent: int) -> None:
    """Fork a process that kills this one's group as soon as this one or its parent is gone.

    A thread could not do that: it stands still where this process is stopped or computes without releasing the
    interpreter. The kernel's own signal for the death of a parent (``PR_SET_PDEATHSIG``) comes when the thread that
    started the child ends, and reaches no grandchildren.
    """
    child = os.getpid()
    if os.fork():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # An open end of the pipe here would hide the child's end from the parent.
    os.closerange(0, descriptor + 1)
    while os.getppid() == child and _has_parent(child, parent):
        time.sleep(_GUARD_S)
    os.killpg(child, signal.SIGKILL)


def _has_parent(process: int, parent: int) -> bool:
    """False once ``parent`` has ended, also while it is a zombie. True where the system has no ``/proc``."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return not Path("/proc/self/stat").exists()
    return int(state.rpartition(")")[2].split()[1]) == parent


def _serve(connection: Connection, make: str, *arguments: Any) -> None:
    """Target of a ``RemoteObject``: make the object, and answer calls until ``close`` or the end of the pipe."""
    lock = threading.Lock()
    threading.Thread(target=_send_heartbeats, args=(connection, lock), daemon=True).start()
    served = resolve_name(make)(*arguments)
    reply = (_READY, None, None)
    with suppress(EOFError, OSError):  # the parent has closed the pipe, or is gone
        while True:
            with lock:
                _send(connection, reply)
            del reply  # it may hold gigabytes, which need not be kept until the next call
            id, method, call_arguments = _receive(connection)
            if method == "close":
                break
            try:
                reply = (id, getattr(served, method)(*call_arguments), None)
            except Exception as error:
                traceback.print_exc()
                reply = (id, None, (one_line(error, 1000), type(error).__name__))
    with suppress(Exception):
        served.close()
    sys.stdout.flush()
    # Libraries leave threads behind that would keep the interpreter from ending.
    os._exit(0)


def _send_heartbeats(connection: Connection, lock: threading.Lock) -> None:
    """A parent that reads nothing for a while lets them fill the pipe, and this thread waits."""
    with suppress(OSError):
        while True:
            time.sleep(HEARTBEAT_S)
            with lock:
                _send(connection, None)
    os._exit(1)  # where there is no guard, this is how the end of the parent is noticed


def _send(connection: Connection, message: Any) -> None:
    # Plain pickle: torch's own reductions would pass tensors through shared memory files that outlive a kill.
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _receive(connection: Connection) -> Any:
    """The next message. Both ends of the pipe are processes of this package, so that pickles can be trusted."""
    return pickle.loads(connection.recv_bytes())
