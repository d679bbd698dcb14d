"""The actor's loss on the diffusion step path: which policies, which weights, which elements, which mean.

====================== ==================== ======================================== =========================
mode                   ``old_log_prob``     weights in the loss                      rejection in the loss
====================== ==================== ======================================== =========================
decoupled              scored by the actor  ``pi_old/pi_rollout``, from the batch    from the same ratio, fixed
bypass + ``ppo_clip``  the rollout's        none (they would count twice)            ``pi_theta/pi_rollout``
bypass + ``reinforce`` the rollout's        ``pi_theta/pi_rollout``, detached        the same ratio
====================== ==================== ======================================== =========================

In bypass mode weights and rejection are computed here, afresh for every call; in decoupled mode they come with
the batch (``apply_rollout_correction_to_diffusion_batch``).
"""

import warnings
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction import RolloutCorrection, RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.loss.metrics import LossMetrics
from flowgrpo_rc.loss.policy import PolicyTerms, gaussian_kl, ppo_clip, reinforce, select
from flowgrpo_rc.loss.trust_region import flow_dppo, grpo_guard


@runtime_checkable
class TensorMapping(Protocol):
    """A dict of tensors, a ``TensorDict``, or anything else with keys."""

    def keys(self) -> Any: ...
    def __getitem__(self, name: str, /) -> Any: ...


@runtime_checkable
class LossOptions(Protocol):
    """What ``diffusion_loss`` reads of ``DiffusionLossConfig``."""

    loss_mode: str
    kl_mask_threshold: float
    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    adv_clip_max: float


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
    data: TensorMapping,
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
            ``grpo_guard`` also reads ``sigmas`` and ``next_sigmas``.
            Not modified.
        dp_group: data-parallel process group; the denominator is then the mean over its ranks of the global
            count, so that averaging gradients over ranks (DDP) gives exactly the global mean.

    Returns:
        ``(loss, metrics)``. If everything is rejected the loss is exactly 0, with zero gradients, a warning and
        ``actor/kept_fraction = 0``.

    Raises:
        ValueError: a missing key or a shape that does not fit, by name.
    """
    sums = diffusion_loss_sums(config, model_output, data)
    denominator = sums.denominator.clone()
    if dp_group is not None:
        torch.distributed.all_reduce(denominator, group=dp_group)  # type: ignore[arg-type]
        denominator = denominator / torch.distributed.get_world_size(dp_group)  # type: ignore[arg-type]
    loss = sums.loss_sum / torch.where(denominator > 0, denominator, 1.0)
    metrics = {**sums.metrics.compute(), "actor/loss": float(loss.detach())}
    if metrics["actor/kept_fraction"] == 0:
        warnings.warn("rollout correction rejected every element of this batch: loss and gradients are 0", stacklevel=2)
    if sums.correction is not None:
        metrics |= {f"actor/{name}": value for name, value in sums.correction.metrics.items()}
    return loss, metrics


def diffusion_loss_sums(config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping) -> LossSums:
    """The loss of ``diffusion_loss`` before its division: see ``LossSums``. At least float32, whatever the input."""
    log_prob = _get(model_output, "log_probs", "model_output")
    log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    rc = config.rollout_correction
    old_log_prob = _old_log_prob(data, log_prob, bypass=rc.bypass_mode)
    options = config.diffusion_loss
    advantages = _advantages(data, log_prob, options.adv_clip_max)

    correction = None
    if rc.bypass_mode:
        correction = _bypass_correction(rc, log_prob, data, old_log_prob)
        keep = correction.mask.bool()
        weights = correction.weights if rc.loss_type == "reinforce" else None
    else:
        weights, keep = _decoupled_correction(data, log_prob)

    low, high = _clip_band(options)
    terms, masked = _objective(config, model_output, data, log_prob, old_log_prob, advantages, weights, keep)
    denominator = _denominator(rc, keep, log_prob)
    policy_sum = terms.loss.sum()
    kl_sum = _kl_sum(model_output, keep, log_prob) if config.use_kl_loss else policy_sum.new_zeros(())
    metrics = LossMetrics.of(
        loss_sum=policy_sum,
        denominator=denominator,
        keep=keep,
        log_ratio=select(log_prob.detach() - old_log_prob, keep),
        objective_log_ratio=terms.log_ratio,
        masked=masked,
        advantages=advantages,
        clip_low=low,
        clip_high=high,
        kl_sum=kl_sum,
    )
    total = policy_sum + config.kl_loss_coef * kl_sum if config.use_kl_loss else policy_sum
    return LossSums(total, denominator, metrics, correction)


def _objective(
    config: ActorLossConfig,
    model_output: TensorMapping,
    data: TensorMapping,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    keep: Tensor | None,
) -> tuple[PolicyTerms, Tensor | None]:
    """The configured objective's terms, and for objectives that do not clip the elements that they leave out."""
    options, rc = config.diffusion_loss, config.rollout_correction
    low, high = _clip_band(options)
    if rc.bypass_mode and rc.loss_type == "reinforce":
        terms = reinforce(log_prob, old_log_prob, advantages, weights=weights, keep=keep)
        return terms, torch.zeros_like(terms.loss, dtype=torch.bool)
    if options.loss_mode not in ("grpo_guard", "flow_dppo"):
        terms = ppo_clip(log_prob, old_log_prob, advantages, clip_low=low, clip_high=high, weights=weights, keep=keep)
        return terms, None
    shift, std = _mean_shift(model_output, data, log_prob, bypass=rc.bypass_mode)
    if options.loss_mode == "flow_dppo":
        threshold, kl = options.kl_mask_threshold, shift / (2 * std**2)
        return flow_dppo(log_prob, old_log_prob, advantages, kl=kl, kl_threshold=threshold, weights=weights, keep=keep)
    dt = _get(data, "sigmas", "data (loss_mode=grpo_guard)") - _get(data, "next_sigmas", "data (loss_mode=grpo_guard)")
    terms = grpo_guard(
        log_prob,
        old_log_prob,
        advantages,
        mean_shift=shift,
        step_std=std,
        dt=dt,
        clip_low=low,
        clip_high=high,
        weights=weights,
        keep=keep,
    )
    return terms, None


