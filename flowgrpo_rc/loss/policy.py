"""Policy-gradient objectives, element by element; tensors and floats in, tensors out.

In every ratio the numerator comes first: ``ratio = pi_theta / pi_old = exp(log_prob - old_log_prob)``.
Gradients flow through ``log_prob`` alone; ``old_log_prob``, advantages, weights and the keep-mask are constants.
Whatever an element that is not kept holds (padding, NaN, an overflow) is selected away *before* any arithmetic, so
that it can reach neither the loss nor its gradient.
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
    clip_low: float | Float[Tensor, "..."],
    clip_high: float | Float[Tensor, "..."],
    weights: Float[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """``max(-A*ratio, -A*clip(ratio, 1 - clip_low, 1 + clip_high))``, times ``weights`` if there are any.

    PPO (arXiv 1707.06347); on the diffusion path with one advantage an image it is Flow-GRPO's objective
    (arXiv 2505.05470). Elements with ``keep=False`` have a loss of 0. With ``dual_clip`` (above 1) the loss at
    ``A < 0`` is at most ``-A * dual_clip``, before the weights (dual-clip PPO, arXiv 1912.09729).
    """
    log_ratio = select(log_prob - old_log_prob.detach(), keep)
    ratio, advantages = torch.exp(log_ratio), kept(advantages.detach(), keep)
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)  # pyright: ignore[reportCallIssue, reportArgumentType]
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        loss = torch.where((advantages < 0) & (ratio > dual_clip), -advantages * dual_clip, loss)
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
    loss = -kept(advantages.detach(), keep) * kept(log_prob, keep)
    return PolicyTerms(weigh(loss, weights, keep), log_ratio.detach())


def gaussian_kl(
    mean: Float[Tensor, "B W *L"], ref_mean: Float[Tensor, "B W *L"], step_std: Float[Tensor, "B W"]
) -> Float[Tensor, "B W"]:
    """``mean over dims of (mean - ref_mean)^2 / (2 step_std^2)``: KL(pi_theta || pi_ref) of each step."""
    kl = transition_kl(mean.flatten(0, 1), ref_mean.detach().flatten(0, 1), step_std.flatten())
    return kl.view(mean.shape[:2])


def k3_kl(
    log_prob: Float[Tensor, "..."], ref_log_prob: Float[Tensor, "..."], *, keep: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "..."]:
    """``exp(d) - 1 - d`` with ``d = ref_log_prob - log_prob``: each sample's estimate of KL(pi_theta || pi_ref).

    ``d`` is clamped to the safety bound, beyond which there is no gradient; 0 where an element is not kept.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    gap = select(ref_log_prob.detach() - log_prob, keep)
    return torch.expm1(gap) - gap


def kept(values: Tensor, keep: Tensor | None, fill: float = 0.0) -> Tensor:
    """The values of kept elements, ``fill`` elsewhere; ``keep`` may lack trailing dimensions."""
    if keep is None:
        return values
    return torch.where(keep[(...,) + (None,) * (values.dim() - keep.dim())], values, fill)


def select(log_ratio: Tensor, keep: Tensor | None) -> Tensor:
    """The log ratio of kept elements, 0 elsewhere, clamped to the safety bound."""
    return torch.clamp(kept(log_ratio, keep), -SAFETY_BOUND, SAFETY_BOUND)


def weigh(loss: Tensor, weights: Tensor | None, keep: Tensor | None) -> Tensor:
    """The loss times the detached weights, 0 where an element is not kept."""
    if weights is not None:
        loss = loss * kept(weights.detach(), keep)
    return kept(loss, keep)
