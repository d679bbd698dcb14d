"""One server for all processes of a run on a machine: the first starts it and writes its address for the others."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from flowgrpo_rc.rewards.reward_model.config import SECTION


def is_first() -> bool:
    """Return True in the process that starts what its machine needs once; also without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def has_peers() -> bool:
    """Return True if a launcher has started several processes on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")) != "1"


def write_address(address: str) -> None:
    """Write the address, and this process's id, for the other processes."""
    file = _file()
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{address} {os.getpid()}")
    # Renamed, so that nobody reads half of it.
    os.replace(name, file)


def remove_address() -> None:
    """Remove the file of ``write_address``."""
    with suppress(OSError):
        _file().unlink()


def wait_for_address(timeout_s: float) -> str:
    """The address that the first process has written. One that a killed process left behind does not count.

    Raises:
        ValueError: there is none within ``timeout_s``.
    """
    file = _file()
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        with suppress(OSError, ValueError):
            # Every user may write into the folder, and images go to this address.
            if file.stat().st_uid == os.getuid():
                address, pid = file.read_text().split()
                # Signal 0 only finds out that the process exists.
                os.kill(int(pid), 0)
                return address
        time.sleep(0.1)
    raise ValueError(f"{SECTION}: the first process of the run did not start its server within {timeout_s:g} s")


def _file() -> Path:
    """The same path in all processes of one attempt of a launcher."""
    launch = [os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    name = "-".join(["flowgrpo_rc-reward-model", str(os.getuid()), str(os.getppid()), *launch])
    return Path(tempfile.gettempdir()) / name
