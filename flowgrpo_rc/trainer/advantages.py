"""Statistics of the rewards and the advantages of a batch, over all processes."""

from collections.abc import Callable

import numpy as np
import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.loss import group_advantages, normalised_sum
from flowgrpo_rc.rewards import RewardResult
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.scoring import names_of_all

Gather = Callable[[Tensor], Tensor]
"""Concatenates the tensors of all processes in rank order, on the host."""


def reward_statistics(scored: RewardResult, gather: Gather) -> dict[str, float]:
    """Mean, deviation and range of the reward, and mean and deviation of every part.

    Raises:
        RewardError: the processes' functions do not report the same parts of their scores.
    """
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


def batch_advantages(
    config: FlowGRPOConfig,
    scored: RewardResult,
    group: Int[Tensor, " B"],
    keep: Bool[Tensor, " B"] | None,
    gather: Gather,
    rank: int,
) -> tuple[Float[Tensor, " B"], dict[str, float]]:
    """This process's advantages and their metrics.

    Args:
        config: of the run.
        scored: rewards of this process's images.
        group: position of each image's prompt in the batch; its images are compared with each other.
        keep: with ``rejection_aware_baseline`` the images that have a kept step; others do not enter the statistics of
            their group.
        gather: collects tensors of all processes.
        rank: of this process.
    """
    keep = None if keep is None else gather(keep)
    group = gather(group)
    rewards = gather(torch.from_numpy(scored.total))
    if config.reward.normalization is not None:
        # Each part is normalised before the weighted sum, so that no scale dominates.
        weights = config.reward.weights()
        parts = gather(torch.from_numpy(np.stack([scored.parts[name] for name in weights], axis=1)))
        rewards = normalised_sum(parts, torch.tensor(list(weights.values())), group, keep=keep)
    result = group_advantages(
        rewards,
        group,
        norm_by_std=config.algorithm.norm_adv_by_std_in_grpo,
        global_std=config.algorithm.global_std,
        keep=keep,
    )
    # Equal counts on all processes, so that the rank gives the place.
    count = len(scored.total)
    own = slice(rank * count, (rank + 1) * count)
    return result.advantages[own].float(), {
        "reward/group_std_mean": result.group_std_mean,
        "reward/zero_std_fraction": result.zero_std_fraction,
    }
