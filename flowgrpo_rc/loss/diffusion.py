"""The actor's loss on SDE steps and on noised clean images.

The table in ``inputs`` lists each mode's policies, weights and rejection. The mean runs over all steps (places), so a
rejected one counts as 0 and shrinks the gradient; with ``rejection_normalization=kept`` it runs over the kept ones.
Advantages are clamped to ``adv_clip_max``. The KL to the reference is in closed form, from transition means, or the
mean squared difference of velocities. ``token_loss`` is the loss on tokens.
"""

import warnings
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.batch import BatchHolder, Key, TensorMapping, as_mapping, optional
from flowgrpo_rc.loss.aggregation import ALL_STEPS, KEPT_STEPS
from flowgrpo_rc.loss.clean_images import matching_log_prob
from flowgrpo_rc.loss.inputs import ActorLossConfig, LossInputs, check_shape, read_inputs, require
from flowgrpo_rc.loss.objectives import OBJECTIVES, LossOptions, Objective
from flowgrpo_rc.loss.policy import Matching, PolicyInputs, TransitionShift, kept
from flowgrpo_rc.loss.sums import VELOCITY_NORMS, LossSums, loss_sums, mean_loss
from flowgrpo_rc.loss.tokens import read_tokens
from flowgrpo_rc.messages import level_of_caller
from flowgrpo_rc.sde import transition_kl