def _clip_band(options: LossOptions) -> tuple[float, float]:
    """Half widths below and above a ratio of 1."""
    low = options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low
    return low, options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high


def _bypass_correction(
    rc: RolloutCorrectionConfig, log_prob: Tensor, data: TensorMapping, old_log_prob: Tensor
) -> RolloutCorrection:
    return compute_rollout_correction(
        log_prob.detach(), old_log_prob, config=rc, timesteps=_optional(data, "timesteps")
    )


def _decoupled_correction(
    data: TensorMapping, log_prob: Tensor
) -> tuple[Float[Tensor, "..."] | None, Bool[Tensor, "..."] | None]:
    weights, keep = _optional(data, "rollout_is_weights"), _optional(data, "rollout_keep")
    for name, value in (("rollout_is_weights", weights), ("rollout_keep", keep)):
        if value is not None and value.shape != log_prob.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(log_prob.shape)}; they must agree"
            )
    if keep is None and weights is not None:
        keep = weights != 0
    return weights, None if keep is None else keep.bool()


def _denominator(rc: RolloutCorrectionConfig, keep: Tensor | None, log_prob: Tensor) -> Float[Tensor, ""]:
    """``all``: every element (a rejection shrinks the gradient); ``kept``: the elements that remain."""
    if keep is not None and rc.rejection_normalization == "kept":
        return keep.sum().to(log_prob.dtype)
    return torch.full((), log_prob.numel(), dtype=log_prob.dtype, device=log_prob.device)


def _mean_shift(
    model_output: TensorMapping, data: TensorMapping, log_prob: Tensor, *, bypass: bool
) -> tuple[Tensor, Tensor]:
    """``mean over dims of (mu - mu_old)^2`` and the step's std, both in the shape of the log-probs."""
    mean = _get(model_output, "transition_means", "model_output (this loss_mode)")
    std = _get(model_output, "transition_stds", "model_output (this loss_mode)")
    old_mean = _get(data, "rollout_means" if bypass else "old_transition_means", "data (this loss_mode)")
    for name, value, shape in (
        ("transition_stds", std, log_prob.shape),
        ("transition_means", mean[(..., *[0] * (mean.dim() - log_prob.dim()))], log_prob.shape),
        ("the old transition means", old_mean, mean.shape),
    ):
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(shape)}")
    return ((mean - old_mean.detach()) ** 2).flatten(log_prob.dim()).mean(-1), std


def _kl_sum(model_output: TensorMapping, keep: Tensor | None, log_prob: Tensor) -> Float[Tensor, ""]:
    names = ("transition_means", "ref_transition_means", "transition_stds")
    mean, ref_mean, std = values = [_get(model_output, name, "model_output (use_kl_loss=true)") for name in names]
    of_means = log_prob.shape + mean.shape[log_prob.dim() :]
    for name, value, shape in zip(names, values, (of_means, of_means, log_prob.shape), strict=True):
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; beside the log-probs it must be {tuple(shape)}")
    if log_prob.dim() == 1:
        mean, ref_mean, std = mean.unsqueeze(1), ref_mean.unsqueeze(1), std.unsqueeze(1)
    kl = gaussian_kl(mean, ref_mean, std).reshape(log_prob.shape)
    return (kl if keep is None else torch.where(keep, kl, 0.0)).sum()


def _old_log_prob(data: TensorMapping, log_prob: Tensor, *, bypass: bool) -> Tensor:
    names = ("rollout_log_probs", "old_log_probs") if bypass else ("old_log_probs",)
    name = next((n for n in names if _optional(data, n) is not None), None)
    if name is None:
        raise ValueError(f"data lacks {' or '.join(names)}; it holds: {', '.join(sorted(map(str, data.keys())))}")
    if data[name].shape != log_prob.shape:
        raise ValueError(
            f"{name} has shape {tuple(data[name].shape)} but log_probs has {tuple(log_prob.shape)}; they must agree"
        )
    return data[name]


def _advantages(data: TensorMapping, log_prob: Tensor, clip: float) -> Tensor:
    """Clamped to ``+-clip`` and broadcast from one an image to one a step."""
    advantages = _get(data, "advantages", "data")
    if advantages.shape != log_prob.shape:
        if advantages.shape != log_prob.shape[:1]:
            raise ValueError(
                f"advantages has shape {tuple(advantages.shape)}; expected ({log_prob.shape[0]},) or "
                f"{tuple(log_prob.shape)}"
            )
        advantages = advantages.reshape(-1, *([1] * (log_prob.dim() - 1))).expand_as(log_prob)
    return torch.clamp(advantages.detach(), -clip, clip)


def _optional(mapping: TensorMapping, name: str) -> Tensor | None:
    return mapping[name] if name in mapping.keys() else None  # noqa: SIM118  (a TensorDict refuses plain ``in``)


def _get(mapping: TensorMapping, name: str, where: str) -> Tensor:
    value = _optional(mapping, name)
    if value is None:
        raise ValueError(f"{where} lacks {name!r}; it holds: {', '.join(sorted(map(str, mapping.keys())))}")
    return value
