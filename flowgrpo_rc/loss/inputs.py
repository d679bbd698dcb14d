"""Read and check the inputs of a loss: from configuration, model output and batch to ``LossInputs``.

Everything is checked once, here; ``sums`` is arithmetic on tensors. ``diffusion_loss`` and ``token_loss`` share this
module and add their own inputs. Every error names the key and both shapes.

====================== ==================== ======================================== =========================
mode                   ``old_log_prob``     weights in the loss                      rejection in the loss
====================== ==================== ======================================== =========================
decoupled              scored by the actor  ``pi_old/pi_rollout``, from the batch    from the same ratio, fixed
bypass + ``ppo_clip``  the rollout's        none (they would count twice)            ``pi_theta/pi_rollout``
bypass + ``reinforce`` the rollout's        ``pi_theta/pi_rollout``, detached        the same ratio
====================== ==================== ======================================== =========================

In bypass mode weights and rejection are computed here at every call, unless the batch already has them
(``corrected``). In decoupled mode they come with the batch, from ``apply_rollout_correction_to_diffusion_batch``.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.batch import Key, TensorMapping, as_mapping, optional
from flowgrpo_rc.correction import RolloutCorrection, RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.loss.aggregation import Aggregation
from flowgrpo_rc.loss.objectives import CLIP_BAND, OBJECTIVES, LossOptions, Threshold
from flowgrpo_rc.loss.policy import PolicyInputs, PolicyLimits, PolicyTerms, reinforce
from flowgrpo_rc.messages import level_of_caller


@runtime_checkable
class ActorLossConfig(Protocol):
    """The fields of ``DiffusionActorConfig`` that a loss reads."""

    @property
    def diffusion_loss(self) -> LossOptions: ...
    @property
    def rollout_correction(self) -> RolloutCorrectionConfig: ...
    @property
    def use_kl_loss(self) -> bool: ...
    @property
    def kl_loss_coef(self) -> float: ...
    @property
    def kl_loss_type(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """All inputs of the loss of one micro-batch."""

    config: ActorLossConfig
    policy: PolicyInputs
    """The objective's inputs, per element."""
    objective: Callable[[PolicyInputs, PolicyLimits], PolicyTerms]
    """The objective's function."""
    limits: PolicyLimits
    """Limits of the update."""
    aggregation: Aggregation
    """Reduction of the elements' losses to a sum and its denominator."""
    valid: Bool[Tensor, "B T"] | None
    """Elements that metrics count: valid tokens; ``None``: all."""
    reference_kl: Float[Tensor, "..."] | None = None
    """KL to the reference policy per element, 0 if rejected; ``None``: not in the loss."""
    velocity_squares: Mapping[str, Float[Tensor, "..."]] = field(default_factory=dict)
    """Mean square of each element's velocity, and of the reference's, by the name of its norm; 0 if rejected."""
    kl_coef: float
    """Weight of ``reference_kl``."""
    correction: RolloutCorrection | None
    """Bypass mode's correction with its metrics; ``None`` without a valid token."""

    @property
    def needs_advantage(self) -> bool:
        """True if an element with an advantage of 0 has no gradient."""
        return OBJECTIVES[self.config.diffusion_loss.loss_mode].scales_with_advantage and self.reference_kl is None


def read_inputs(
    config: ActorLossConfig,
    model_output: TensorMapping,
    data: TensorMapping,
    aggregation: Aggregation,
    *,
    valid: Bool[Tensor, "B T"] | None = None,
    corrected: bool = False,
) -> LossInputs:
    """Read the inputs that the losses of SDE steps and of tokens share; each adds its own.

    Args:
        valid: the ``response_mask`` of tokens; masked tokens are never kept. ``None``: SDE steps.
        corrected: ``data`` has weights and rejection in bypass mode too.
    """
    rc = config.rollout_correction
    options = config.diffusion_loss
    _warn_if_uncorrected(rc, data, may_reject=valid is None)
    log_prob = require(model_output, "log_probs", "model_output")
    # Ratios move by 1e-5 to 1e-2, which half precision cannot hold.
    log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    old_log_prob = _old_log_probs(data, log_prob, bypass=rc.bypass_mode)
    advantages = _advantages(data, log_prob)
    reinforces = rc.bypass_mode and rc.loss_type == "reinforce"
    correction = None
    weights = None
    # Decoupled mode has its correction in the batch; so has a micro-batch that the actor corrected before.
    keep = valid
    if not rc.bypass_mode or corrected:
        weights, keep = _given_correction(data, log_prob, valid)
    elif valid is None or valid.any():
        correction = compute_rollout_correction(
            log_prob.detach(),
            old_log_prob,
            valid,
            config=rc,
            # The gap differs between timesteps; tokens have none.
            timesteps=optional(data, Key.TIMESTEPS) if valid is None else None,
            rs_bounds=optional(data, Key.ROLLOUT_RS_BOUNDS),
        )
        weights = correction.weights
        keep = correction.mask.bool()
    if rc.bypass_mode and not reinforces:
        weights = None  # PPO's ratio is already over the rollout policy; weights would count it twice
    # Read for every objective: the share outside the clip band is a metric of all.
    widths = like_log_probs(data, Key.CLIP_WIDTHS, log_prob)
    if widths is not None:
        # In half precision 1 - 1e-4 is 1.
        widths = widths.to(torch.promote_types(widths.dtype, torch.float32))
        # With NaN for invalid ones the loss is NaN and refused, without a host sync here.
        widths = torch.where(widths.isfinite() & (widths > 0), widths, torch.nan)
    low, high = CLIP_BAND.sides(options, widths)
    # The dual clip belongs to tokens; the diffusion objectives are defined without it.
    dual_clip = None if valid is None else options.clip_ratio_c
    objective = OBJECTIVES[options.loss_mode]
    threshold = objective.limit.value(options) if isinstance(objective.limit, Threshold) else math.inf
    own_options = {name: getattr(options, name) for name in objective.options}
    return LossInputs(
        config=config,
        policy=PolicyInputs(log_prob, old_log_prob, advantages, weights, keep),
        objective=_reinforce if reinforces else partial(objective.load(), **own_options),
        limits=PolicyLimits(low, high, dual_clip, threshold),
        aggregation=aggregation,
        valid=valid,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else options.ref_kl_coef,
        correction=correction,
    )


