"""Statistics of measured gaps: which steps the configured limits would exclude, and the figures of ``StepGap``."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.gap.intervals import CONFIDENCE, mean_interval, share_interval
from flowgrpo_rc.gap.safety import GAP_QUANTILE, StepGap
from flowgrpo_rc.gap.units import GapSample


@dataclass(frozen=True)
class SampledSteps:
    """The gap of every step, and the fate of the step with the engine as the old policy, as in bypass mode."""

    gap: Float[Tensor, "..."]
    """``l = log pi_actor - log pi_engine``, mean-pooled."""
    nats: Float[Tensor, "..."]
    """The log ratio of the whole step, in nats."""
    kl_nats: Float[Tensor, "..."]
    """KL of the step's Gaussian, engine to actor, in nats."""
    size: Float[Tensor, "..."]
    """Absolute value of the objective's measure; ``|gap|`` for a plain clip band."""
    beyond: Bool[Tensor, "..."]
    """The step exceeds the objective's limit."""
    keep: Bool[Tensor, "..."]
    """The step passes rejection."""
    zeroed: Bool[Tensor, "..."]
    """The step has an importance weight of 0 in the loss."""
    image: Int[Tensor, "..."]
    """Number of the step's image."""

    def part(self, chosen: Tensor) -> "SampledSteps":
        """The steps where ``chosen`` is true, flat."""
        return SampledSteps(*(getattr(self, column.name)[chosen] for column in fields(self)))


def apply_limits(
    mode: ModeInForce,
    sample: GapSample,
    clip_widths: Float[Tensor, "n W"] | None = None,
    rejection_bounds: Float[Tensor, " n"] | None = None,
) -> SampledSteps:
    """Compare every sampled step with the objective's limit, and apply the correction.

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
        # Only differences count: with the engine's log-probs at 0, the actor's are the gap.
        gap,
        torch.zeros_like(gap),
        config=correction,
        rs_bounds=rejection_bounds,
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


def step_gap(
    steps: SampledSteps,
    timestep: float | None,
    confidence: float = CONFIDENCE,
    expected: SampledSteps | None = None,
) -> StepGap:
    """Compute the statistics of these steps' gaps.

    Args:
        steps: flat.
        timestep: of all of them; None for several together.
        confidence: of the intervals.
        expected: the same images' steps under resampled noise, from which shares are taken; None: ``steps``.
    """
    # Sizes are of the sampled log ratios; shares of the resampled ones, which a few images determine better.
    shares = steps if expected is None else expected
    size = steps.gap.abs()
    nats = steps.nats.abs()
    used = shares.keep & ~shares.zeroed
    zeroed = shares.keep & shares.zeroed
    every = torch.ones_like(used)
    # One call sorts once.
    median, q90, q99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=size.dtype)).tolist()
    return StepGap(
        timestep=timestep,
        count=len(size),
        mean=float(steps.gap.mean()),
        abs_mean=float(size.mean()),
        abs_median=median,
        abs_q90=q90,
        abs_q99=q99,
        abs_max=float(size.max()),
        clip_q90=float(torch.quantile(steps.size, GAP_QUANTILE)),
        # Without used samples the share is 0, and its interval 0 to 1.
        clipped=float((shares.beyond & used).sum() / used.sum().clamp(min=1)),
        # float32 means of many samples would show in the last digits of an interval's end.
        rejected=1 - float(shares.keep.double().mean()),
        zeroed=float(zeroed.double().mean()),
        nats=float(nats.mean()),
        kl_nats=float(steps.kl_nats.mean()),
        images=len(steps.image.unique()),
        clipped_interval=share_interval(shares.beyond, used, shares.image, confidence),
        rejected_interval=share_interval(~shares.keep, every, shares.image, confidence),
        zeroed_interval=share_interval(zeroed, every, shares.image, confidence),
        nats_interval=mean_interval(nats, steps.image, confidence),
    )


def row_gap_quantile(gap: Float[Tensor, "B W"]) -> float:
    """99 % quantile over the images of the absolute mean log ratio, from which a rejection band is recommended."""
    return float(torch.quantile(gap.mean(1).abs(), 0.99))
