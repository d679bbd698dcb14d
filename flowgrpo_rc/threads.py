"""How long the threads that share a computation wait for each other awake.

torch splits most operations of a model over the processor's cores, and at the end of each it waits until every thread
has done its part. A waiting thread spins, so that it is there at once when the next operation comes, which is some tens
of microseconds later. libgomp, which torch's wheels bring for Linux, lets it spin 300,000 times before it sleeps: 5 to
15 ms on x86-64, where each turn is a ``pause`` instruction. On a machine with other work that is longer than a time
slice: the thread that is waited for has lost its core to another process, or to the very thread that waits, and a step
of thousands of operations takes many times as long as its share of the machine allows.

Waiting a fraction of a millisecond is as good on a quiet machine and wastes less on a busy one. Where the machine is
busy at the start, threads sleep at once: then a step takes about what its share of the machine allows, while on two
quiet cores it would take about 40 % longer (``benchmarks/busy_machine.py``). libgomp reads the number once, so that
what comes later cannot change it. The number of threads stays as it is, and with it every result, to the last bit.
"""

import os
import platform
import statistics
import time
from collections.abc import MutableMapping
from pathlib import Path

SPINS = 8000
"""Turns before a waiting thread sleeps on a quiet machine: 0.4 ms where a ``pause`` takes 140 cycles (Intel since
Skylake), 0.2 ms where it takes 65 (AMD). From about 3,000 of the former on it is as fast as libgomp's own number."""

_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Either of them says how long to wait; libgomp reads them once, when it is loaded."""
_LOAD = Path("/proc/loadavg")
_LOOKS = 7
_BETWEEN_LOOKS = 0.01
"""Seconds: long enough that a short burst of another process is not taken for its habit."""


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads of a process that starts with this environment sleep soon, unless the user has settled it.

    It acts on libgomp on x86-64; where a turn takes a cycle or two, as on Arm, libgomp's own number is a short wait.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return
    if not any(name in environment for name in _SET_BY_USER):
        environment["GOMP_SPINCOUNT"] = "0" if is_busy() else str(SPINS)


def is_busy() -> bool:
    """Whether other processes want as many cores now as the machine has. False where the system does not tell."""
    others: list[int] = []
    try:
        for _ in range(_LOOKS):
            running, _, _ = _LOAD.read_text().split()[3].partition("/")
            others.append(int(running) - 1)  # this process is one of them
            time.sleep(_BETWEEN_LOOKS)
    except (OSError, ValueError, IndexError):
        return False
    return statistics.median(others) >= (os.cpu_count() or 1)
