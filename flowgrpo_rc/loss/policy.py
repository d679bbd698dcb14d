"""Policy-gradient objectives, element by element; tensors and floats in, tensors out.

In every ratio the numerator comes first: ``ratio = pi_theta / pi_old = exp(log_prob - old_log_prob)``.
Gradients flow through ``log_prob`` alone; ``old_log_prob``, advantages, weights and the keep-mask are constants.
Rejected elements (padding, NaN, an overflow) are replaced *before* any arithmetic, so that they reach neither the loss
nor its gradient.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction import SAFETY_BOUND
from flowgrpo_rc.loss.objectives import normalised_log_ratio


class TransitionShift(NamedTuple):
    """Distance of the SDE steps' transitions from the old policy's. Rejected steps have neutral values."""

    kl: Float[Tensor, "..."]
    """``mean over dims of (mu - mu_old)^2 / (2 step_std^2)``: the closed-form ``KL(pi_theta || pi_old)`` per latent
    dimension, with gradient; 0 if rejected."""
    step_std: Float[Tensor, "..."]
    """Standard deviation of the whole step, which both policies share; 1 if rejected."""
    dt: Float[Tensor, "..."] | None = None
    """Positive difference of the noise levels around the step, for objectives with ``needs_sigmas``; 1 if rejected."""


class Matching(NamedTuple):
    """Velocities at noised clean images, in the shape of the log-probs and of the latents."""

    velocity: Float[Tensor, "..."]
    """Of the current policy, with gradient."""
    target: Float[Tensor, "..."]
    """``noise - clean_latents``."""
    sigma: Float[Tensor, "..."]
    """Noise level ``t`` of each element."""
    old_velocity: Float[Tensor, "..."] | None = None
    """Of the old policy, for objectives with ``needs_old_means``."""
    ref_velocity: Float[Tensor, "..."] | None = None
    """Of the reference, for objectives with ``needs_reference``."""


class PolicyInputs(NamedTuple):
    """Inputs of every objective, in the shape of the log-probs; an element is an SDE step or a token."""

    log_prob: Float[Tensor, "..."]
    """Of ``pi_theta``, at least float32, with gradient."""
    old_log_prob: Float[Tensor, "..."]
    """Of ``pi_old``, or in bypass mode of ``pi_rollout``."""
    advantages: Float[Tensor, "..."]
    """Constants."""
    weights: Float[Tensor, "..."] | None = None
    """Importance weights in the loss, detached; ``None``: 1."""
    keep: Bool[Tensor, "..."] | None = None
    """Elements in the loss (for tokens the modified mask); ``None``: all."""
    shift: TransitionShift | None = None
    """For objectives on SDE steps with ``needs_old_means``."""
    matching: Matching | None = None
    """For objectives on clean images."""


class PolicyLimits(NamedTuple):
    """The configured limits of an update."""

    clip_low: float | Float[Tensor, "..."]
    """Half width of the clip band below a ratio of 1."""
    clip_high: float | Float[Tensor, "..."]
    """Half width of the clip band above a ratio of 1."""
    dual_clip: float | None = None
    """Bound of the dual clip; ``None``: no such bound."""
    threshold: float = math.inf
    """Value of the limit, for objectives whose limit is a ``Threshold``."""


class PolicyTerms(NamedTuple):
    """Result of an objective."""

    loss: Float[Tensor, "..."]
    """Loss per element before any reduction, 0 if rejected."""
    log_ratio: Float[Tensor, "..."]
    """The log ratio in the loss, 0 if rejected."""
    left_out: Bool[Tensor, "..."] | None = None
    """Elements without a gradient because they have left the trust region, for objectives that do not clip."""


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

    PPO (arXiv 1707.06347); on the diffusion path with one advantage per image, Flow-GRPO's objective
    (arXiv 2505.05470). Elements with ``keep=False`` have a loss of 0. With ``dual_clip`` (above 1) the loss at
    ``A < 0`` is at most ``-A * dual_clip``, before the weights (dual-clip PPO, arXiv 1912.09729).
    """
    log_ratio = select(log_prob - old_log_prob.detach(), keep)
    ratio = torch.exp(log_ratio)
    # Rejected advantages too: a NaN reward of a rejected image must not reach the loss.
    advantages = kept(advantages.detach(), keep)
    # Bounds may be tensors, one width per timestep, for clip_ratio=auto.
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)  # pyright: ignore[reportCallIssue, reportArgumentType]
    # The larger loss: clipping removes the incentive to move further, never the one to move back.
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
    # Each factor is selected by itself: 0 * NaN of a rejected element would be NaN.
    loss = -kept(advantages.detach(), keep) * kept(log_prob, keep)
    # Without a clip no element outside the clip band has lost its gradient.
    left_out = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyTerms(weigh(loss, weights, keep), log_ratio.detach(), left_out)


