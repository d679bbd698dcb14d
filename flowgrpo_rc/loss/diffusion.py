"""The actor's loss on SDE steps. ``inputs`` says which policies, weights and rejection each mode takes.

Its mean runs over all steps, of which a rejected one counts as 0 and so shrinks the gradient, or with
``rejection_normalization=kept`` over the kept ones. Advantages are clamped to ``adv_clip_max``, and the KL to the
reference is in closed form, from transition means. For tokens there is ``token_loss``.
"""

import warnings
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.correction.mapping import BatchHolder, TensorMapping, as_mapping, optional
from flowgrpo_rc.loss.aggregation import ALL_STEPS, KEPT_STEPS
from flowgrpo_rc.loss.inputs import ActorLossConfig, LossInputs, check_shape, read_inputs, require
from flowgrpo_rc.loss.objectives import OBJECTIVES
from flowgrpo_rc.loss.policy import PolicyInputs, TransitionShift, kept
from flowgrpo_rc.loss.sums import LossSums, loss_sums, mean_loss
from flowgrpo_rc.loss.tokens import read_tokens
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

    Source: Flow-GRPO, arXiv 2505.05470; the record of each ``loss_mode`` names the function that cites its own.

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
            ``rollout_rs_bounds`` ``(B,)``. A batch with a ``response_mask`` holds tokens and is handed to
            ``token_loss``. A dict, a ``TensorDict``, or an object with such a mapping in ``.batch``; not modified.
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
        UserWarning: everything is rejected; decoupled mode is to correct, and ``data`` has no weights; or ``data``
            holds tokens.
    """
    return mean_loss(_read_steps(config, model_output, data), dp_group, model_output, data)


def diffusion_loss_sums(
    config: ActorLossConfig,
    model_output: TensorMapping,
    data: TensorMapping | BatchHolder,
    *,
    corrected: bool = False,
) -> LossSums:
    """The loss of ``diffusion_loss`` before its division: see ``LossSums``. At least float32, whatever the input.

    Unlike ``diffusion_loss`` it does not see whether the sums are finite, which is for the caller to do. It waits for
    the device in bypass mode alone, to measure the off-policy gap, and not with ``corrected``.

    Args:
        corrected: ``data`` has ``rollout_is_weights`` and ``rollout_keep`` in bypass mode too, so that no correction is
            made of these log-probs, and none returned: they may be single steps of windows that it needs whole.
    """
    return loss_sums(_read_steps(config, model_output, data, corrected=corrected))


def _read_steps(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping | BatchHolder, *, corrected: bool = False
) -> LossInputs:
    """Everything that the loss of SDE steps depends on, read and checked; of tokens, what ``token_loss`` reads."""
    data = as_mapping(data)
    if optional(data, Key.RESPONSE_MASK) is not None:
        warnings.warn(
            "data has a response_mask, so diffusion_loss hands it to flowgrpo_rc.token_loss; call that for tokens",
            stacklevel=3,
        )
        return read_tokens(config, model_output, data)
    rc = config.rollout_correction
    options = config.diffusion_loss
    objective = OBJECTIVES[options.loss_mode]
    aggregation = KEPT_STEPS if rc.rejection_normalization == "kept" else ALL_STEPS
    shared = read_inputs(config, model_output, data, aggregation, corrected=corrected)
    # Rewards may have outliers, and one image must not make up a whole step.
    policy = shared.policy._replace(
        advantages=shared.policy.advantages.clamp(-options.adv_clip_max, options.adv_clip_max)
    )
    if objective.needs_old_means:
        name = Key.ROLLOUT_MEANS if rc.bypass_mode else Key.OLD_TRANSITION_MEANS
        old_mean = require(data, name, "data (this loss_mode)")
        kl, std = _kl_and_std(model_output, "the old transition means", old_mean, policy, "this loss_mode")
        dt = None
        if objective.needs_sigmas:
            where = f"data (loss_mode={objective.name})"
            dt = require(data, Key.SIGMAS, where) - require(data, Key.NEXT_SIGMAS, where)
            dt = kept(dt, policy.keep, 1.0)
        policy = policy._replace(shift=TransitionShift(kl, std, dt))
    reference_kl = None
    if config.use_kl_loss:
        reference = require(model_output, "ref_transition_means", "model_output (use_kl_loss=true)")
        reference_kl, _ = _kl_and_std(model_output, "ref_transition_means", reference, policy, "use_kl_loss=true")
    return replace(shared, policy=policy, reference_kl=reference_kl)


def _kl_and_std(
    model_output: TensorMapping, name: str, other_mean: Tensor, policy: PolicyInputs, why: str
) -> tuple[Tensor, Tensor]:
    """KL of each step to the transition with ``other_mean``, and its standard deviation: 0 and 1 where not kept."""
    steps = policy.log_prob.shape
    mean = require(model_output, "transition_means", f"model_output ({why})")
    std = require(model_output, "transition_stds", f"model_output ({why})")
    check_shape("transition_stds", std, steps)
    check_shape("transition_means", mean, steps + mean.shape[len(steps) :])
    check_shape(name, other_mean, mean.shape)
    # Selected before the arithmetic: what a rejected step holds would reach the gradient through a later mask.
    std = kept(std, policy.keep, 1.0)
    return transition_kl(kept(mean, policy.keep), kept(other_mean.detach(), policy.keep), std), std
