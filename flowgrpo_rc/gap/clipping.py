"""What the configured objective and correction would leave out for the gap alone, before anything is learned."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.gap.units import GapSample


@dataclass(frozen=True)
class SampledSteps:
    """The gap of every step, and what becomes of the step with the engine as the old policy, as in bypass mode."""

    gap: Float[Tensor, "..."]
    """``l = log pi_actor - log pi_engine``, mean-pooled."""
    nats: Float[Tensor, "..."]
    """The log ratio of the whole step, in nats."""
    kl_nats: Float[Tensor, "..."]
    """KL of the step's Gaussian, engine to actor, in nats."""
    size: Float[Tensor, "..."]
    """What the objective holds against its limit, without its sign; ``|gap|`` in the usual case."""
    beyond: Bool[Tensor, "..."]
    """Which steps exceed the objective's limit."""
    keep: Bool[Tensor, "..."]
    """Which steps rejection keeps."""
    zeroed: Bool[Tensor, "..."]
    """Which steps have an importance weight of 0 in the loss."""
    image: Int[Tensor, "..."]
    """The number of the image that each step belongs to."""

    def part(self, chosen: Tensor) -> "SampledSteps":
        """The steps where ``chosen`` is true, flat."""
        return SampledSteps(*(getattr(self, column.name)[chosen] for column in fields(self)))


def what_is_left_out(
    mode: ModeInForce,
    sample: GapSample,
    clip_widths: Float[Tensor, "n W"] | None = None,
    rejection_bounds: Float[Tensor, " n"] | None = None,
) -> SampledSteps:
    """Every sampled step, held against the objective's limit and given to the correction.

    Args:
        mode: the objective with its limit, and the correction.
        sample: with the divergence in closed form.
        clip_widths: half widths of the clip band for ``clip_ratio=auto``.
        rejection_bounds: of each image for ``rollout_rs_threshold=auto``.
    """
    assert sample.kl is not None
    gap = sample.engine
    correction = mode.rollout_correction
    measured = mode.objective.measure(gap, sample.kl / sample.dimensions, sample.stds)
    weights, keep, _ = compute_rollout_correction(
        gap, torch.zeros_like(gap), config=correction, rs_bounds=rejection_bounds
    )
    weights_act = weights is not None and correction.weights_act
    return SampledSteps(
        gap=gap,
        nats=gap * sample.to_nats,
        kl_nats=sample.kl,
        size=measured.abs(),
        beyond=mode.objective.limit.exceeded(measured, mode.diffusion_loss, clip_widths),
        keep=keep,
        zeroed=weights == 0 if weights_act else torch.zeros_like(keep),
        image=torch.arange(len(gap))[:, None].expand(gap.shape),
    )
