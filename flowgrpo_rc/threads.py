"""Limit the busy waiting of torch's threads.

torch splits an operation over the cores and then waits for every thread. A waiting thread spins, to be ready for the
next operation some tens of microseconds later. libgomp, which torch's wheels contain for Linux, spins 300,000 times
before a thread sleeps: 5 to 15 ms on x86-64. On a busy machine that is longer than a time slice, and the awaited thread
may have lost its core to the thread that spins; a step then takes many times its share of the machine.

A fraction of a millisecond is as good on a quiet machine. On a busy machine threads sleep at once, so that a step
takes about its share; on two quiet cores that would cost about 40 % (``benchmarks/busy_machine.py``). libgomp reads the
number once. The number of threads is not changed, so results stay the same to the last bit.
"""

import os
import platform
import statistics
import time
from collections.abc import MutableMapping
from pathlib import Path

SPINS = 8000
"""Turns before a waiting thread sleeps on a quiet machine: 0.4 ms with a ``pause`` of 140 cycles (Intel since Skylake),
0.2 ms with 65 (AMD)."""

_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which a user sets the wait; libgomp reads them once, when it is loaded."""
_LOAD = Path("/proc/loadavg")
_LOOKS = 7
_BETWEEN_LOOKS = 0.01
"""Seconds, long enough to average over short bursts of other processes."""


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads of a process with this environment sleep soon, unless the user has set the wait."""
    # On Arm a turn takes a cycle or two, so that libgomp's own number is a short wait.
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return
    if not any(name in environment for name in _SET_BY_USER):
        environment["GOMP_SPINCOUNT"] = "0" if is_busy() else str(SPINS)


def is_busy() -> bool:
    """True if other processes want as many cores as the machine has; false on systems without a load average."""
    others: list[int] = []
    try:
        for _ in range(_LOOKS):
            running, _, _ = _LOAD.read_text().split()[3].partition("/")
            others.append(int(running) - 1)  # this process is one of them
            time.sleep(_BETWEEN_LOOKS)
    except (OSError, ValueError, IndexError):
        return False
    return statistics.median(others) >= (os.cpu_count() or 1)
