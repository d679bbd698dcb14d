"""From configuration, model output and batch to ``LossInputs``: all that a loss is a function of.

Here everything is read and checked once; what follows (``core``) is arithmetic on tensors. ``diffusion_loss`` and
``token_loss`` read what only they know, and share the rest. Every error names the key and both shapes.

====================== ==================== ======================================== =========================
mode                   ``old_log_prob``     weights in the loss                      rejection in the loss
====================== ==================== ======================================== =========================
decoupled              scored by the actor  ``pi_old/pi_rollout``, from the batch    from the same ratio, fixed
bypass + ``ppo_clip``  the rollout's        none (they would count twice)            ``pi_theta/pi_rollout``
bypass + ``reinforce`` the rollout's        ``pi_theta/pi_rollout``, detached        the same ratio
====================== ==================== ======================================== =========================

In bypass mode weights and rejection are computed here, afresh for every call; in decoupled mode they come with
the batch (on the diffusion path from ``apply_rollout_correction_to_diffusion_batch``).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction import RolloutCorrection, RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.correction.mapping import TensorMapping, optional
from flowgrpo_rc.loss.aggregation import Aggregation
from flowgrpo_rc.loss.objectives import CLIP_BAND, OBJECTIVES, LimitOptions, Threshold
from flowgrpo_rc.loss.policy import PolicyInputs, PolicyLimits, PolicyTerms, reinforce_objective


@runtime_checkable
class LossOptions(LimitOptions, Protocol):
    """What a loss reads of ``DiffusionLossConfig``."""

    loss_mode: str
    clip_ratio_c: float | None
    adv_clip_max: float
    loss_agg_mode: str
    loss_scale_factor: float | None


@runtime_checkable
class ActorLossConfig(Protocol):
    """What a loss reads of ``DiffusionActorConfig``."""

    @property
    def diffusion_loss(self) -> LossOptions: ...
    @property
    def rollout_correction(self) -> RolloutCorrectionConfig: ...
    @property
    def use_kl_loss(self) -> bool: ...
    @property
    def kl_loss_coef(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the loss of one micro-batch is a function of."""

    policy: PolicyInputs
    """What the objective reads of each element."""
    objective: Callable[[PolicyInputs, PolicyLimits], PolicyTerms]
    """The objective's function."""
    limits: PolicyLimits
    """How far an update may go."""
    aggregation: Aggregation
    """From losses of elements to a sum and its denominator."""
    scale_factor: float | None = None
    """For aggregations that divide by a fixed length."""
    valid: Bool[Tensor, "B T"] | None = None
    """The elements that metrics count: valid tokens; ``None``: all."""
    reference_kl: Float[Tensor, "..."] | None = None
    """KL to the reference policy of each element, 0 where not kept; ``None``: it is not in the loss."""
    kl_coefficient: float = 0.0
    """Weight of that KL in the loss."""
    correction: RolloutCorrection | None = None
    """What bypass mode has found out about the off-policy gap."""


def correct(
    rc: RolloutCorrectionConfig,
    data: TensorMapping,
    log_prob: Tensor,
    old_log_prob: Tensor,
    *,
    valid: Bool[Tensor, "B T"] | None = None,
    timesteps: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, RolloutCorrection | None]:
    """Weights in the loss, what rejection keeps, and in bypass mode the correction that both come from.

    ``None`` for the weights means that there are none, and for ``keep`` that everything is kept. Tokens that are not
    ``valid`` are never kept.
    """
    if not rc.bypass_mode:
        weights = like_log_probs(data, "rollout_is_weights", log_prob)
        keep = like_log_probs(data, "rollout_keep", log_prob)
        if valid is not None:
            return weights, valid if keep is None else valid & keep.bool(), None
        if keep is None and weights is not None:
            keep = weights != 0  # a diffusion batch may carry its mask in the weights alone
        return weights, None if keep is None else keep.bool(), None
    if valid is not None and not valid.any():
        return None, valid, None  # nothing to correct
    bounds = optional(data, "rollout_rs_bounds")
    correction = compute_rollout_correction(
        log_prob.detach(), old_log_prob, valid, config=rc, timesteps=timesteps, rs_bounds=bounds
    )
    weights = correction.weights if rc.loss_type == "reinforce" else None
    return weights, correction.mask.bool(), correction


def objective_function(config: ActorLossConfig) -> Callable[[PolicyInputs, PolicyLimits], PolicyTerms]:
    """The function in force: ``reinforce`` where bypass mode asks for it, else that of ``loss_mode``."""
    rc = config.rollout_correction
    if rc.bypass_mode and rc.loss_type == "reinforce":
        return reinforce_objective
    return OBJECTIVES[config.diffusion_loss.loss_mode].load()


