"""Rewards and advantages of a batch: scores of images while others are drawn, statistics over all processes. Images of
later batches are scored while the actor learns."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.evaluation.image_statistics import STATISTICS, image_statistics, summary, thumbnails
from flowgrpo_rc.loss import group_advantages, normalised_sum
from flowgrpo_rc.rewards import PartialScoring, RewardError, RewardMix, RewardResult
from flowgrpo_rc.rewards.answer import PARTS
from flowgrpo_rc.rewards.scoring import AHEAD
from flowgrpo_rc.rollout import RolloutSyncError
from flowgrpo_rc.rollout.seeds import SCOUT, generator_for
from flowgrpo_rc.trainer.config import FlowGRPOConfig


def names_of_all(named: Sequence[Collection[str]]) -> list[str]:
    """The names of rewards and of their parts, in the order of the first process or image. Raises ``RewardError``
    unless they are the same everywhere: else there is no mean over all images. Every process that gets the same names
    raises it."""
    first = list(named[0])
    # Every process compares the same lists, so all raise together and none waits for the others.
    scattered = sorted(set(first).union(*named) - set(first).intersection(*named))
    if scattered:
        function, _, part = scattered[0].partition("/")
        raise RewardError(
            f"reward function {function!r} reported {PARTS}{part} in some processes only; its mean over all of them is "
            f"logged, so report {PARTS}{part} for every image"
        )
    return first


Gather = Callable[[Tensor], Tensor]
"""Concatenates the tensors of all processes in rank order, on the host."""


def reward_statistics(scored: RewardResult, gather: Gather) -> dict[str, float]:
    """Mean, deviation and range of the reward, and mean and deviation of every part. Raises ``RewardError`` if the
    processes' functions do not report the same parts of their scores."""
    columns = {"mean": scored.total} | scored.parts | scored.inner_parts
    names = names_of_all(gather_object([list(columns)]))
    # In float64, so that the means do not depend on the number of processes.
    gathered = gather(torch.from_numpy(np.stack([columns[name] for name in names], axis=1)).double())
    metrics = {f"reward/{name}": float(v) for name, v in zip(names, gathered.mean(0), strict=True)}
    scores = dict(zip(names, gathered.unbind(1), strict=True))
    for name in scored.parts:
        metrics[f"reward/std/{name}"] = float(scores[name].std(correction=0))
    total = scores["mean"]
    metrics |= {"reward/std": float(total.std(correction=0)), "reward/max": float(total.max())}
    return metrics | {"reward/min": float(total.min())}


def image_metrics(images: np.ndarray, group: Int[Tensor, " B"], gather: Gather) -> dict[str, float]:
    """``images/...``: statistics of the images of all processes that no reward sees. Images with one ``group`` are of
    one prompt."""
    statistics = gather(torch.from_numpy(np.stack(list(image_statistics(images).values()), axis=1))).numpy()
    columns = dict(zip(STATISTICS, statistics.T, strict=True))
    found = summary(columns, gather(torch.from_numpy(thumbnails(images))).numpy(), gather(group).numpy())
    return {f"images/{name}": value for name, value in found.items()}


def batch_advantages(
    config: FlowGRPOConfig,
    scored: RewardResult,
    group: Int[Tensor, " B"],
    keep: Bool[Tensor, " B"] | None,
    gather: Gather,
    rank: int,
) -> tuple[Float[Tensor, " B"], dict[str, float]]:
    """This process's advantages and their metrics; ``gather`` collects tensors of all processes, ``rank`` is this one.
    Images with one ``group``, the position of their prompt in the batch, are compared with each other. With
    ``rejection_aware_baseline`` only those that ``keep`` names, which have a kept step, enter the statistics."""
    keep = None if keep is None else gather(keep)
    group = gather(group)
    rewards = gather(torch.from_numpy(scored.total))
    if config.reward.normalization is not None:
        # Each part is normalised before the weighted sum, so that no scale dominates.
        weights = config.reward.weights()
        parts = gather(torch.from_numpy(np.stack([scored.parts[name] for name in weights], axis=1)))
        rewards = normalised_sum(parts, torch.tensor(list(weights.values())), group, keep=keep)
    by_std, global_std = config.algorithm.norm_adv_by_std_in_grpo, config.algorithm.global_std
    result = group_advantages(rewards, group, norm_by_std=by_std, global_std=global_std, keep=keep)
    # Equal counts on all processes, so that the rank gives the place.
    count = len(scored.total)
    own = slice(rank * count, (rank + 1) * count)
    return result.advantages[own].float(), {
        "reward/group_std_mean": result.group_std_mean,
        "reward/zero_std_fraction": result.zero_std_fraction,
    }


