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
from flowgrpo_rc.loss.policy import PolicyTerms, gaussian_kl, ppo_clip, reinforce


@runtime_checkable
class TensorMapping(Protocol):
    """A dict of tensors, a ``TensorDict``, or anything else with keys."""

    def keys(self) -> Any: ...
    def __getitem__(self, name: str, /) -> Any: ...


@runtime_checkable
class LossOptions(Protocol):
    """What ``diffusion_loss`` reads of ``DiffusionLossConfig``."""

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
        model_output: ``log_probs`` ``(B,)`` (one SDE step) or ``(B, W)`` (the window), with gradient. With
            ``use_kl_loss`` also ``transition_means`` and ``ref_transition_means`` (log-prob shape + latents)
            and ``transition_stds`` (log-prob shape).
        data: ``old_log_probs`` (bypass mode: ``rollout_log_probs``, or what was put into ``old_log_probs`` for it),
            ``advantages`` ``(B,)`` or the shape of the log-probs; decoupled correction adds
            ``rollout_is_weights`` and ``rollout_keep``; ``timesteps`` gives the per-timestep gap metrics.
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
    """The loss of ``diffusion_loss`` before its division: see ``LossSums``."""
    log_prob = _get(model_output, "log_probs", "model_output")
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

    low = options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low
    high = options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high
    if rc.bypass_mode and rc.loss_type == "reinforce":
        terms: PolicyTerms = reinforce(log_prob, old_log_prob, advantages, weights=weights, keep=keep)
    else:
        terms = ppo_clip(log_prob, old_log_prob, advantages, clip_low=low, clip_high=high, weights=weights, keep=keep)

    denominator = _denominator(rc, keep, log_prob)
    policy_sum = terms.loss.sum()
    kl_sum = _kl_sum(model_output, keep, log_prob) if config.use_kl_loss else policy_sum.new_zeros(())
    metrics = LossMetrics.of(
        loss_sum=policy_sum,
        denominator=denominator,
        keep=keep,
        log_ratio=terms.log_ratio,
        advantages=advantages,
        clip_low=low,
        clip_high=high,
        kl_sum=kl_sum,
    )
    total = policy_sum + config.kl_loss_coef * kl_sum if config.use_kl_loss else policy_sum
    return LossSums(total, denominator, metrics, correction)


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


def _kl_sum(model_output: TensorMapping, keep: Tensor | None, log_prob: Tensor) -> Float[Tensor, ""]:
    names = ("transition_means", "ref_transition_means", "transition_stds")
    mean, ref_mean, std = (_get(model_output, name, "model_output (use_kl_loss=true)") for name in names)
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
