"""Profiles of chosen steps by torch's profiler: a trace for Perfetto or TensorBoard, and a table of the operators."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.run_folder import write_whole

TRACE = ".pt.trace.json"
"""How the names of traces end that TensorBoard's profiler finds; Perfetto and ``chrome://tracing`` take any."""
OPERATORS = 40
"""Rows of the table."""


class StepProfiler:
    """``with profiler(step): ...`` profiles this process's part of the step if it is one of ``steps``.

    Writes ``step_00003.rank_0.pt.trace.json`` and ``step_00003.rank_0.txt``, the operators by the time that they took
    themselves, into ``folder``. Other steps are run as if there were no profiler.

    Args:
        steps: numbers of training steps, the first is 1.
        folder: of the traces.
        rank: of this process.
    """

    def __init__(self, steps: Collection[int], folder: Path, rank: int) -> None:
        self._steps = frozenset(steps)
        self._folder = folder
        self._rank = rank

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile what is done inside, unless it raises."""
        if step not in self._steps:
            yield
            return
        with torch.profiler.profile() as profile:  # of the CPU and of the accelerator that there is
            yield
        self._write(f"step_{step:05d}.rank_{self._rank}", profile)

    def _write(self, name: str, profile: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{name}{TRACE}", lambda path: profile.export_chrome_trace(str(path)))
        on_device = "self_cpu_time_total" if not torch.cuda.is_available() else "self_cuda_time_total"
        table = profile.key_averages().table(sort_by=on_device, row_limit=OPERATORS)
        write_whole(self._folder / f"{name}.txt", lambda path: path.write_text(f"{table}\n", encoding="utf-8"))
