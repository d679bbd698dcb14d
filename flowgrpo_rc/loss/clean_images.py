"""Objectives on clean images: noise a finished image anew, and weigh the matching error of the velocity.

For a clean latent ``x0``, noise ``e`` and noise level ``t`` in (0, 1]: ``x_t = (1-t) x0 + t e``, and the velocity ``v``
at ``x_t`` is to match ``u = e - x0``. An element is one ``(t, e)`` of an image. As everywhere, gradients flow through
the current velocity alone, and rejected elements are replaced before any arithmetic.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowgrpo_rc.loss.objectives import ADV_MODES, AWM_POWERS
from flowgrpo_rc.loss.policy import Matching, PolicyInputs, PolicyLimits, PolicyTerms, kept, select, weigh


def matching_log_prob(
    velocity: Float[Tensor, "..."], target: Float[Tensor, "..."], sigma: Float[Tensor, "..."], weighting: str
) -> Float[Tensor, "..."]:
    """``-w(t) mean((v - u)^2)`` over the latent dimensions, ``w`` being 1, ``t`` or ``t^2``: an estimate of the image's
    log-prob per latent dimension, up to a constant. At least float32.

    Source: Advantage Weighted Matching, arXiv 2509.25050.
    """
    error = _mean((velocity.to(torch.promote_types(velocity.dtype, torch.float32)) - target).square(), sigma.dim())
    return -error * sigma ** AWM_POWERS[weighting]


def diffusion_nft(
    inputs: PolicyInputs,
    limits: PolicyLimits,
    *,
    mix_beta: float,
    adaptive_weight_min: float,
    adv_mode: str,
    adv_clip_max: float,
) -> PolicyTerms:
    """``a (r L+ + (1 - r) L-) / b`` with ``r = 1/2 + A/(2a)``: pull the policy to images with a reward above their
    group's, and an implicit negative policy to the others.

    ``v+ = (1-b) v_old + b v`` and ``v- = (1+b) v_old - b v``; ``L+-`` is the mean square of ``t (u - v+-)``, the error
    of the predicted clean image, over its detached mean size, which is at least ``adaptive_weight_min``. ``a`` is
    ``adv_clip_max``, ``b`` is ``mix_beta``.

    Source: DiffusionNFT, arXiv 2509.16117.
    """
    matching = _matching(inputs)
    assert matching.old_velocity is not None
    missed = matching.target - matching.velocity
    missed_before = matching.target - matching.old_velocity.detach()
    advantages = kept(ADV_MODES[adv_mode](inputs.advantages.detach()), inputs.keep).to(missed.dtype)
    share = (0.5 + advantages / (2 * adv_clip_max)).clamp(0, 1)
    level = matching.sigma[(...,) + (None,) * (missed.dim() - matching.sigma.dim())]
    loss = torch.zeros_like(share)
    for part, mix in ((share, mix_beta), (1 - share, -mix_beta)):
        error = level * ((1 - mix) * missed_before + mix * missed)
        size = _mean(error.detach().double().abs(), share.dim()).clamp(min=adaptive_weight_min).to(error)
        loss = loss + part * _mean(error.square(), share.dim()) / size
    return _terms(inputs, loss * adv_clip_max / mix_beta)


def dpo(inputs: PolicyInputs, limits: PolicyLimits, *, dpo_beta: float) -> PolicyTerms:
    """``-log sigmoid(-beta/2 (D_w - D_l))`` with ``D = mean((v - u)^2) - mean((v_ref - u)^2)``, for both images of a
    pair.

    Images come in pairs: the first of the pair with its places, then the second. The one with the larger advantage is
    the winner; a tie has no gradient. Both images of a pair have the same ``(t, e)``, and are kept or rejected
    together.

    Source: Diffusion-DPO, arXiv 2311.12908.
    """
    matching = _matching(inputs)
    assert matching.ref_velocity is not None
    dims = matching.sigma.dim()
    now, reference = (
        _mean((matching.target - velocity).square(), dims)
        for velocity in (matching.velocity, matching.ref_velocity.detach())
    )
    better = now - reference
    advantages = kept(inputs.advantages.detach(), inputs.keep)
    winner = torch.sign(advantages[0::2] - advantages[1::2])
    loss = -logsigmoid(-0.5 * dpo_beta * winner * (better[0::2] - better[1::2]))
    return _terms(inputs, loss.repeat_interleave(2, dim=0))


def _matching(inputs: PolicyInputs) -> Matching:
    assert inputs.matching is not None
    return inputs.matching


def _mean(values: Tensor, dims: int) -> Tensor:
    """Mean over the latent dimensions, which follow the first ``dims``."""
    return values.flatten(dims).mean(-1)


def _terms(inputs: PolicyInputs, loss: Tensor) -> PolicyTerms:
    """The terms of a loss without a clip; its log ratio is for the metrics."""
    log_ratio = select(inputs.log_prob - inputs.old_log_prob, inputs.keep).detach()
    left_out = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyTerms(weigh(loss, inputs.weights, inputs.keep), log_ratio, left_out)
