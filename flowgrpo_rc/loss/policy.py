"""Policy-gradient objectives, element by element; tensors and floats in, tensors out.

In every ratio the numerator comes first: ``ratio = pi_theta / pi_old = exp(log_prob - old_log_prob)``.
Gradients flow through ``log_prob`` alone; ``old_log_prob``, advantages, weights and the keep-mask are constants.
Elements that are not kept are selected away *before* the exponential, so that an overflowed ratio there can
reach neither the loss nor its gradient.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.sde import transition_kl

SAFETY_BOUND = 20.0
"""Exponents are clamped to [-20, 20] before ``exp``, as everywhere in this package."""


class PolicyTerms(NamedTuple):
    """Unreduced loss and the log ratio it came from (0 where an element is not kept)."""

    loss: Float[Tensor, "..."]
    log_ratio: Float[Tensor, "..."]


def ppo_clip(
    log_prob: Float[Tensor, "..."],
    old_log_prob: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    *,
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
) -> PolicyTerms:
    """``max(-A*ratio, -A*clip(ratio, 1 - clip_low, 1 + clip_high))``, times ``weights`` if there are any.

    PPO (arXiv 1707.06347); on the diffusion path with one advantage an image it is Flow-GRPO's objective
    (arXiv 2505.05470). Elements with ``keep=False`` have a loss of 0.
    """
    log_ratio = select(log_prob - old_log_prob.detach(), keep)
    ratio, advantages = torch.exp(log_ratio), advantages.detach()
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return PolicyTerms(weigh(loss, weights, keep), log_ratio)


def reinforce(
    log_prob: Float[Tensor, "..."],
    old_log_prob: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    *,
    weights: Float[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
) -> PolicyTerms:
    """``-A * log_prob * w`` with detached weights ``w = pi_theta / pi_rollout`` (1 when there are none).

    ``old_log_prob`` does not enter the loss; the log ratio is returned for the metrics.
    """
    log_ratio = select(log_prob - old_log_prob.detach(), keep)
    loss = -advantages.detach() * (log_prob if keep is None else torch.where(keep, log_prob, 0.0))
    return PolicyTerms(weigh(loss, weights, keep), log_ratio.detach())


def gaussian_kl(
    mean: Float[Tensor, "B W *L"], ref_mean: Float[Tensor, "B W *L"], step_std: Float[Tensor, "B W"]
) -> Float[Tensor, "B W"]:
    """``mean over dims of (mean - ref_mean)^2 / (2 step_std^2)``: KL(pi_theta || pi_ref) of each step."""
    kl = transition_kl(mean.flatten(0, 1), ref_mean.detach().flatten(0, 1), step_std.flatten())
    return kl.view(mean.shape[:2])


def select(log_ratio: Tensor, keep: Tensor | None) -> Tensor:
    """The log ratio of kept elements, 0 elsewhere, clamped to the safety bound."""
    if keep is not None:
        log_ratio = torch.where(keep, log_ratio, 0.0)
    return torch.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)


def weigh(loss: Tensor, weights: Tensor | None, keep: Tensor | None) -> Tensor:
    """The loss times the detached weights, 0 where an element is not kept."""
    if weights is not None:
        loss = loss * weights.detach()
    return loss if keep is None else torch.where(keep, loss, 0.0)
