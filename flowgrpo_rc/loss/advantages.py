"""Group-relative advantages (GRPO, arXiv 2402.03300) for images of the same prompt."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

EPS = 1e-4
"""Added to every standard deviation before a division by it."""


class GroupAdvantages(NamedTuple):
    """Advantages and statistics of the groups."""

    advantages: Float[Tensor, " B"]
    group_std_mean: float
    """Mean over groups of the reward's (population) standard deviation, among kept images."""
    zero_std_fraction: float
    """Share of groups without a learning signal: kept rewards all equal, or fewer than two."""


def group_advantages(
    rewards: Shaped[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    norm_by_std: bool = True,
    global_std: bool = False,
    eps: float = EPS,
    keep: Bool[Tensor, " B"] | None = None,
) -> GroupAdvantages:
    """``(reward - mean of its group) / (std + eps)``.

    Args:
        rewards: one finite number per image, of any dtype.
        group: images of one prompt share a number; the numbers need not be consecutive.
        norm_by_std: ``False`` skips the division (Dr.GRPO, arXiv 2503.20783).
        global_std: divide by the standard deviation of *all* rewards instead of the group's (Flow-GRPO's
            choice: a group with nearly equal rewards does not get large advantages from noise).
        eps: added to the standard deviation.
        keep: images that rejection kept; ``None``: all. A rejected image enters no mean and no standard deviation,
            and its advantage is 0.

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
    # Checked on all images, before rejection: a group may lose images, but must not start with one.
    _, sizes = torch.unique(group, return_counts=True)
    if (sizes == 1).any():
        raise ValueError(
            f"{int((sizes == 1).sum())} of {len(sizes)} groups hold a single image; GRPO compares images of one "
            "prompt, so actor_rollout_ref.rollout.n must be at least 2"
        )
    keep = torch.ones_like(group, dtype=torch.bool) if keep is None else keep
    within = _WithinGroups.of(rewards, group, keep)
    divisor = torch.ones((), dtype=torch.float64, device=rewards.device)
    if norm_by_std:
        kept = rewards.double()[keep]
        # Without a kept image the groups' deviations are all 0, which gives advantages of 0.
        std = kept.std(correction=0) if global_std and len(kept) else within.std[within.member]
        divisor = std + eps
    advantages = within.centred_over(divisor)
    # Integer and half-precision rewards still give usable advantages.
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return GroupAdvantages(
        torch.zeros_like(rewards, dtype=dtype).masked_scatter_(keep, advantages.to(dtype)),
        group_std_mean=float(within.std.mean()),
        zero_std_fraction=float(within.flat.double().mean()),
    )


def normalised_sum(
    parts: Shaped[Tensor, "B K"],
    weights: Shaped[Tensor, " K"],
    group: Int[Tensor, " B"],
    *,
    eps: float = EPS,
    keep: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """``K`` rewards as one, each normalised within its prompt's group before it is weighted.

        z_k(i) = (r_k(i) - mean of r_k over the group of i) / (std of r_k over the group of i + eps)
        sum(i) = w_1 z_1(i) + ... + w_K z_K(i)

    A weight is thus a reward's share of the sum, independent of the reward's scale and spread. A reward that is
    constant within a group adds exactly 0 there. This is the first half of GDPO (arXiv 2601.05242). Its second half,
    division by the standard deviation over the batch, is ``group_advantages`` of the sum with ``global_std=True``: the
    sum's mean is 0 in every group.

    Args:
        parts: the unweighted, finite scores, one column per reward.
        weights: one per column.
        group: images of one prompt share a number.
        eps: added to each standard deviation, which is a population one (``correction=0``).
        keep: images that rejection kept; ``None``: all. A rejected image enters no mean and no standard deviation, and
            its sum is 0.

    Returns:
        ``(B,)`` float64.
    """
    keep = torch.ones_like(group, dtype=torch.bool) if keep is None else keep
    # Float64, because the parts cancel within each group.
    total = torch.zeros(len(group), dtype=torch.float64, device=parts.device)
    for scores, weight in zip(parts.unbind(1), weights.double(), strict=True):
        within = _WithinGroups.of(scores, group, keep)
        total[keep] += weight * within.centred_over(within.std[within.member] + eps)
    return total


class _WithinGroups(NamedTuple):
    """Kept values relative to their groups, in float64 because values may differ in their last digits only."""

    member: Int[Tensor, " kept"]
    """The group of each kept value, groups counted from 0."""
    centred: Float[Tensor, " kept"]
    """Each kept value minus the mean of its group."""
    std: Float[Tensor, " groups"]
    """Population standard deviation of each group."""
    flat: Bool[Tensor, " groups"]
    """True for groups with fewer than two kept values, or with equal ones."""

    @classmethod
    def of(cls, values: Tensor, group: Tensor, keep: Tensor) -> "_WithinGroups":
        names, member = torch.unique(group, return_inverse=True)
        member = member[keep]
        kept = values.double()[keep]
        # A group without a kept value has sums of 0, so any count above 0 gives 0.
        counts = torch.bincount(member, minlength=len(names)).clamp(min=1)
        mean = torch.zeros(len(names), dtype=torch.float64, device=kept.device).index_add_(0, member, kept)
        centred = kept - (mean / counts)[member]
        variance = torch.zeros_like(mean).index_add_(0, member, centred**2) / counts
        low = torch.full_like(mean, torch.inf).scatter_reduce_(0, member, kept, "amin")
        high = torch.full_like(mean, -torch.inf).scatter_reduce_(0, member, kept, "amax")
        # The rounded mean of equal values may differ from them, so compare the extremes, not the deviations.
        flat = low >= high  # also true without a kept value: low is still inf and high -inf
        return cls(member, centred, variance.sqrt(), flat)

    def centred_over(self, divisor: Tensor) -> Float[Tensor, " kept"]:
        """``centred / divisor``, and exactly 0 in flat groups."""
        return (self.centred / divisor).masked_fill(self.flat[self.member], 0.0)
