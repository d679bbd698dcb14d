"""The rewards of a rollout, scored while its images are drawn where the reward functions allow it, and where other
processes compute them, while the actor learns from the batches before."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.rewards import PartialScoring, RewardError, RewardMix, RewardResult, ScoringThread
from flowgrpo_rc.rewards.answer import PARTS
from flowgrpo_rc.rollout import RolloutSyncError


def names_of_all(named: Sequence[Collection[str]]) -> list[str]:
    """The names that rewards and parts of rewards go by, from those of each process or image; the order is the first's.

    Raises:
        RewardError: they differ, so that there is no mean over all images. Every process that is given the same names
            raises it.
    """
    first = list(named[0])
    scattered = sorted(set(first).union(*named) - set(first).intersection(*named))
    if scattered:
        function, _, part = scattered[0].partition("/")
        raise RewardError(
            f"reward function {function!r} reported {PARTS}{part} in some processes only; its mean over all of them is "
            f"logged, so report {PARTS}{part} for every image"
        )
    return first


def _as_here() -> Callable[[], None]:
    """To be called in another thread, where rewards then compute as they would in this one: with as many threads, and
    on the same GPU. Every thread has a current GPU of its own and begins with the machine's first."""
    threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def prepare() -> None:
        torch.set_num_threads(threads)
        if device is not None:
            torch.cuda.set_device(device)

    return prepare


class BatchScoring:
    """Makes what scores each batch of a run.

    Args:
        mix: the run's reward.
        part: images of a micro-batch of a rollout.
        overlaps: whether a thread of its own scores what comes before the rollout is done.
        ahead: whether images of a batch may come before the trainer wants it.
    """

    def __init__(self, mix: RewardMix, part: int, *, overlaps: bool, ahead: bool = False) -> None:
        self.mix = mix
        self.overlaps = overlaps
        self.ahead = tuple(mix.turns) if overlaps and ahead else ()
        """The functions that score images ahead."""
        self._part = part
        self._last: ScoringThread | None = None

    def __call__(self, records: Sequence[PromptRecord]) -> "RolloutScoring":
        """For the next batch, with the prompt of every image."""
        prompts = [record.prompt for record in records]
        metadata = [record.metadata for record in records]
        rest = [name for name in self.mix.functions if name not in self.ahead]
        scoring = PartialScoring(self.mix, prompts, metadata, self._part, names=rest)
        if not self.ahead:
            return RolloutScoring(scoring, self.overlaps)
        early = PartialScoring(self.mix, prompts, metadata, self._part, names=self.ahead, ahead=True)
        self._last = ScoringThread(early, _as_here(), after=self._last)
        return RolloutScoring(scoring, self.overlaps, early, self._last)


class RolloutScoring:
    """Takes the images of a rollout as they come, and gives their rewards when all are there and proven; a context,
    from when the trainer wants them, which a failure inside leaves without waiting for a score.

    Args:
        scoring: calls the functions that wait until the trainer wants the batch.
        overlaps: whether a thread of its own scores what comes before the rollout is done.
        early: calls the others, which score images as soon as they are there.
        early_thread: the thread in which it does.
    """

    def __init__(
        self,
        scoring: PartialScoring,
        overlaps: bool,
        early: PartialScoring | None = None,
        early_thread: ScoringThread | None = None,
    ) -> None:
        self._scoring = scoring
        self._overlaps = overlaps and bool(scoring.streaming)
        self._thread: ScoringThread | None = None
        self._early = early
        self._early_thread = early_thread
        self._drawn: list[np.ndarray] = []

    @property
    def take_ahead(self) -> Callable[[Tensor, Tensor], None] | None:
        """Takes rows and images, in order, from any thread and at any time; ``None``: they are not wanted ahead."""
        early = self._early_thread
        return None if early is None else lambda _, images: early.queue(images.numpy())

    def take(self, rows: Tensor, images: Tensor) -> None:
        """``RolloutRequest.on_images``.

        Raises:
            RewardError: a reward failed on images that came before.
            RolloutSyncError: the images do not come in the order of the request.
        """
        if self._thread is None:
            return
        count = sum(map(len, self._drawn))
        if rows.tolist() != list(range(count, count + len(images))):
            raise RolloutSyncError(
                f"the rollout engine delivered rows {rows.tolist()[:8]} after {count} images; it must deliver them in "
                "the order of the request"
            )
        self._drawn.append(images.numpy())
        self._thread.take(self._drawn[-1])

    def result(self, images: np.ndarray) -> RewardResult:
        """The rewards of all images; waits for what is still being scored.

        Raises:
            RewardError: see ``RewardMix``.
            RolloutSyncError: the engine has answered with other images than it delivered.
        """
        for thread in (self._thread, self._early_thread):
            if thread is not None:
                thread.wait()
        first = 0
        for drawn in self._drawn:
            if not np.array_equal(drawn, images[first : first + len(drawn)]):
                raise RolloutSyncError(
                    f"the rollout engine answered with other images than it delivered while it drew, in rows {first} "
                    f"to {first + len(drawn) - 1}; their rewards would be those of other images"
                )
            first += len(drawn)
        return self._scoring.result(images, self._early.scores(images) if self._early is not None else None)

    @property
    def seconds(self) -> float:
        """Time spent in reward functions, in whichever thread."""
        return self._scoring.seconds + (self._early.seconds if self._early is not None else 0.0)

    def abandon(self) -> None:
        """Have nothing more scored; what is being scored is left to itself."""
        for thread in (self._thread, self._early_thread):
            if thread is not None:
                thread.abandon()

    def __enter__(self) -> "RolloutScoring":
        if self._overlaps:
            self._thread = ScoringThread(self._scoring, _as_here())
        return self

    def __exit__(self, *error: object) -> None:
        """Where the rollout has failed, nothing more is scored."""
        self.abandon()
