"""The actor's loss, on SDE steps and on tokens: which policies, which weights, which elements, which mean.

====================== ==================== ======================================== =========================
mode                   ``old_log_prob``     weights in the loss                      rejection in the loss
====================== ==================== ======================================== =========================
decoupled              scored by the actor  ``pi_old/pi_rollout``, from the batch    from the same ratio, fixed
bypass + ``ppo_clip``  the rollout's        none (they would count twice)            ``pi_theta/pi_rollout``
bypass + ``reinforce`` the rollout's        ``pi_theta/pi_rollout``, detached        the same ratio
====================== ==================== ======================================== =========================

In bypass mode weights and rejection are computed here, afresh for every call; in decoupled mode they come with
the batch (on the diffusion path from ``apply_rollout_correction_to_diffusion_batch``).

The *token path* is taken when the batch has a ``response_mask``. It differs in four things: the mean is one of
``aggregation``'s over the modified mask, PPO clips dually, the KL is the k3 estimate from ``ref_log_probs``, and
advantages are not clamped.
"""

import math
import warnings
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction import (
    MetricAccumulator,
    RolloutCorrection,
    RolloutCorrectionConfig,
    compute_rollout_correction,
)
from flowgrpo_rc.correction.mapping import BatchHolder, TensorMapping, as_mapping, response_mask
from flowgrpo_rc.loss import aggregation, inputs
from flowgrpo_rc.loss.inputs import Elements
from flowgrpo_rc.loss.metrics import LossMetrics
from flowgrpo_rc.loss.policy import PolicyTerms, gaussian_kl, k3_kl, kept, ppo_clip, reinforce
from flowgrpo_rc.loss.trust_region import flow_dppo, grpo_guard

MEAN_MODES = ("grpo_guard", "flow_dppo")


@runtime_checkable
class LossOptions(Protocol):
    """What ``diffusion_loss`` reads of ``DiffusionLossConfig``."""

    loss_mode: str
    kl_mask_threshold: float
    clip_ratio: float | str
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float | None
    adv_clip_max: float
    loss_agg_mode: str
    loss_scale_factor: float | None


@runtime_checkable
class ActorLossConfig(Protocol):
    """What ``diffusion_loss`` reads of ``DiffusionActorConfig``."""

    @property
    def diffusion_loss(self) -> LossOptions: ...
    @property
    def rollout_correction(self) -> RolloutCorrectionConfig: ...
    @property
    def use_kl_loss(self) -> bool: ...
    @property
    def kl_loss_coef(self) -> float: ...


class LossSums(NamedTuple):
    """A loss as a sum and its denominator, so that micro-batches and ranks add up exactly.

    ``loss_sum`` carries the gradient. Add sums (their gradients) and denominators over everything that one
    optimizer step sees, and divide once.
    """

    loss_sum: Float[Tensor, ""]
    denominator: Float[Tensor, ""]
    metrics: LossMetrics
    correction: RolloutCorrection | None


