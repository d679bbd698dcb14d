"""Scores the images of a batch part by part, so that a part can be scored while the next one is drawn.

Functions that declare ``streams = True`` are called once for every part, with the same images whether or not anything
is drawn meanwhile; all others once, with all images. So the scores, the order of the calls and what the functions
report do not depend on when the parts come, nor on the thread that scores them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import Scores, check_parts, joined
from flowgrpo_rc.rewards.errors import RewardError
from flowgrpo_rc.rewards.isolation.process_state import ProcessState
from flowgrpo_rc.rewards.isolation.user_code import changed_while_drawing
from flowgrpo_rc.rewards.mix import RewardMix, RewardResult


class PartialScoring:
    """The rewards of one batch, from parts of it that come in order.

    Args:
        mix: the reward functions.
        prompts, metadata: of all images of the batch.
        part: images of a part, the last one may be smaller. What does not come by ``add`` is divided by it.
    """

    def __init__(self, mix: RewardMix, prompts: Sequence[str], metadata: Sequence[dict[str, Any]], part: int) -> None:
        self._mix = mix
        self._prompts = list(prompts)
        self._metadata = list(metadata)
        self._part = part
        self._found: dict[str, list[Scores]] = {name: [] for name in mix.streaming}
        self.scored = 0
        """How many images the streaming functions have scored, from the first on."""
        self.foreign = [name for name in mix.streaming if name not in mix.builtin]
        """The functions that stream and are not this package's own."""
        self.seconds = 0.0
        """Time spent in reward functions so far."""

    def add(self, images: np.ndarray, *, drawing: bool) -> None:
        """Score the next images with every function that streams.

        ``drawing``: the caller's thread is not the one that draws, so that what a function changes in the process
        cannot be set back here; what it changes for the caller's thread alone is an error.

        Raises:
            RewardError: see ``RewardMix``.
        """
        begin = time.perf_counter()
        rows = slice(self.scored, self.scored + len(images))
        for name, parts in self._found.items():
            prompts, metadata = self._prompts[rows], self._metadata[rows]
            parts.append(self._mix.score(name, images, prompts, metadata, sets_back=not drawing))
        self.scored = rows.stop
        self.seconds += time.perf_counter() - begin

    def result(self, images: np.ndarray) -> RewardResult:
        """The rewards of all ``images``, of which those that have been added are the first.

        Raises:
            RewardError: see ``RewardMix``.
        """
        while self.scored < len(images):
            self.add(images[self.scored : self.scored + self._part], drawing=False)
        begin = time.perf_counter()
        found = {}
        for name, parts in self._found.items():
            check_parts(name, parts)
            found[name] = joined(parts)
        for name in self._mix.functions:
            if name not in found:
                found[name] = self._mix.score(name, images, self._prompts, self._metadata)
        result = self._mix.combine({name: found[name] for name in self._mix.functions}, self._prompts)
        self.seconds += time.perf_counter() - begin
        return result


class ScoringThread:
    """Adds parts to a ``PartialScoring`` in a thread of its own, in the order in which ``take`` was given them.

    While it runs, no other thread may call reward functions. It is a daemon: where the caller fails, nothing waits for
    it, and it takes no further part after ``abandon``.

    Args:
        scoring: what it adds to.
        prepare: called in the thread before anything is scored.
    """

    def __init__(self, scoring: PartialScoring, prepare: Callable[[], object]) -> None:
        self._scoring = scoring
        self._prepare = prepare
        self._parts: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._abandoned = False
        # What belongs to the scoring thread, only that thread can see: it looks after every call.
        self._before = ProcessState(of_thread=False) if scoring.foreign else None
        self._thread = threading.Thread(target=self._work, name="reward scoring", daemon=True)
        self._thread.start()

    def take(self, images: np.ndarray) -> None:
        """Have these images scored next; returns at once.

        Raises:
            RewardError: a function has failed on an earlier part.
        """
        if self._error is not None:
            raise self._error
        self._parts.put(images)

    def wait(self) -> None:
        """Until everything that was taken is scored.

        Raises:
            RewardError: a function failed, or changed in the process what the drawing rests on.
        """
        self._parts.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        changed, stuck = ([], []) if self._before is None else self._before.restore()
        if changed or stuck:
            named = " or ".join(map(repr, self._scoring.foreign))
            raise RewardError(changed_while_drawing(f"reward function {named}", [*changed, *stuck]))

    def abandon(self) -> None:
        """Score nothing more; what is being scored is left to itself."""
        self._abandoned = True
        self._parts.put(None)

    def _work(self) -> None:
        try:
            self._prepare()
            while (images := self._parts.get()) is not None and not self._abandoned:
                self._scoring.add(images, drawing=True)
        except BaseException as error:  # raised where it is waited for
            self._error = error
