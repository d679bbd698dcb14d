"""Objectives that look at the transition's mean besides its log-prob: GRPO-Guard and Flow-DPPO.

``mean_shift`` is ``mean over dims of (mu - mu_old)^2`` for each step, ``step_std`` the standard deviation of the whole
step (both policies share it), so ``mean_shift / (2 step_std^2)`` is ``KL(pi_theta || pi_old)`` of the step, averaged
over the latent dimensions. Ratios are ``pi_theta / pi_old`` throughout.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.loss.policy import PolicyTerms, kept, ppo_clip, select, weigh


def grpo_guard(
    log_prob: Float[Tensor, "..."],
    old_log_prob: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    *,
    mean_shift: Float[Tensor, "..."],
    step_std: Float[Tensor, "..."],
    dt: Float[Tensor, "..."],
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
) -> PolicyTerms:
    """The clipped objective on a ratio whose bias and scale no longer depend on the timestep, divided by ``dt``.

    ``ratio = exp((log_prob - old_log_prob + mean_shift / (2 s^2)) * s)`` with ``s = step_std``, each **per sample**:
    a micro-batch may mix timesteps. Gradients flow through ``log_prob`` and ``mean_shift``. The returned ``log_ratio``
    is the guarded one.

    Source: GRPO-Guard, arXiv 2510.22319.
    """
    std, dt = kept(step_std, keep, 1.0), kept(dt, keep, 1.0)
    guarded = (kept(log_prob - old_log_prob.detach(), keep) + kept(mean_shift, keep) / (2 * std**2)) * std
    zeros = torch.zeros_like(old_log_prob)
    terms = ppo_clip(guarded, zeros, advantages, clip_low=clip_low, clip_high=clip_high, weights=weights, keep=keep)
    return PolicyTerms(terms.loss / dt, terms.log_ratio)


def flow_dppo(
    log_prob: Float[Tensor, "..."],
    old_log_prob: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    *,
    kl: Float[Tensor, "..."],
    kl_threshold: float,
    weights: Float[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
) -> tuple[PolicyTerms, Bool[Tensor, "..."]]:
    """``-A * ratio``, without the elements that have left the trust region and are moving further out.

    An element is left out when ``kl >= kl_threshold`` and its gradient would enlarge the distance: a ratio above 1 with
    a positive advantage, or below 1 with a negative one. Returns the terms and which elements were left out.

    Source: Flow-DPPO; the same asymmetric mask as DPPO for tokens.
    """
    log_ratio = select(log_prob - old_log_prob.detach(), keep)
    outward = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    masked = (kl.detach() >= kl_threshold) & outward
    ratio = torch.exp(torch.where(masked, 0.0, log_ratio))
    loss = torch.where(masked, 0.0, -kept(advantages.detach(), keep) * ratio)
    return PolicyTerms(weigh(loss, weights, keep), log_ratio), masked