def diffusion_loss(
    config: ActorLossConfig,
    model_output: TensorMapping,
    data: TensorMapping | BatchHolder,
    dp_group: object | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Mean loss of one batch and its metrics.

    Args:
        config: a ``DiffusionActorConfig``.
        model_output: ``log_probs`` ``(B,)`` (one SDE step) or ``(B, W)`` (the window), with gradient. For
            ``use_kl_loss``, ``grpo_guard`` and ``flow_dppo`` also ``transition_means`` (log-prob shape + latents) and
            ``transition_stds`` (log-prob shape); ``use_kl_loss`` also ``ref_transition_means``.
        data: ``old_log_probs`` (bypass mode: ``rollout_log_probs``, or what was put into ``old_log_probs`` for it),
            ``advantages`` ``(B,)`` or the shape of the log-probs; decoupled correction adds
            ``rollout_is_weights`` and ``rollout_keep``; ``timesteps`` gives the per-timestep gap metrics.
            ``grpo_guard`` and ``flow_dppo`` compare with ``old_transition_means`` (bypass mode: ``rollout_means``);
            ``grpo_guard`` also reads ``sigmas`` and ``next_sigmas``. ``clip_ratio=auto`` reads ``clip_widths``, the
            half width of the clip band of every element; ``rollout_rs_threshold=auto`` in bypass mode reads
            ``rollout_rs_bounds`` ``(B,)``.
            With ``response_mask`` ``(B, T)`` (non-zero: a valid token) the token path is taken: log-probs ``(B, T)``,
            and ``use_kl_loss`` reads ``ref_log_probs`` ``(B, T)`` from here instead of means. What masked positions
            hold has no effect.
            A dict, a ``TensorDict``, or an object with such a mapping in ``.batch``; not modified.
        dp_group: None: this rank alone. A data-parallel process group: all of its ranks must call; the denominator
            is then the mean over its ranks of the global one, so that averaging gradients over ranks (DDP) gives
            exactly the global mean, and the metrics are those of all ranks together.

    Returns:
        ``(loss, metrics)``. If everything is rejected the loss is exactly 0, with zero gradients, a warning and
        ``actor/kept_fraction = 0``.

    Raises:
        ValueError: a missing key or a shape that does not fit, by name; a loss or log ratio that is NaN or infinite,
            naming the inputs that are, or that are no clip widths.

    Warns:
        UserWarning: everything is rejected; or decoupled mode is to correct, and ``data`` has no weights.
    """
    model_output, data = as_mapping(model_output), as_mapping(data)
    _warn_if_uncorrected(config.rollout_correction, data)
    sums = _sums(config, model_output, data)
    reported, denominator = sums.metrics, sums.denominator
    if dp_group is not None:
        reported = reported.all_reduce(dp_group)
        ranks = torch.distributed.get_world_size(dp_group)  # type: ignore[arg-type]
        denominator = (reported.denominator / ranks).to(denominator.dtype)
    loss = sums.loss_sum / torch.where(denominator > 0, denominator, 1.0)
    metrics = reported.compute()
    coefficient = config.kl_loss_coef if config.use_kl_loss else 0.0
    metrics["actor/loss"] = metrics["actor/pg_loss"] + coefficient * metrics["actor/kl_loss"]
    for name in ("actor/loss", "actor/log_ratio_abs_mean"):  # the loss clamps log ratios
        if not math.isfinite(metrics[name]):
            raise ValueError(f"{name} is {metrics[name]}; {inputs.not_finite(model_output=model_output, data=data)}")
    if metrics["actor/kept_fraction"] == 0:
        warnings.warn("rollout correction rejected every element of this batch: loss and gradients are 0", stacklevel=2)
    if config.rollout_correction.bypass_mode:
        gap = _correction_metrics(sums.correction, dp_group)
        metrics |= {f"actor/{name}": value for name, value in gap.items()}
    return loss, metrics


def diffusion_loss_sums(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping | BatchHolder
) -> LossSums:
    """The loss of ``diffusion_loss`` before its division: see ``LossSums``. At least float32, whatever the input.

    Unlike ``diffusion_loss`` it does not wait for the device: whether the sums are finite is the caller's to see.
    """
    data = as_mapping(data)
    _warn_if_uncorrected(config.rollout_correction, data)
    return _sums(config, as_mapping(model_output), data)


def _sums(config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping) -> LossSums:
    options = config.diffusion_loss
    elements, correction = _elements(config, model_output, data)
    terms, masked = _objective(config, model_output, data, elements)
    denominator = _denominator(config, elements)
    policy_sum = _sum(terms.loss, options, elements)
    kl_sum = policy_sum.new_zeros(())
    if config.use_kl_loss:
        kl_sum = _sum(_kl(model_output, data, elements), options, elements)
    low, high = clip_band(options, inputs.clip_widths(data, elements.log_prob))
    metrics = LossMetrics.of(
        loss_sum=policy_sum,
        denominator=denominator,
        keep=elements.keep,
        log_ratio=kept(elements.log_prob.detach() - elements.old_log_prob, elements.keep),
        objective_log_ratio=terms.log_ratio,
        masked=masked,
        advantages=elements.advantages,
        clip_low=low,
        clip_high=high,
        dual_clip=None if masked is not None else _dual_clip(options, elements),
        kl_sum=kl_sum,
        valid=elements.valid,
    )
    total = policy_sum + config.kl_loss_coef * kl_sum if config.use_kl_loss else policy_sum
    return LossSums(total, denominator, metrics, correction)


def _warn_if_uncorrected(rc: RolloutCorrectionConfig, data: TensorMapping) -> None:
    """Decoupled mode is corrected before the loss, once for the whole batch; say so where that was left out.

    Of tokens the mask may hold the rejection, so that only weights can be missed.
    """
    names = set(data.keys())
    rejects = rc.plan().can_reject and "response_mask" not in names
    asked = not rc.bypass_mode and (rejects or rc.rollout_is is not None)
    if asked and "rollout_log_probs" in names and names.isdisjoint(("rollout_is_weights", "rollout_keep")):
        warnings.warn(
            "rollout_correction asks for weights or rejection with bypass_mode=false, but data holds neither "
            "rollout_is_weights nor rollout_keep: this loss is not corrected. Call "
            "apply_rollout_correction_to_diffusion_batch(batch, config.rollout_correction) on the whole batch first, "
            "or set rollout_correction=None",
            stacklevel=3,
        )


def _elements(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping
) -> tuple[Elements, RolloutCorrection | None]:
    """What the objective reads, checked, and in bypass mode the correction that it comes from."""
    options, rc = config.diffusion_loss, config.rollout_correction
    log_prob = inputs.require(model_output, "log_probs", "model_output")
    log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    valid = response_mask(data, log_prob)
    if valid is not None and options.loss_mode in MEAN_MODES:
        raise ValueError(
            f"diffusion_loss.loss_mode: got {options.loss_mode} with a response_mask in data, but tokens have no "
            "transition means; set loss_mode=flow_grpo, or leave response_mask out for SDE steps"
        )
    old_log_prob = inputs.old_log_probs(data, log_prob, bypass=rc.bypass_mode)
    advantages = inputs.advantages_like(data, log_prob, options.adv_clip_max if valid is None else None)
    if not rc.bypass_mode:
        weights, keep = _decoupled_correction(data, log_prob, valid)
        return Elements(log_prob, old_log_prob, advantages, weights, keep, valid), None
    if valid is not None and not valid.any():
        return Elements(log_prob, old_log_prob, advantages, None, valid, valid), None  # nothing to correct
    timesteps = inputs.optional(data, "timesteps") if valid is None else None
    bounds = inputs.optional(data, "rollout_rs_bounds")
    correction = compute_rollout_correction(
        log_prob.detach(), old_log_prob, valid, config=rc, timesteps=timesteps, rs_bounds=bounds
    )
    weights = correction.weights if rc.loss_type == "reinforce" else None
    return Elements(log_prob, old_log_prob, advantages, weights, correction.mask.bool(), valid), correction


def _decoupled_correction(
    data: TensorMapping, log_prob: Tensor, valid: Tensor | None
) -> tuple[Float[Tensor, "..."] | None, Bool[Tensor, "..."] | None]:
    """The batch's weights and keep-mask. A diffusion batch may carry the mask in its weights alone (0 = rejected)."""
    weights = inputs.like_log_probs(data, "rollout_is_weights", log_prob)
    keep = inputs.like_log_probs(data, "rollout_keep", log_prob)
    if valid is not None:
        return weights, valid if keep is None else valid & keep.bool()
    if keep is None and weights is not None:
        keep = weights != 0
    return weights, None if keep is None else keep.bool()


def _objective(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping, elements: Elements
) -> tuple[PolicyTerms, Tensor | None]:
    """The configured objective's terms, and for objectives that do not clip the elements that they leave out."""
    options, rc = config.diffusion_loss, config.rollout_correction
    log_prob, old_log_prob, advantages, weights, keep, _ = elements
    low, high = clip_band(options, inputs.clip_widths(data, log_prob))
    if rc.bypass_mode and rc.loss_type == "reinforce":
        terms = reinforce(log_prob, old_log_prob, advantages, weights=weights, keep=keep)
        return terms, torch.zeros_like(terms.loss, dtype=torch.bool)
    if options.loss_mode not in MEAN_MODES:
        terms = ppo_clip(
            log_prob,
            old_log_prob,
            advantages,
            clip_low=low,
            clip_high=high,
            weights=weights,
            keep=keep,
            dual_clip=_dual_clip(options, elements),
        )
        return terms, None
    shift, std = inputs.mean_shift(model_output, data, elements, bypass=rc.bypass_mode)
    if options.loss_mode == "flow_dppo":
        threshold, kl = options.kl_mask_threshold, shift / (2 * std**2)
        return flow_dppo(log_prob, old_log_prob, advantages, kl=kl, kl_threshold=threshold, weights=weights, keep=keep)
    sigmas, next_sigmas = (
        inputs.require(data, name, "data (loss_mode=grpo_guard)") for name in ("sigmas", "next_sigmas")
    )
    terms = grpo_guard(
        log_prob,
        old_log_prob,
        advantages,
        mean_shift=shift,
        step_std=std,
        dt=sigmas - next_sigmas,
        clip_low=low,
        clip_high=high,
        weights=weights,
        keep=keep,
    )
    return terms, None


def clip_band(options: LossOptions, widths: Tensor | None = None) -> tuple[Any, Any]:
    """Half widths below and above a ratio of 1: numbers, or with ``clip_ratio=auto`` the batch's ``clip_widths``."""
    width: Any = options.clip_ratio
    if width == "auto":
        if widths is None:
            raise ValueError(
                "data lacks 'clip_widths', which clip_ratio=auto reads; add it, or give clip_ratio a number"
            )
        width = widths
    low = width if options.clip_ratio_low is None else options.clip_ratio_low
    return low, width if options.clip_ratio_high is None else options.clip_ratio_high


def _dual_clip(options: LossOptions, elements: Elements) -> float | None:
    """Only the token path clips dually, and with ``clip_ratio_c=None`` not even that."""
    return None if elements.valid is None else options.clip_ratio_c


def _kl(model_output: TensorMapping, data: TensorMapping, elements: Elements) -> Float[Tensor, "..."]:
    """KL to the reference of each element, 0 where not kept: from transition means, or of tokens from log-probs."""
    log_prob, keep = elements.log_prob, elements.keep
    if elements.valid is not None:
        inputs.like_log_probs(data, "ref_log_probs", log_prob)
        reference = inputs.require(data, "ref_log_probs", "data (use_kl_loss=true)")
        return k3_kl(log_prob, reference, keep=keep)
    mean, ref_mean, std = inputs.reference_means(model_output, elements)
    if log_prob.dim() == 1:
        mean, ref_mean, std = mean.unsqueeze(1), ref_mean.unsqueeze(1), std.unsqueeze(1)
    return gaussian_kl(mean, ref_mean, std).reshape(log_prob.shape)


def _sum(values: Tensor, options: LossOptions, elements: Elements) -> Float[Tensor, ""]:
    """The sum whose quotient with ``_denominator`` is the mean; ``values`` are 0 where nothing is kept."""
    if elements.valid is None or elements.keep is None:
        return values.sum()
    return aggregation.aggregate(values, elements.keep, options.loss_agg_mode, options.loss_scale_factor)


def _denominator(config: ActorLossConfig, elements: Elements) -> Float[Tensor, ""]:
    """Tokens: the aggregation's count. SDE steps: ``all`` of them (a rejection shrinks the gradient), or ``kept``."""
    log_prob, keep = elements.log_prob, elements.keep
    if elements.valid is not None and keep is not None:
        return aggregation.count(keep, config.diffusion_loss.loss_agg_mode).to(log_prob.dtype)
    if keep is not None and config.rollout_correction.rejection_normalization == "kept":
        return keep.sum().to(log_prob.dtype)
    return torch.full((), log_prob.numel(), dtype=log_prob.dtype, device=log_prob.device)


def _correction_metrics(correction: RolloutCorrection | None, dp_group: object | None) -> dict[str, float]:
    """The correction's metrics: of this rank, or with a group of all its ranks (also of those with no valid token)."""
    if dp_group is None:
        return {} if correction is None else correction.metrics
    everywhere = MetricAccumulator()
    if correction is not None:
        everywhere.add(correction)
    return everywhere.compute(dp_group)
