"""Profiles of chosen steps: a trace for Perfetto or TensorBoard, and a table of operators."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.run_folder import write_whole

TRACE = ".pt.trace.json"
"""Suffix by which TensorBoard's profiler finds traces; Perfetto and ``chrome://tracing`` take any."""
OPERATORS = 40
"""Rows of the table."""


class StepProfiler:
    """``with profiler(step): ...`` profiles this process's part of the step if it is one of ``steps``.

    Writes ``step_00003.rank_0.pt.trace.json`` and ``step_00003.rank_0.txt``, the operators by their own time.

    Args:
        steps: numbers of training steps, the first is 1.
        folder: of the traces.
        rank: of this process.
        device: kind of device that the run computes on, ``cpu`` or ``cuda``.
        writing: context in which a profile is written, given its folder; it may catch the errors of a full disk.
    """

    def __init__(
        self,
        steps: Collection[int],
        folder: Path,
        rank: int,
        device: str = "cpu",
        writing: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._steps = frozenset(steps)
        self._folder = folder
        self._rank = rank
        self._device = device
        self._writing = writing

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile the body, unless it raises."""
        if step not in self._steps:
            yield
            return
        with torch.profiler.profile() as profile:  # of the CPU and of the accelerator that there is
            yield
        with self._writing(f"{self._folder}/"):
            self._write(f"step_{step:05d}.rank_{self._rank}", profile)

    def _write(self, name: str, profile: Any) -> None:
        # Only a run that profiles has the folder.
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{name}{TRACE}", lambda path: profile.export_chrome_trace(str(path)))
        table = profile.key_averages().table(sort_by=f"self_{self._device}_time_total", row_limit=OPERATORS)
        write_whole(self._folder / f"{name}.txt", lambda path: path.write_text(f"{table}\n", encoding="utf-8"))
