"""One server for all processes of a run on a machine: the first of them starts it and tells the others where it is."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from flowgrpo_rc.rewards.reward_model.config import SECTION


def is_first() -> bool:
    """Whether this is the process of a run that starts what its machine needs once; true without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def has_peers() -> bool:
    """Whether a launcher has started several processes on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")) != "1"


def tell(address: str) -> None:
    """Write the address where the other processes look for it, with who wrote it."""
    file = _file()
    pid = os.getpid()
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{address} {pid} {_started(pid)}")
    os.replace(name, file)


def forget() -> None:
    """Remove what ``tell`` has written."""
    with suppress(OSError):
        _file().unlink()


def wait_for(timeout_s: float) -> str:
    """The address that the first process has told; not what one that was killed has left behind.

    Raises:
        ValueError: it told none in time.
    """
    file = _file()
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        with suppress(OSError, ValueError):
            # Anybody may write into the folder; nobody else may send our images somewhere.
            if file.stat().st_uid == os.getuid():
                address, pid, started = file.read_text().split()
                if _started(int(pid)) == started:
                    return address
        time.sleep(0.1)
    raise ValueError(f"{SECTION}: the first process of the run did not start its server within {timeout_s:g} s")


def _started(pid: int) -> str:
    """When the process was started: in clock ticks since the machine was, or "alive" where the system has no /proc.

    Raises:
        OSError: there is no such process.
    """
    if Path("/proc/self/stat").exists():
        # Field 22. The second is the program's name in brackets, which may hold spaces and brackets of its own.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[22 - 3]
    os.kill(pid, 0)
    return "alive"


def _file() -> Path:
    """The same for all processes that one launcher started in one attempt."""
    launch = [os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    name = "-".join(["flowgrpo_rc-reward-model", str(os.getuid()), str(os.getppid()), *launch])
    return Path(tempfile.gettempdir()) / name
