"""What ``diffusion_loss`` and ``token_loss`` share: from ``LossInputs`` to sums, and from sums to mean and metrics."""

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction import MetricAccumulator, RolloutCorrection
from flowgrpo_rc.loss.inputs import LossInputs, not_finite
from flowgrpo_rc.loss.metrics import LossMetrics


class LossSums(NamedTuple):
    """A loss as a sum and its denominator, so that micro-batches and ranks add up exactly.

    ``loss_sum`` carries the gradient. Add sums (their gradients) and denominators over everything that one
    optimizer step sees, and divide once.
    """

    loss_sum: Float[Tensor, ""]
    denominator: Float[Tensor, ""]
    metrics: LossMetrics
    correction: RolloutCorrection | None


def loss_sums(inputs: LossInputs) -> LossSums:
    """The loss before its division, without waiting for the device."""
    policy = inputs.policy
    scale_factor = inputs.config.diffusion_loss.loss_scale_factor
    terms = inputs.objective(policy, inputs.limits)
    # Without a rejection all is kept; a mask of ones lets every aggregation count in the same way.
    keep = torch.ones_like(policy.log_prob, dtype=torch.bool) if policy.keep is None else policy.keep
    denominator = inputs.aggregation.denominator(keep).to(policy.log_prob.dtype)
    policy_sum = inputs.aggregation.loss_sum(terms.loss, keep, scale_factor)
    kl_sum = policy_sum.new_zeros(())
    total = policy_sum
    if inputs.reference_kl is not None:
        kl_sum = inputs.aggregation.loss_sum(inputs.reference_kl, keep, scale_factor)
        total = policy_sum + inputs.config.kl_loss_coef * kl_sum
    metrics = LossMetrics.of(
        policy, terms, inputs.limits, loss_sum=policy_sum, denominator=denominator, kl_sum=kl_sum, valid=inputs.valid
    )
    return LossSums(total, denominator, metrics, inputs.correction)


def mean_loss(
    inputs: LossInputs, dp_group: object | None, model_output: object, data: object
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """``(loss, metrics)`` of ``diffusion_loss`` and ``token_loss``, which document them.

    Args:
        model_output, data: what ``inputs`` were read from, to say which of their tensors is not finite.
    """
    sums = loss_sums(inputs)
    reported = sums.metrics
    denominator = sums.denominator
    correction = {} if sums.correction is None else sums.correction.metrics
    if dp_group is not None:
        reported = reported.all_reduce(dp_group)
        # Averaging the ranks' gradients divides by their number, so each divides by the mean denominator.
        ranks = torch.distributed.get_world_size(dp_group)  # type: ignore[arg-type]
        denominator = (reported.denominator / ranks).to(denominator.dtype)
        if inputs.config.rollout_correction.bypass_mode:
            # Also a rank with no valid token, and so no correction, must take part in the collective.
            everywhere = MetricAccumulator()
            if sums.correction is not None:
                everywhere.add(sums.correction)
            correction = everywhere.compute(dp_group)
    # Where nothing is kept the sum is 0 and still has its graph: a loss of 0 with gradients of 0, on every rank.
    loss = sums.loss_sum / torch.where(denominator > 0, denominator, 1.0)
    metrics = reported.compute()
    metrics["actor/loss"] = metrics["actor/pg_loss"] + inputs.config.kl_loss_coef * metrics["actor/kl_loss"]
    # The loss clamps log ratios, so that it may be finite where they are not.
    for name in ("actor/loss", "actor/log_ratio_abs_mean"):
        if not math.isfinite(metrics[name]):
            raise ValueError(f"{name} is {metrics[name]}; {not_finite(model_output=model_output, data=data)}")
    if metrics["actor/kept_fraction"] == 0:
        warnings.warn(
            "rollout correction rejected every element of this batch: loss and gradients are 0",
            stacklevel=3,
        )
    return loss, metrics | {f"actor/{name}": value for name, value in correction.items()}
