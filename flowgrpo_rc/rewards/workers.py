"""A built-in reward in processes of its own, which share its images; ``reward.num_workers``.

For scorers that need no GPU and keep the interpreter busy, such as ``ocr``: threads would take turns with the training.
The processes are started afresh and import nothing of the trainer's script. They end with the trainer, however it ends.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import joined

_ROOT = str(Path(__file__).parents[2])
"""The folder that holds this package."""
_PROGRAM = f"""
import sys
elsewhere = [folder for folder in sys.path if folder]
sys.path = [{_ROOT!r}, *elsewhere]
import flowgrpo_rc
sys.path = [*elsewhere, {_ROOT!r}]
from flowgrpo_rc.rewards.worker_process import main
main()
"""
"""What a worker process runs. Python puts the working folder, as an empty text, first on its path: a file ``queue.py``
of the user's there would be imported in place of the library's. The package is the trainer's own, wherever it lies."""

_RAISED_ALIKE = {"ImportError": ImportError, "ModuleNotFoundError": ImportError, "ValueError": ValueError}
"""Exceptions of a worker that are raised as what they are; all others become a ``RuntimeError`` that names theirs."""


class WorkerReward:
    """Calls the built-in reward ``name`` in ``count`` processes, each with its share of the images, in order.

    Args:
        name: of the reward, a key of ``REWARDS``.
        options: its section of the configuration.
        count: how many processes.
        streams: what the reward declares of itself.

    Raises:
        ImportError, ValueError: the reward cannot be made.
        RuntimeError: a process ended before it answered.
    """

    computes_elsewhere = True
    """It is the worker processes that compute, so they may be asked while the actor learns."""

    def __init__(self, name: str, options: Any, count: int, streams: bool) -> None:
        self.streams = streams
        self._workers = [_Worker(name) for _ in range(count)]
        self.close = weakref.finalize(self, _end, self._workers)
        self._ask([("load", (name, options), {})] * count)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """The scores of all images, and what is reported of them, in their order."""
        metadata = [{}] * len(prompts) if metadata is None else metadata
        share = max(1, -(-len(images) // len(self._workers)))
        shares = [slice(start, start + share) for start in range(0, max(1, len(images)), share)]
        return joined(self._ask([("__call__", (images[s], prompts[s], metadata[s]), {}) for s in shares]))

    def check_prompts(self, prompts: Sequence[str], **known: Any) -> None:
        """The reward's own check of prompts before training; see ``RewardMix.check_prompts``."""
        self._ask([("check_prompts", (list(prompts),), known)])

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [worker.process.pid for worker in self._workers]

    def _ask(self, calls: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """The answers to calls of which each worker gets at most one; the first problem is raised when all are in."""
        try:
            for worker, call in zip(self._workers, calls, strict=False):
                worker.send(call)
            answers = [worker.receive() for worker, _ in zip(self._workers, calls, strict=False)]
        except BaseException:  # an answer that nobody took would be taken for that of the next call
            self.close()
            raise
        for _, problem in answers:
            if problem is not None:
                kind, text = problem
                alike = _RAISED_ALIKE.get(kind)
                raise RuntimeError(f"{kind} in a worker process: {text}") if alike is None else alike(text)
        return [value for value, _ in answers]


class _Worker:
    """One process, and the way to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the trainer's to answer
        )

    def send(self, call: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(pickle.dumps(call))
            self.process.stdin.flush()
        except (OSError, ValueError):  # the latter where the file is closed, since the processes have been ended
            self._raise_ended()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            self._raise_ended()

    def _raise_ended(self) -> None:
        code = self.process.wait()
        how = f"died of signal {-code}" if code < 0 else f"ended with code {code}"
        raise RuntimeError(f"worker process {self.process.pid} of the reward {self._name!r} {how} before it answered")


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        with suppress(OSError):
            worker.process.kill()
        worker.process.wait()
        for stream in (worker.process.stdin, worker.process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
