"""A program that runs a server and ends it when the process that wants it has gone, however that ended.

    python keeper.py PARENT COMMAND ARGUMENT...

The server is the leader of a process group of its own, which is ended as a whole: a signal to its leader alone would
leave the workers that hold the GPUs. It ends when the keeper gets SIGTERM, or as soon as the process PARENT is not the
keeper's parent any more, which is so even after a ``kill -9`` of it. Needs the standard library alone, so that it
starts at once. POSIX only, as the servers are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

POLL_S = 0.3
"""How often the keeper looks for its parent."""
GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
_PR_SET_PDEATHSIG = 1


def keep(parent: int, command: Sequence[str]) -> int:
    """Run the command until it ends, this process is told to stop, or ``parent`` has gone; returns an exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    server = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_keeper)
    try:
        while server.poll() is None and os.getppid() == parent and not stop.wait(POLL_S):
            pass
    finally:
        _end_group(server)
    return server.wait()


def _end_with_keeper() -> None:
    """Where the system can (Linux): the server ends with the keeper, should somebody kill that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(server: subprocess.Popen[bytes]) -> None:
    """End the server and everything in its group: asked first, then made to."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    # Also after it has ended by itself: its workers may be left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