def flow_grpo(inputs: PolicyInputs, limits: PolicyLimits) -> PolicyTerms:
    """PPO's clipped objective, ``ppo_clip``, on the plain ratio: the objective of Flow-GRPO, and of DanceGRPO.

    Source: Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818.
    """
    return ppo_clip(
        inputs.log_prob,
        inputs.old_log_prob,
        inputs.advantages,
        clip_low=limits.clip_low,
        clip_high=limits.clip_high,
        weights=inputs.weights,
        keep=inputs.keep,
        dual_clip=limits.dual_clip,
    )


def grpo_guard(inputs: PolicyInputs, limits: PolicyLimits) -> PolicyTerms:
    """The clipped objective on a ratio without the timestep's bias and scale, divided by ``dt``.

    ``ratio = exp((log_prob - old_log_prob + kl) * step_std)``, all **per sample**: a micro-batch may mix timesteps.
    Gradients flow through ``log_prob`` and ``kl``. The returned ``log_ratio`` is the normalised one.

    Source: GRPO-Guard, arXiv 2510.22319.
    """
    shift = inputs.shift
    assert shift is not None
    assert shift.dt is not None
    # Clamped later, by flow_grpo: the safety bound belongs to the normalised ratio.
    log_ratio = kept(inputs.log_prob - inputs.old_log_prob.detach(), inputs.keep)
    normalised = normalised_log_ratio(log_ratio, shift.kl, shift.step_std)
    # The normalised log ratio already contains the old log-prob.
    terms = flow_grpo(inputs._replace(log_prob=normalised, old_log_prob=torch.zeros_like(normalised)), limits)
    return terms._replace(loss=terms.loss / shift.dt)


def flow_dppo(inputs: PolicyInputs, limits: PolicyLimits) -> PolicyTerms:
    """``-A * ratio``, except for elements that have left the trust region and would move further out.

    These have ``kl >= threshold`` and a gradient that would increase the distance: a ratio above 1 with a positive
    advantage, or below 1 with a negative one.

    Source: Flow-DPPO; the same asymmetric mask as DPPO for tokens.
    """
    assert inputs.shift is not None
    advantages = inputs.advantages.detach()
    # The mask is asymmetric: an element that moves back keeps its gradient, however far out it is.
    log_ratio = select(inputs.log_prob - inputs.old_log_prob.detach(), inputs.keep)
    outward = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    left_out = (inputs.shift.kl.detach() >= limits.threshold) & outward
    # Select before exp: an overflow times 0 would be NaN in the gradient.
    ratio = torch.exp(torch.where(left_out, 0.0, log_ratio))
    loss = torch.where(left_out, 0.0, -kept(advantages, inputs.keep) * ratio)
    return PolicyTerms(weigh(loss, inputs.weights, inputs.keep), log_ratio, left_out)


def k3_kl(
    log_prob: Float[Tensor, "..."], ref_log_prob: Float[Tensor, "..."], *, keep: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "..."]:
    """``exp(d) - 1 - d`` with ``d = ref_log_prob - log_prob``: each sample's estimate of KL(pi_theta || pi_ref).

    ``d`` is clamped to the safety bound; there is no gradient beyond. 0 if rejected.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    gap = select(ref_log_prob.detach() - log_prob, keep)
    # exp(gap) - 1 would cancel for a small gap.
    return torch.expm1(gap) - gap


def kept(values: Tensor, keep: Tensor | None, fill: float = 0.0) -> Tensor:
    """The values of kept elements, ``fill`` elsewhere; ``keep`` may lack trailing dimensions."""
    if keep is None:
        return values
    # A multiplication by the mask would keep NaN, and where() after exp() would keep NaN gradients.
    return torch.where(keep[(...,) + (None,) * (values.dim() - keep.dim())], values, fill)


def select(log_ratio: Tensor, keep: Tensor | None) -> Tensor:
    """The log ratio of kept elements, 0 elsewhere, clamped to the safety bound."""
    return torch.clamp(kept(log_ratio, keep), -SAFETY_BOUND, SAFETY_BOUND)


def weigh(loss: Tensor, weights: Tensor | None, keep: Tensor | None) -> Tensor:
    """The loss times the detached weights, 0 where an element is not kept."""
    if weights is not None:
        # Weights are constants: a gradient through them would be another objective.
        loss = loss * kept(weights.detach(), keep)
    return kept(loss, keep)
