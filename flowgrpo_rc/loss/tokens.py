"""The actor's loss on tokens: ``diffusion_loss``'s objectives for log-probs ``(B, T)`` with a ``response_mask``.

It differs from the loss of SDE steps in four things: the mean is one of ``aggregation``'s over the modified mask, PPO
clips dually, the KL is the k3 estimate from ``ref_log_probs``, and advantages are not clamped.
"""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.batch import BatchHolder, Key, TensorMapping, as_mapping, response_mask
from flowgrpo_rc.loss.aggregation import AGGREGATIONS
from flowgrpo_rc.loss.inputs import ActorLossConfig, LossInputs, like_log_probs, read_inputs, require
from flowgrpo_rc.loss.objectives import DEFAULT, OBJECTIVES
from flowgrpo_rc.loss.policy import k3_kl
from flowgrpo_rc.loss.sums import LossSums, loss_sums, mean_loss


def token_loss(
    config: ActorLossConfig,
    model_output: TensorMapping,
    data: TensorMapping | BatchHolder,
    dp_group: object | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Mean loss of one batch of token sequences and its metrics.

    Log-probs and KL are in nats per token; advantages, weights and the loss have no unit.

    Source: PPO, arXiv 1707.06347, with the dual clip of arXiv 1912.09729; ``aggregation`` follows verl's ``agg_loss``.

    Args:
        config: a ``DiffusionActorConfig``; of its ``diffusion_loss`` also ``clip_ratio_c``, ``loss_agg_mode`` and
            ``loss_scale_factor`` count, and ``adv_clip_max`` does not.
        model_output: ``log_probs`` ``(B, T)``, with gradient.
        data: ``response_mask`` ``(B, T)`` of any dtype (non-zero: a valid token); ``old_log_probs`` (bypass mode:
            ``rollout_log_probs``, or what was put into ``old_log_probs`` for it), ``advantages`` ``(B,)`` or ``(B,
            T)``; decoupled correction adds ``rollout_is_weights`` and ``rollout_keep``. ``use_kl_loss`` reads
            ``ref_log_probs`` ``(B, T)``, ``clip_ratio=auto`` reads ``clip_widths`` ``(B, T)``, and
            ``rollout_rs_threshold=auto`` in bypass mode reads ``rollout_rs_bounds`` ``(B,)``. Values at masked
            positions have no effect. A dict, a ``TensorDict``, or an object with such a mapping in ``.batch``; not
            modified.
        dp_group: as for ``diffusion_loss``.

    Returns:
        ``(loss, metrics)``, as ``diffusion_loss``.

    Raises:
        ValueError: a missing key or a shape that does not fit, by name; an objective on transition means, which tokens
            do not have; a loss or log ratio that is NaN or infinite, naming the inputs that are.

    Warns:
        UserWarning: everything is rejected; or decoupled mode is to weight, and ``data`` has no weights.
    """
    return mean_loss(read_tokens(config, model_output, data), dp_group, model_output, data)


def token_loss_sums(
    config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping | BatchHolder
) -> LossSums:
    """The loss of ``token_loss`` before its division: see ``LossSums``. At least float32, whatever the input.

    It does not check that the sums are finite; the caller must.
    """
    return loss_sums(read_tokens(config, model_output, data))


def read_tokens(config: ActorLossConfig, model_output: TensorMapping, data: TensorMapping | BatchHolder) -> LossInputs:
    """Read and check the inputs of the loss of tokens."""
    data = as_mapping(data)
    options = config.diffusion_loss
    require(data, Key.RESPONSE_MASK, "data")
    valid = response_mask(data, require(model_output, "log_probs", "model_output"))
    objective = OBJECTIVES[options.loss_mode]
    # A token's distribution has no transition mean, so these objectives cannot be computed.
    if objective.clean or objective.needs_old_means:
        lack = "have no transition means" if objective.needs_old_means else "are no images"
        other = "SDE steps" if objective.needs_old_means else "clean images"
        raise ValueError(
            f"diffusion_loss.loss_mode: got {options.loss_mode} with a response_mask in data, but tokens {lack}; set "
            f"loss_mode={DEFAULT}, or leave response_mask out for {other}"
        )
    shared = read_inputs(config, model_output, data, AGGREGATIONS[options.loss_agg_mode], valid=valid)
    policy = shared.policy
    reference_kl = None
    if config.use_kl_loss:
        like_log_probs(data, Key.REF_LOG_PROBS, policy.log_prob)
        reference = require(data, Key.REF_LOG_PROBS, "data (use_kl_loss=true)")
        reference_kl = k3_kl(policy.log_prob, reference, keep=policy.keep)
    return replace(shared, reference_kl=reference_kl)
