"""Group-relative advantages (GRPO, arXiv 2402.03300) for images of the same prompt."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


class GroupAdvantages(NamedTuple):
    """Advantages and what the groups looked like."""

    advantages: Float[Tensor, " B"]
    group_std_mean: float
    """Mean over groups of the reward's (population) standard deviation, among kept images."""
    zero_std_fraction: float
    """Share of groups whose kept rewards are all the same, or fewer than two: they teach nothing."""


def group_advantages(
    rewards: Shaped[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    norm_by_std: bool = True,
    global_std: bool = False,
    eps: float = 1e-4,
    keep: Bool[Tensor, " B"] | None = None,
) -> GroupAdvantages:
    """``(reward - mean of its group) / (std + eps)``.

    Args:
        rewards: one finite number an image, of any dtype.
        group: images of one prompt share a number; the numbers need not be consecutive.
        norm_by_std: ``False`` leaves the division out (Dr.GRPO, arXiv 2503.20783).
        global_std: divide by the standard deviation of *all* rewards instead of the group's (Flow-GRPO's
            choice: it keeps an easy group's small differences from being blown up).
        eps: added to the standard deviation.
        keep: images that rejection kept; ``None``: all. The others enter no mean and no standard deviation, and
            their advantage is 0.

    The standard deviations are population ones (``correction=0``). A group of identical rewards, or with fewer than
    two kept images, gets advantages of exactly 0. Advantages are float32, or float64 where the rewards are.

    Raises:
        ValueError: empty or non-finite rewards, shapes that differ, or a group with a single image (its
            advantage is always 0, so it cannot be trained on).
    """
    if rewards.shape != group.shape or rewards.dim() != 1 or rewards.numel() == 0:
        raise ValueError(
            f"rewards and group must both be (B,) with B >= 1, got {tuple(rewards.shape)} and {tuple(group.shape)}"
        )
    bad = (~torch.isfinite(rewards)).nonzero()
    if len(bad):
        raise ValueError(f"rewards holds {len(bad)} non-finite values, first at index {int(bad[0])}")
    keep = torch.ones_like(group, dtype=torch.bool) if keep is None else keep
    _, member, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    if (sizes == 1).any():
        raise ValueError(
            f"{int((sizes == 1).sum())} of {len(sizes)} groups hold a single image; GRPO compares images of one "
            "prompt, so actor_rollout_ref.rollout.n must be at least 2"
        )
    # In float64: rewards of a group may differ in their last digits alone.
    values = rewards.double()[keep]
    member = member[keep]
    counts = torch.bincount(member, minlength=len(sizes)).clamp(min=1)
    mean = torch.zeros(len(counts), dtype=torch.float64, device=rewards.device).index_add_(0, member, values)
    centred = values - (mean / counts)[member]
    variance = torch.zeros_like(mean).index_add_(0, member, centred**2) / counts
    low = torch.full_like(mean, torch.inf).scatter_reduce_(0, member, values, "amin")
    high = torch.full_like(mean, -torch.inf).scatter_reduce_(0, member, values, "amax")
    # Equal rewards need not have a rounded mean equal to them, so that their spread tells, not their deviation.
    flat = low >= high  # also where nothing was kept: low is still inf and high -inf
    advantages = centred
    if norm_by_std:
        std = values.std(correction=0) if global_std and len(values) else variance.sqrt()[member]
        advantages = centred / (std + eps)
    advantages = advantages.masked_fill(flat[member], 0.0)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return GroupAdvantages(
        torch.zeros_like(rewards, dtype=dtype).masked_scatter_(keep, advantages.to(dtype)),
        group_std_mean=float(variance.sqrt().mean()),
        zero_std_fraction=float(flat.double().mean()),
    )
