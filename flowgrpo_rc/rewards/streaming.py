"""Scores the images of a batch part by part, so that a part can be scored while the next one is drawn.

Functions that declare ``streams = True`` are called once for every part, with the same images whether or not anything
is drawn meanwhile; all others once, with all images. So the scores, the order of the calls and what the functions
report do not depend on when the parts come, nor on the thread that scores them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
        names: the functions that are called here; by default all.
        ahead: whether nobody waits for the scores yet, so that other calls of the functions go first.
    """

    def __init__(
        self,
        mix: RewardMix,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        part: int,
        *,
        names: Collection[str] | None = None,
        ahead: bool = False,
    ) -> None:
        self._mix = mix
        self._prompts = list(prompts)
        self._metadata = list(metadata)
        self._part = part
        self._names = [name for name in mix.functions if names is None or name in names]
        self._ahead = ahead
        self._found: dict[str, list[Scores]] = {name: [] for name in mix.streaming if name in self._names}
        self.scored = 0
        """How many images the streaming functions have scored, from the first on."""
        self.streaming = list(self._found)
        """The functions that stream."""
        self.foreign = [name for name in self._found if name not in mix.builtin]
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
        rows = slice(self.scored, self.scored + len(images))
        for name, parts in self._found.items():
            parts.append(self._call(name, images, rows, sets_back=not drawing))
        self.scored = rows.stop

    @property
    def streamed(self) -> bool:
        """Whether the streaming functions have scored all images."""
        return self.scored == len(self._prompts)

    def scores(self, images: np.ndarray) -> dict[str, Scores]:
        """What each function makes of all ``images``, of which those that have been added are the first.

        Raises:
            RewardError: see ``RewardMix``.
        """
        while self._found and self.scored < len(images):
            self.add(images[self.scored : self.scored + self._part], drawing=False)
        found = {}
        for name, parts in self._found.items():
            check_parts(name, parts)
            found[name] = joined(parts)
        for name in self._names:
            if name not in found:
                found[name] = self._call(name, images, slice(None))
        return found

    def result(self, images: np.ndarray, others: Mapping[str, Scores] | None = None) -> RewardResult:
        """The rewards of all ``images``.

        Args:
            images: see ``scores``.
            others: the scores of the functions that are not called here.

        Raises:
            RewardError: see ``RewardMix``.
        """
        found = {**(others or {}), **self.scores(images)}
        return self._mix.combine({name: found[name] for name in self._mix.functions}, self._prompts)

    def _call(self, name: str, images: np.ndarray, rows: slice, *, sets_back: bool = True) -> Scores:
        with self._turn(name):
            begin = time.perf_counter()
            found = self._mix.score(name, images, self._prompts[rows], self._metadata[rows], sets_back=sets_back)
            self.seconds += time.perf_counter() - begin
        return found

    def _turn(self, name: str) -> AbstractContextManager[None]:
        turns = self._mix.turns.get(name)
        if turns is None:
            return nullcontext()
        return turns.later() if self._ahead else turns.now()


class ScoringThread:
    """Adds parts to a ``PartialScoring`` in a thread of its own, in the order in which ``take`` was given them.

    While it runs, no other thread may call the same functions, unless they have ``RewardMix.turns``. It is a daemon:
    where the caller fails, nothing waits for it, and it takes no further part after ``abandon``.

    Args:
        scoring: what it adds to.
        prepare: called in the thread before anything is scored.
        after: begin when this one has ended, so that functions are called batch by batch; its error is this one's too.
    """

    def __init__(
        self, scoring: PartialScoring, prepare: Callable[[], object], after: ScoringThread | None = None
    ) -> None:
        self._scoring = scoring
        self._prepare = prepare
        self._after = after
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
        self.queue(images)

    def queue(self, images: np.ndarray) -> None:
        """``take`` that leaves the error to ``wait``; from any thread."""
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
            if self._after is not None:
                self._after._thread.join()
                self._error = self._after._error
                self._after = None
            if self._error is not None:  # the run ends with the batch before
                return
            self._prepare()
            while not self._scoring.streamed and (images := self._parts.get()) is not None and not self._abandoned:
                self._scoring.add(images, drawing=True)
        except BaseException as error:  # raised where it is waited for
            self._error = error