def policy_limits(
    options: LossOptions, data: TensorMapping, log_prob: Tensor, dual_clip: float | None = None
) -> PolicyLimits:
    """The clip band, and the objective's threshold if it has one."""
    low, high = CLIP_BAND.sides(options, clip_widths(data, log_prob))
    limits = PolicyLimits(low, high, dual_clip)
    limit = OBJECTIVES[options.loss_mode].limit
    return limits._replace(threshold=limit.value(options)) if isinstance(limit, Threshold) else limits


def warn_if_uncorrected(rc: RolloutCorrectionConfig, data: TensorMapping, *, may_reject: bool) -> None:
    """Decoupled mode is corrected before the loss, once for the whole batch; say so where that was left out.

    Args:
        may_reject: whether a rejection can be missing; of tokens the mask may hold it, so that only weights can.
    """
    names = set(data.keys())
    asked = not rc.bypass_mode and ((may_reject and rc.plan().can_reject) or rc.rollout_is is not None)
    if asked and "rollout_log_probs" in names and names.isdisjoint(("rollout_is_weights", "rollout_keep")):
        warnings.warn(
            "rollout_correction asks for weights or rejection with bypass_mode=false, but data holds neither "
            "rollout_is_weights nor rollout_keep: this loss is not corrected. Call "
            "apply_rollout_correction_to_diffusion_batch(batch, config.rollout_correction) on the whole batch first, "
            "or set rollout_correction=None",
            stacklevel=3,
        )


def require(mapping: TensorMapping, name: str, where: str) -> Tensor:
    """The tensor of that name.

    Raises:
        ValueError: ``where`` lacks it.
    """
    value = optional(mapping, name)
    if value is None:
        raise ValueError(f"{where} lacks {name!r}; it holds: {', '.join(sorted(map(str, mapping.keys())))}")
    return value


def present_log_probs(model_output: TensorMapping) -> Tensor:
    """``log_probs`` of ``pi_theta`` with gradient, in float32 or wider."""
    log_prob = require(model_output, "log_probs", "model_output")
    return log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))


def like_log_probs(data: TensorMapping, name: str, log_prob: Tensor) -> Tensor | None:
    """An optional tensor that must have the shape of the log-probs."""
    value = optional(data, name)
    if value is not None and value.shape != log_prob.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(log_prob.shape)}; they must agree"
        )
    return value


def clip_widths(data: TensorMapping, log_prob: Tensor) -> Tensor | None:
    """``clip_widths``, with NaN for what is none, so that the loss is not finite either: no wait for the device."""
    widths = like_log_probs(data, "clip_widths", log_prob)
    return None if widths is None else torch.where(_is_width(widths), widths, torch.nan)


def _is_width(values: Tensor) -> Tensor:
    return (values > 0) & torch.isfinite(values)


def old_log_probs(data: TensorMapping, log_prob: Tensor, *, bypass: bool) -> Tensor:
    """``old_log_probs``; in bypass mode the rollout's, under either name."""
    names = ("rollout_log_probs", "old_log_probs") if bypass else ("old_log_probs",)
    for name in names:
        value = like_log_probs(data, name, log_prob)
        if value is not None:
            return value
    raise ValueError(f"data lacks {' or '.join(names)}; it holds: {', '.join(sorted(map(str, data.keys())))}")


def advantages_like(data: TensorMapping, log_prob: Tensor) -> Tensor:
    """The advantages as constants, broadcast from one an image (a sequence) to one a step (a token)."""
    advantages = require(data, "advantages", "data")
    if advantages.shape != log_prob.shape:
        if advantages.shape != log_prob.shape[:1]:
            raise ValueError(
                f"advantages has shape {tuple(advantages.shape)}; expected ({log_prob.shape[0]},) or "
                f"{tuple(log_prob.shape)}"
            )
        advantages = advantages.reshape(-1, *([1] * (log_prob.dim() - 1))).expand_as(log_prob)
    return advantages.detach()


def check_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` has the shape that follows from the log-probs."""
    if value.shape != expected:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(expected)}")


def not_finite(**mappings: TensorMapping) -> str:
    """What to say where a result is NaN or infinite: which tensors hold such values, and how many of them."""
    found = []
    for where, tensors in mappings.items():
        for name in tensors.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
            value = tensors[name]
            if not isinstance(value, Tensor):
                continue
            is_width = name == "clip_widths"
            bad = int((~(_is_width(value) if is_width else torch.isfinite(value))).sum())
            if bad:
                kind = " (or not above 0)" if is_width else ""
                found.append(f"{bad} of {value.numel()} in {where}[{name!r}]{kind}")
    if found:
        return f"NaN or infinite, masked values included: {', '.join(found)}"
    return "all of this rank's inputs are finite: another rank's are not, or a std is 0, or a weight or mean is extreme"