def best_and_worst(
    rows: Int[Tensor, " M"], advantages: Float[Tensor, " B"], group: Int[Tensor, " B"]
) -> Int[Tensor, " pairs*2"]:
    """Of the images ``rows`` the one with the largest and the one with the smallest advantage of each group, one after
    the other; in a group of equal ones both are the first."""
    pairs = []
    for one in group[rows].unique():
        own = rows[group[rows] == one]
        pairs += [own[advantages[own].argmax()], own[advantages[own].argmin()]]
    return torch.stack(pairs)


def chosen_scouts(
    advantages: Float[Tensor, " B"], group: Int[Tensor, " B"], keep: int, select: str, seed: int, step: int
) -> Int[Tensor, " M"]:
    """Rows of the ``keep`` images of each group that are learned from, in their order. ``select`` is
    ``rollout.scout.select``. Random ones depend on ``seed``, ``step`` and the group's number alone."""
    rows = []
    for one in group.unique():
        own = (group == one).nonzero().flatten()
        if select == "random":
            order = torch.randperm(len(own), generator=generator_for(seed, SCOUT, step, int(one)))
            best = keep
        else:
            order = advantages[own].argsort(descending=True, stable=True)
            best = (keep + 1) // 2 if select == "extremes" else _most_varied(advantages[own][order], keep)
        rows.append(own[torch.cat([order[:best], order[len(own) - (keep - best) :]])])
    return torch.cat(rows).sort().values


def _most_varied(descending: Float[Tensor, " n"], keep: int) -> int:
    """The number of the largest among the ``keep`` values of largest variance; the others are the smallest."""
    values = descending.double()
    parts = [torch.cat([values[:best], values[len(values) - (keep - best) :]]) for best in range(keep + 1)]
    # A half of each where several are equal.
    return max(range(keep + 1), key=lambda best: (round(float(parts[best].var()), 9), -abs(2 * best - keep)))


class RolloutScoring(PartialScoring):
    """Scores the images of ``records`` as they come; a context manager that scores nothing more on exit.

    With ``overlaps`` images are scored while others are drawn, with ``ahead`` before the trainer comes to their batch;
    ``part`` is the number of images in a micro-batch of the rollout.
    """

    def __init__(
        self, mix: RewardMix, records: Sequence[PromptRecord], part: int, *, overlaps: bool, ahead: bool = False
    ) -> None:
        super().__init__(mix, [record.prompt for record in records], [record.metadata for record in records], part)
        # Only functions that other processes compute leave the training its interpreter and its GPU.
        self._early = [name for name in mix.queues if overlaps and ahead]
        self._late = [name for name in mix.streaming if overlaps and name not in self._early]
        self._drawn: list[np.ndarray] = []

    @property
    def take_ahead(self) -> Callable[[Tensor, Tensor], None] | None:
        """Takes rows and images, in order, from any thread at any time; ``None`` where nothing is scored ahead."""
        if not self._early:
            return None
        return lambda _, images: self.score_ahead(images.numpy(), self._early, urgency=AHEAD)

    def take(self, rows: Tensor, images: Tensor) -> None:
        """``RolloutRequest.on_images``. Raises ``RewardError`` if a reward failed on earlier images,
        ``RolloutSyncError`` if the images do not come in the order of the request."""
        if not self._late:
            return
        count = sum(map(len, self._drawn))
        # Rewards are assigned by position.
        if rows.tolist() != list(range(count, count + len(images))):
            raise RolloutSyncError(
                f"the rollout engine delivered rows {rows.tolist()[:8]} after {count} images; it must deliver them in "
                "the order of the request"
            )
        # The run ends here, without drawing the rest of the batch.
        self.raise_failure()
        self._drawn.append(images.numpy())
        self.score_ahead(self._drawn[-1], self._late)

    def result(self, images: np.ndarray) -> RewardResult:
        """The rewards of all images; waits for those that are still being scored. Raises ``RewardError`` as
        ``RewardMix``, ``RolloutSyncError`` if the engine has answered with other images than it delivered."""
        # An engine that reuses a buffer would have had other images scored than it returns.
        first = 0
        for drawn in self._drawn:
            if not np.array_equal(drawn, images[first : first + len(drawn)]):
                raise RolloutSyncError(
                    f"the rollout engine answered with other images than it delivered while it drew, in rows {first} "
                    f"to {first + len(drawn) - 1}; their rewards would be those of other images"
                )
            first += len(drawn)
        return super().result(images)

    def again(self, rows: Int[Tensor, " M"], images: np.ndarray) -> RewardResult:
        """The rewards of other images for some of the prompts; raises ``RewardError`` as ``RewardMix``."""
        prompts, metadata = ([values[row] for row in rows.tolist()] for values in (self._prompts, self._metadata))
        scoring = PartialScoring(self._mix, prompts, metadata, self._part)
        try:
            return scoring.result(images)
        finally:
            self._seconds.append(scoring.seconds)

    def __enter__(self) -> "RolloutScoring":
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()
