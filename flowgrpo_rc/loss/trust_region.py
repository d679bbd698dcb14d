"""Objectives that look at the transition's mean besides its log-prob: GRPO-Guard and Flow-DPPO.

Both read ``PolicyInputs.shift``: how far each step's transition has moved from the old policy's. Ratios are
``pi_theta / pi_old`` throughout.
"""

import torch

from flowgrpo_rc.loss.objectives import normalised_log_ratio
from flowgrpo_rc.loss.policy import PolicyInputs, PolicyLimits, PolicyTerms, kept, ppo_clip, select, weigh


def grpo_guard(inputs: PolicyInputs, limits: PolicyLimits) -> PolicyTerms:
    """The clipped objective on a ratio whose bias and scale no longer depend on the timestep, divided by ``dt``.

    ``ratio = exp((log_prob - old_log_prob + kl) * step_std)``, each **per sample**: a micro-batch may mix timesteps.
    Gradients flow through ``log_prob`` and ``kl``. The returned ``log_ratio`` is the normalised one.

    Source: GRPO-Guard, arXiv 2510.22319.
    """
    shift = inputs.shift
    assert shift is not None
    assert shift.dt is not None
    log_ratio = kept(inputs.log_prob - inputs.old_log_prob.detach(), inputs.keep)
    terms = ppo_clip(
        normalised_log_ratio(log_ratio, shift.kl, shift.step_std),
        torch.zeros_like(inputs.old_log_prob),  # the normalised log ratio holds the old log-prob already
        inputs.advantages,
        clip_low=limits.clip_low,
        clip_high=limits.clip_high,
        weights=inputs.weights,
        keep=inputs.keep,
    )
    return terms._replace(loss=terms.loss / shift.dt)


def flow_dppo(inputs: PolicyInputs, limits: PolicyLimits) -> PolicyTerms:
    """``-A * ratio``, without the elements that have left the trust region and are moving further out.

    An element is left out when ``kl >= threshold`` and its gradient would enlarge the distance: a ratio above 1 with a
    positive advantage, or below 1 with a negative one.

    Source: Flow-DPPO; the same asymmetric mask as DPPO for tokens.
    """
    assert inputs.shift is not None
    advantages = inputs.advantages.detach()
    log_ratio = select(inputs.log_prob - inputs.old_log_prob.detach(), inputs.keep)
    outward = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    left_out = (inputs.shift.kl.detach() >= limits.threshold) & outward
    # Selected before exp: an overflow times 0 would be NaN in the gradient.
    ratio = torch.exp(torch.where(left_out, 0.0, log_ratio))
    loss = torch.where(left_out, 0.0, -kept(advantages, inputs.keep) * ratio)
    return PolicyTerms(weigh(loss, inputs.weights, inputs.keep), log_ratio, left_out)