def diffusion_loss(
    config: ActorLossConfig,
    model_output: TensorMapping,
    data: TensorMapping | BatchHolder,
    dp_group: object | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Mean loss of one batch and its metrics.

    Log-probs and KL are in nats per latent dimension, means and standard deviations in the unit of the latents;
    advantages, weights and the loss have no unit.

    Source: Flow-GRPO, arXiv 2505.05470; the function of each ``loss_mode`` cites its own.

    Args:
        config: a ``DiffusionActorConfig``.
        model_output: ``log_probs`` ``(B,)`` (one SDE step) or ``(B, W)`` (the window), with gradient. For
            ``use_kl_loss``, ``grpo_guard`` and ``flow_dppo`` also ``transition_means`` (log-prob shape + latents) and
            ``transition_stds`` (log-prob shape); ``use_kl_loss`` also ``ref_transition_means``. With
            ``kl_loss_type=velocity`` the KL reads ``velocities`` and ``ref_velocities`` (log-prob shape + latents) in
            place of these three; given without it, their norms are measured. Objectives on clean images (``awm``,
            ``diffusion_nft``, ``dpo``) read ``velocities`` ``(B, K, *L)``, at ``K`` places of each image, in place of
            log-probs, and ``dpo`` and a KL also ``ref_velocities``.
        data: ``old_log_probs`` (bypass mode: ``rollout_log_probs``, or what was put into ``old_log_probs`` for it),
            ``advantages`` ``(B,)`` or the shape of the log-probs; decoupled correction adds
            ``rollout_is_weights`` and ``rollout_keep``; ``timesteps`` gives the per-timestep gap metrics.
            ``grpo_guard`` and ``flow_dppo`` read ``old_transition_means`` (bypass mode: ``rollout_means``);
            ``grpo_guard`` also reads ``sigmas`` and ``next_sigmas``. ``clip_ratio=auto`` reads ``clip_widths``, the
            half width of the clip band of every element; ``rollout_rs_threshold=auto`` in bypass mode reads
            ``rollout_rs_bounds`` ``(B,)``. Objectives on clean images read ``clean_latents`` ``(B, *L)``, ``noise``
            ``(B, K, *L)`` and ``sigmas`` ``(B, K)``; ``awm`` and ``diffusion_nft`` also ``old_velocities`` of the
            shape of ``noise`` (``awm`` takes ``old_log_probs`` too). For ``dpo`` images come in pairs of one prompt
            with the same noise, and the one with the larger advantage is the winner. A batch with a ``response_mask``
            holds tokens and goes to ``token_loss``.
            A dict, a ``TensorDict``, or an object with such a mapping in ``.batch``; not modified.
        dp_group: None: this rank alone. A data-parallel process group: all of its ranks must call. The denominator is
            then the global one divided by the number of ranks, so that averaging gradients over ranks (DDP) gives
            exactly the global mean; the metrics cover all ranks.

    Returns:
        ``(loss, metrics)``. If everything is rejected the loss is exactly 0, with zero gradients, a warning and
        ``actor/kept_fraction = 0``.

    Raises:
        ValueError: a missing key or a shape that does not fit, by name; a NaN or infinite loss or log ratio, naming the
            inputs that are not finite or no clip widths.

    Warns:
        UserWarning: everything is rejected; decoupled mode is to correct, and ``data`` has no weights; or ``data``
            holds tokens.
    """
    return mean_loss(_read_steps(config, model_output, data), dp_group, model_output, data)


def diffusion_loss_sums(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping | BatchHolder, *, corrected: bool = False
) -> LossSums:
    """The loss of ``diffusion_loss`` before its division: see ``LossSums``. Always at least float32.

    It does not check that the sums are finite; the caller must. Its only host sync is in bypass mode, to measure the
    off-policy gap, and ``corrected`` avoids that too.

    Args:
        corrected: ``data`` has ``rollout_is_weights`` and ``rollout_keep`` in bypass mode too, so that no correction is
            computed or returned. The log-probs may then be single steps of coupled windows.
    """
    return loss_sums(_read_steps(config, model_output, data, corrected=corrected))


def _read_steps(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping | BatchHolder, *, corrected: bool = False
) -> LossInputs:
    """Read and check the inputs of the loss of SDE steps, or of tokens for a batch with a ``response_mask``."""
    data = as_mapping(data)
    if optional(data, Key.RESPONSE_MASK) is not None:
        warnings.warn(
            "data has a response_mask, so diffusion_loss hands it to flowgrpo_rc.token_loss; call that for tokens",
            stacklevel=level_of_caller(),
        )
        return read_tokens(config, model_output, data)
    rc = config.rollout_correction
    options = config.diffusion_loss
    objective = OBJECTIVES[options.loss_mode]
    # ``all`` is verl-omni's behaviour and the default: a rejection then also shrinks the step.
    aggregation = KEPT_STEPS if rc.rejection_normalization == "kept" else ALL_STEPS
    matching = None
    if objective.clean:
        matching = _read_matching(options, objective, model_output, data)
        model_output, data = _with_log_probs(options, matching, model_output, data)
    shared = read_inputs(config, model_output, data, aggregation, corrected=corrected)
    policy = shared.policy
    # A pair only reads which advantage is larger; two that are clamped would be a tie.
    if not objective.paired:
        # Rewards have outliers; no single image may dominate an optimizer step.
        policy = policy._replace(advantages=policy.advantages.clamp(-options.adv_clip_max, options.adv_clip_max))
    if matching is not None:
        policy = _with_matching(options, objective, policy, matching)
    if objective.needs_old_means and not objective.clean:
        # In bypass mode the engine is the old policy, so the means must be its own.
        name = Key.ROLLOUT_MEANS if rc.bypass_mode else Key.OLD_TRANSITION_MEANS
        old_mean = require(data, name, "data (this loss_mode)")
        kl, std = _kl_and_std(model_output, "the old transition means", old_mean, policy, "this loss_mode")
        dt = None
        if objective.needs_sigmas:
            where = f"data (loss_mode={objective.name})"
            sigma = require(data, Key.SIGMAS, where)
            following = require(data, Key.NEXT_SIGMAS, where)
            check_shape(Key.SIGMAS, sigma, policy.log_prob.shape)
            check_shape(Key.NEXT_SIGMAS, following, policy.log_prob.shape)
            # Noise levels fall, so this difference is positive.
            dt = kept(sigma - following, policy.keep, 1.0)
        policy = policy._replace(shift=TransitionShift(kl, std, dt))
    reference_kl = None
    if (objective.clean and options.ref_kl_coef) or (config.use_kl_loss and config.kl_loss_type == "velocity"):
        reference_kl = _velocity_kl(model_output, policy)
    elif config.use_kl_loss:
        reference = require(model_output, "ref_transition_means", "model_output (use_kl_loss=true)")
        reference_kl, _ = _kl_and_std(model_output, "ref_transition_means", reference, policy, "use_kl_loss=true")
    squares = {
        norm: _mean_square(kept(_velocity(value.detach(), name, policy), policy.keep), policy)
        for norm, name in VELOCITY_NORMS.items()
        if (value := optional(model_output, name)) is not None
    }
    return replace(shared, policy=policy, reference_kl=reference_kl, velocity_squares=squares)


def _read_matching(
    options: LossOptions, objective: Objective, model_output: TensorMapping, data: TensorMapping
) -> Matching:
    """Read and check the velocities at noised clean images and what they are to match."""
    where = f"data (loss_mode={objective.name})"
    sigma = require(data, Key.SIGMAS, where)
    noise = require(data, Key.NOISE, where)
    clean = require(data, Key.CLEAN_LATENTS, where)
    elements = tuple(sigma.shape)
    latents = tuple(noise.shape[len(elements) :])
    check_shape(Key.NOISE, noise, elements + latents)
    check_shape(Key.CLEAN_LATENTS, clean, elements[:1] + latents)
    # One clean image serves all of its places.
    clean = clean.reshape(elements[:1] + (1,) * (sigma.dim() - 1) + latents)

    def velocity(mapping: TensorMapping, name: str, described: str, needed: bool) -> Tensor | None:
        value = require(mapping, name, described) if needed else optional(mapping, name)
        if value is None:
            return None
        check_shape(name, value, elements + latents)
        return _at_least_float32(value)

    described = f"model_output (loss_mode={objective.name})"
    current = velocity(model_output, "velocities", described, True)
    assert current is not None
    if objective.paired and len(sigma) % 2:
        raise ValueError(
            f"{Key.SIGMAS} has shape {elements}, but loss_mode={objective.name} compares images in pairs, one after "
            "the other; give an even number"
        )
    # Without any log-probs, a ratio needs the old policy's velocities.
    needs_old = objective.needs_old_means
    if objective.has_limit and all(optional(data, name) is None for name in (Key.OLD_LOG_PROBS, Key.ROLLOUT_LOG_PROBS)):
        needs_old = True
        where = f"data (loss_mode={objective.name} without {Key.OLD_LOG_PROBS})"
    return Matching(
        current,
        # A difference in half precision would be rounded once more.
        (noise.to(current.dtype) - clean.to(current.dtype)).detach(),
        sigma.to(current.dtype).detach(),
        velocity(data, Key.OLD_VELOCITIES, where, needs_old),
        velocity(model_output, "ref_velocities", described, objective.needs_reference),
    )


def _with_matching(
    options: LossOptions, objective: Objective, policy: PolicyInputs, matching: Matching
) -> PolicyInputs:
    """The objective's inputs with the velocities of kept elements alone, and with the log-probs that these give. A pair
    with a rejected element is rejected."""
    keep = policy.keep
    if objective.paired and keep is not None:
        keep = (keep[0::2] & keep[1::2]).repeat_interleave(2, dim=0)
    # Selected before the log-prob's arithmetic: a NaN of a rejected velocity would reach its gradient.
    old, reference = (v if v is None else kept(v, keep) for v in (matching.old_velocity, matching.ref_velocity))
    velocity, target, sigma = (kept(v, keep) for v in (matching.velocity, matching.target, matching.sigma))
    matching = Matching(velocity, target, sigma, old, reference)
    log_prob = matching_log_prob(velocity, target, sigma, options.awm_weighting)
    return policy._replace(log_prob=log_prob, keep=keep, matching=matching)


def _with_log_probs(
    options: LossOptions, matching: Matching, model_output: TensorMapping, data: TensorMapping
) -> tuple[TensorMapping, TensorMapping]:
    """Add the log-probs of both policies at the noised images, as constants. The old policy's come from
    ``old_log_probs`` or ``old_velocities``; an objective that needs neither gets the current policy's."""

    def log_prob(velocity: Tensor) -> Tensor:
        return matching_log_prob(velocity.detach(), matching.target, matching.sigma, options.awm_weighting)

    current = log_prob(matching.velocity)
    old = optional(data, Key.OLD_LOG_PROBS)
    if old is None and matching.old_velocity is not None:
        old = log_prob(matching.old_velocity)
    if old is None and not OBJECTIVES[options.loss_mode].has_limit:
        old = current
    # ``keys``, because a TensorDict iterates over its rows.
    given = {name: data[name] for name in data.keys()}  # noqa: SIM118
    if old is not None:
        given[Key.OLD_LOG_PROBS] = old
    output = {name: model_output[name] for name in model_output.keys()}  # noqa: SIM118
    return output | {"log_probs": current}, given


def _velocity_kl(model_output: TensorMapping, policy: PolicyInputs) -> Tensor:
    """``mean((v - v_ref)^2)`` over the latent dimensions of each step; 0 if rejected.

    Source: Flow-GRPO's author, for training without guidance (github.com/yifan123/flow_grpo, issue 198); UniGRPO,
    arXiv 2603.23500.
    """
    where = "model_output (kl_loss_type=velocity)"
    velocity, reference = (
        _velocity(require(model_output, name, where), name, policy) for name in VELOCITY_NORMS.values()
    )
    check_shape("ref_velocities", reference, velocity.shape)
    # Selected before the arithmetic, as in ``_kl_and_std``.
    return _mean_square(kept(velocity, policy.keep) - kept(reference.detach(), policy.keep), policy)


def _velocity(value: Tensor, name: str, policy: PolicyInputs) -> Tensor:
    """The velocities of each step, checked, and at least float32."""
    steps = policy.log_prob.shape
    check_shape(name, value, steps + value.shape[len(steps) :])
    return _at_least_float32(value)


def _at_least_float32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _mean_square(values: Tensor, policy: PolicyInputs) -> Tensor:
    """Mean square of each step's latent dimensions."""
    return values.square().flatten(policy.log_prob.dim()).mean(-1)


def _kl_and_std(
    model_output: TensorMapping, name: str, other_mean: Tensor, policy: PolicyInputs, why: str
) -> tuple[Tensor, Tensor]:
    """KL of each step to the transition with ``other_mean``, and the step's standard deviation; 0 and 1 if rejected."""
    steps = policy.log_prob.shape
    mean = require(model_output, "transition_means", f"model_output ({why})")
    std = require(model_output, "transition_stds", f"model_output ({why})")
    check_shape("transition_stds", std, steps)
    # The latents' own shape is free, but both means must have it.
    check_shape("transition_means", mean, steps + mean.shape[len(steps) :])
    check_shape(name, other_mean, mean.shape)
    mean, std, other_mean = (_at_least_float32(value) for value in (mean, std, other_mean))
    # Select before the arithmetic: a NaN of a rejected step would pass through a later mask into the gradient.
    std = kept(std, policy.keep, 1.0)  # 1, since the KL divides by it
    return transition_kl(kept(mean, policy.keep), kept(other_mean.detach(), policy.keep), std), std