def _reinforce(p: PolicyInputs, _: PolicyLimits) -> PolicyTerms:
    return reinforce(p.log_prob, p.old_log_prob, p.advantages, weights=p.weights, keep=p.keep)


def _given_correction(
    data: TensorMapping, log_prob: Tensor, valid: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The batch's weights (``None``: 1) and keep-mask (``None``: everything)."""
    weights = like_log_probs(data, Key.ROLLOUT_IS_WEIGHTS, log_prob)
    keep = like_log_probs(data, Key.ROLLOUT_KEEP, log_prob)
    if keep is None and weights is not None and valid is None:
        keep = weights != 0  # a diffusion batch may carry its mask in the weights alone
    if keep is None:
        return weights, valid
    return weights, keep.bool() if valid is None else valid & keep.bool()


def _warn_if_uncorrected(rc: RolloutCorrectionConfig, data: TensorMapping, *, may_reject: bool) -> None:
    """Warn if decoupled mode is configured to correct but the batch has neither weights nor a keep-mask.

    Args:
        may_reject: a missing rejection counts too. For tokens it does not: their mask may already contain it.
    """
    names = set(data.keys())
    asked = not rc.bypass_mode and ((may_reject and rc.plan().can_reject) or rc.rollout_is is not None)
    if asked and Key.ROLLOUT_LOG_PROBS in names and names.isdisjoint((Key.ROLLOUT_IS_WEIGHTS, Key.ROLLOUT_KEEP)):
        warnings.warn(
            "rollout_correction asks for weights or rejection with bypass_mode=false, but data holds neither "
            "rollout_is_weights nor rollout_keep: this loss is not corrected. Call "
            "apply_rollout_correction_to_diffusion_batch(batch, config.rollout_correction) on the whole batch first, "
            "or set rollout_correction=None",
            stacklevel=level_of_caller(),
        )


def require(mapping: TensorMapping, name: str, where: str) -> Tensor:
    """The tensor ``name``; ``ValueError`` if the mapping, described by ``where``, lacks it."""
    value = optional(mapping, name)
    if value is None:
        raise ValueError(f"{where} lacks {name!r}; {_holds(mapping)}")
    return value


def _holds(mapping: TensorMapping) -> str:
    return f"it holds: {', '.join(sorted(map(str, mapping.keys())))}"


def like_log_probs(data: TensorMapping, name: str, log_prob: Tensor) -> Tensor | None:
    """An optional tensor that must have the shape of the log-probs."""
    value = optional(data, name)
    # Equal shapes are required because a (B, 1) tensor would broadcast without an error.
    if value is not None and value.shape != log_prob.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(log_prob.shape)}")
    return value


def check_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` has the shape that follows from the log-probs."""
    if value.shape != expected:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(expected)}")


def _old_log_probs(data: TensorMapping, log_prob: Tensor, *, bypass: bool) -> Tensor:
    """``old_log_probs``; in bypass mode ``rollout_log_probs``, under either name."""
    names = (Key.ROLLOUT_LOG_PROBS, Key.OLD_LOG_PROBS) if bypass else (Key.OLD_LOG_PROBS,)
    # Bypass reads the rollout's first: apply_bypass_mode_... makes both equal, and a stale old one must not win.
    for name in names:
        value = like_log_probs(data, name, log_prob)
        if value is not None:
            return value
    raise ValueError(f"data lacks {' or '.join(names)}; {_holds(data)}")


def _advantages(data: TensorMapping, log_prob: Tensor) -> Tensor:
    """The advantages as constants, broadcast from one per image or sequence to one per step or token."""
    advantages = require(data, Key.ADVANTAGES, "data")
    shape = log_prob.shape
    # Only these two: (1, W) or (B, 1) would broadcast, and usually is a mistake.
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}; expected ({shape[0]},) or {tuple(shape)}")
    return advantages.reshape(*advantages.shape, *[1] * (len(shape) - advantages.dim())).expand_as(log_prob).detach()


def not_finite(**holders: object) -> str:
    """Describe which tensors hold NaN or infinite values, and how many, for an error message."""
    found = []
    for where, holder in holders.items():
        tensors = as_mapping(holder)
        for name in tensors.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
            value = tensors[name]
            if not isinstance(value, Tensor):
                continue
            widths = name == Key.CLIP_WIDTHS
            usable = value.isfinite() & (value > 0) if widths else value.isfinite()
            if bad := int((~usable).sum()):
                kind = " (or not above 0)" if widths else ""
                found.append(f"{bad} of {value.numel()} in {where}[{name!r}]{kind}")
    if found:
        return f"NaN or infinite, masked values included: {', '.join(found)}"
    return "all of this rank's inputs are finite: another rank's are not, or a std is 0, or a weight or mean is extreme"
