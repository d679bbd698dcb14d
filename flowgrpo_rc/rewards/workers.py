"""A built-in reward in processes of its own, which share its images: ``reward.num_workers``.

For scorers that need no GPU and keep the interpreter busy, such as ``ocr``: threads would share the interpreter's lock
with the training.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import joined
from flowgrpo_rc.rewards.registry import load_builtin


class WorkerReward:
    """Calls the built-in reward ``name`` in ``count`` processes, each with its share of the images, in order.

    Args:
        name: a key of ``REWARDS``.
        options: its section of the configuration.
        count: number of processes.
        streams: the reward's own attribute.

    Raises:
        ImportError, ValueError: the reward cannot be made.
    """

    computes_elsewhere = True
    """The worker processes compute, so they may be called while the actor learns."""

    def __init__(self, name: str, options: Any, count: int, streams: bool) -> None:
        self.streams = streams
        self._name = name
        self._count = count
        # Not forked: a fork of a process with threads and a GPU may hang.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=spawn, initializer=_begin)
        self._call = partial(_call, name, options)
        # A call for each, so that all processes have loaded the reward before the model takes the memory.
        self._results([("load", ())] * count)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """The scores of all images and the info of them, in their order."""
        metadata = [{}] * len(prompts) if metadata is None else metadata
        share = max(1, -(-len(images) // self._count))
        shares = [slice(start, start + share) for start in range(0, max(1, len(images)), share)]
        return joined(self._results([("__call__", (images[s], prompts[s], metadata[s])) for s in shares]))

    def check_prompts(self, prompts: Sequence[str], **known: Any) -> None:
        """The reward's own check of prompts before training; see ``RewardMix.check_prompts``."""
        self._results([("check_prompts", (list(prompts),), known)])

    def close(self) -> None:
        """End the processes; once is enough."""
        # Killed first: the pool would wait for the calls in progress.
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(cancel_futures=True)

    def _results(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            futures = [self._pool.submit(self._call, *call) for call in calls]
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"a worker process of the reward {self._name!r} ended before it answered; it was killed, perhaps for "
                "want of memory: lower reward.num_workers"
            ) from error


_reward: Any = None
"""The reward of this worker process."""


def _begin() -> None:
    """Prepare a worker process: it ignores Ctrl-C, which the trainer handles, and ends with the trainer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    # A trainer that is killed closes no pipe: each worker holds both ends of the queue of calls.
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _call(name: str, options: Any, method: str, args: tuple[Any, ...], known: dict[str, Any] | None = None) -> Any:
    """Call a method of the reward in a worker process, which loads it first."""
    global _reward
    if _reward is None:
        _reward = load_builtin(name, options)
    return None if method == "load" else getattr(_reward, method)(*args, **(known or {}))
