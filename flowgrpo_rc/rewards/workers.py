"""A built-in reward in processes of its own, which share its images: ``reward.num_workers``.

For scorers that need no GPU and keep the interpreter busy, such as ``ocr``: threads would share the interpreter's lock
with the training.
"""

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flowgrpo_rc.processes import ProcessLostError, RemoteError, RemoteObject
from flowgrpo_rc.rewards.answer import Scores, joined
from flowgrpo_rc.rewards.registry import load_builtin

_RAISED_ALIKE = {"ImportError": ImportError, "ModuleNotFoundError": ImportError, "ValueError": ValueError}
"""Exceptions of a worker that callers handle by their class."""


class WorkerReward:
    """Calls the built-in reward ``name`` in ``count`` processes, each with its share of the images, in order.

    Args:
        name: a key of ``REWARDS``.
        options: its section of the configuration.
        count: number of processes.
        streams: the reward's own attribute.

    Raises:
        ImportError, ValueError: the reward cannot be made.
        RuntimeError: a process ended before it answered.
    """

    computes_elsewhere = True
    """The worker processes compute, so they may be called while the actor learns."""

    def __init__(self, name: str, options: Any, count: int, streams: bool) -> None:
        self.streams = streams
        self._name = name
        self.workers = [RemoteObject(f"{__name__}:Worker", name, options) for _ in range(count)]
        # Also at the end of a program that never calls it.
        self.close = weakref.finalize(self, _end, self.workers)
        self._call("load", [()] * count)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> Scores:
        """The scores of all images and the info of them, in their order."""
        metadata = [{}] * len(prompts) if metadata is None else metadata
        share = max(1, -(-len(images) // len(self.workers)))
        # One share even without images: the answer has the reward's own type and keys.
        shares = [slice(start, start + share) for start in range(0, max(1, len(images)), share)]
        return joined(self._call("score", [(images[s], prompts[s], metadata[s]) for s in shares]))

    def check_prompts(self, prompts: Sequence[str], **known: Any) -> None:
        """The reward's own check of prompts before training; see ``RewardMix.check_prompts``."""
        self._call("check_prompts", [(list(prompts), known)])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call each of the first workers with its arguments, all at the same time."""

        def call(worker: RemoteObject, own: tuple[Any, ...]) -> Any:
            # ``reward.timeout_s`` is the limit that counts.
            return worker.call(method, *own, limit_s=1e6, doing="scoring")

        # A thread waits for each answer; the work is done in the processes.
        try:
            with ThreadPoolExecutor(len(self.workers)) as threads:
                try:
                    return list(threads.map(call, self.workers, arguments))
                except (KeyboardInterrupt, SystemExit):
                    # The threads wait for their processes, and leaving them waits for the threads.
                    self.close()
                    raise
        except ProcessLostError as error:
            raise RuntimeError(f"a worker process of the reward {self._name!r} {error}") from error
        except RemoteError as error:
            # A missing package or a refused prompt is exit code 2, as without worker processes.
            if error.kind in _RAISED_ALIKE:
                raise _RAISED_ALIKE[error.kind](str(error)) from error
            raise RuntimeError(f"{error.kind} in a worker process: {error}") from error


def _end(workers: Sequence[RemoteObject]) -> None:
    for worker in workers:
        worker.end()


class Worker:
    """The reward in a worker process."""

    def __init__(self, name: str, options: Any) -> None:
        self._arguments = name, options

    def load(self) -> None:
        """Make the reward; not in ``__init__``, whose errors would end the process without their class."""
        self._reward = load_builtin(*self._arguments)

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Scores:
        """The reward's own answer."""
        return self._reward(images, prompts, metadata)

    def check_prompts(self, prompts: Sequence[str], known: Mapping[str, Any]) -> None:
        """The reward's own check."""
        self._reward.check_prompts(prompts, **known)
