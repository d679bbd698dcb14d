"""Units and statistics of the gap between rollout engine and actor.

``l = log pi_actor - log pi_engine`` of one SDE step is a mean over the latent dimensions. In nats it is the log ratio
of the step's whole density: ``l`` times the dimensions, and for ``cps``, whose log-prob omits ``1/(2 std^2)``, times
that too. Divided by the dimensions again it has one scale for every ``sde_type`` (``l`` itself for ``sde`` and
``dance_sde``), which is the scale of the limits. Both policies draw a step with one standard deviation, so in nats
``l ~ N(-K, 2K)`` under the engine, with ``K`` the Kullback-Leibler divergence of engine from actor: in closed form if
the engine returns its transition means, else estimated from ``E[l^2] = 2K + K^2``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.gap.intervals import CONFIDENCE, mean_interval, share_interval
from flowgrpo_rc.gap.safety import GAP_QUANTILE, StepGap
from flowgrpo_rc.sde import SDE_TYPES, transition_kl


@dataclass(frozen=True)
class GapSample:
    """``n`` rescored images of ``W`` steps, float64 on the host."""

    timesteps: Float[Tensor, "n W"]  # As the scheduler names them
    engine: Float[Tensor, "n W"]  # ``l`` with equal weights: the effect of precision and kernels alone
    staleness: Float[Tensor, "n W"]  # The actor's present log-prob minus its log-prob with the engine's adapter
    stds: Float[Tensor, "n W"]  # Standard deviation of each step
    to_nats: Float[Tensor, "n W"]  # Factor from ``l`` to nats
    dimensions: int  # Number of latent dimensions
    kl: Float[Tensor, "n W"] | None  # The divergence in closed form, in nats; None if the engine returned no means

    @property
    def total(self) -> Float[Tensor, "n W"]:
        """``log pi_actor - log pi_engine`` of training: both parts."""
        return self.engine + self.staleness

    @staticmethod
    def of(
        batch: TensorDict, scored: Mapping[str, Tensor], present: Mapping[str, Tensor], sde_type: str
    ) -> "GapSample":
        """Compare recorded steps with two rescorings.

        Args:
            batch: the steps as the engine recorded them.
            scored: ``DiffusionActor.rescore`` of them with the engine's adapter.
            present: the same with the actor's present adapter.
            sde_type: of the stochastic steps.
        """
        log_probs = scored["log_probs"].double()
        stds = scored["transition_stds"].double()
        dimensions = batch[Key.LATENTS].shape[2:].numel()
        means = batch.get(Key.ROLLOUT_MEANS, None)
        kl = None
        if means is not None:
            engine, actor = (one.double().flatten(0, 1) for one in (means, scored["transition_means"]))
            kl = dimensions * transition_kl(engine, actor, stds.flatten()).view(stds.shape)
        return GapSample(
            timesteps=batch[Key.TIMESTEPS].double(),
            engine=log_probs - batch[Key.ROLLOUT_LOG_PROBS].double(),
            staleness=present["log_probs"].double() - log_probs,
            stds=stds,
            to_nats=to_nats(stds, dimensions, sde_type),
            dimensions=dimensions,
            kl=kl,
        )

    @staticmethod
    def concatenate(samples: Sequence["GapSample"]) -> "GapSample":
        """Join samples, in order."""
        # kl is None without transition means, and dimensions is a number.
        names = [f.name for f in fields(GapSample) if isinstance(getattr(samples[0], f.name), Tensor)]
        columns: dict[str, Any] = {name: torch.cat([getattr(sample, name) for sample in samples]) for name in names}
        return replace(samples[0], **columns)


def to_nats(stds: Float[Tensor, "..."], dimensions: int, sde_type: str) -> Float[Tensor, "..."]:
    """Factor from a mean-pooled log ratio to nats of the whole step."""
    stds = stds.double()
    # cps log-probs lack the factor 1/(2 std^2), which is put back here.
    if SDE_TYPES[sde_type].log_prob_is_density:
        return torch.full_like(stds, dimensions)
    return dimensions / (2 * stds**2)


def estimated_kl(nats: Float[Tensor, "..."]) -> float:
    """``K`` of ``l ~ N(-K, 2K)`` from the mean of ``l^2``: ``sqrt(1 + E[l^2]) - 1``, in nats. Samples of unequal
    divergences give a value between their mean and their root mean square."""
    return float(torch.sqrt(1 + nats.double().square().mean()) - 1)


def gap_metrics(sample: GapSample, prefix: str) -> dict[str, float]:
    """Means over the sample and, with ``/ts_{t}``, over each timestep.

    ``engine_gap_mean`` (with its sign), ``engine_gap_abs_mean`` and ``staleness_abs_mean`` are in the unit of
    log-probs; ``engine_gap_nats``, ``engine_kl_nats`` and ``staleness_nats`` are of the whole step. Over all timesteps
    there are also ``engine_gap_abs_max``, and ``engine_gap_per_dimension`` and ``staleness_per_dimension``, the nats
    divided by the latent dimensions.
    """
    # The maximum has no timesteps: that of a few samples would only be noise.
    values = {f"{prefix}engine_gap_abs_max": float(sample.engine.abs().max())} | _means(sample, slice(None), prefix, "")
    for part in ("engine_gap", "staleness"):
        values[f"{prefix}{part}_per_dimension"] = values[f"{prefix}{part}_nats"] / sample.dimensions
    # Timesteps that agree in six digits share a name, and so their mean.
    rounded = sample.timesteps.clone().apply_(lambda timestep: float(f"{timestep:.6g}"))
    for timestep in sorted(set(rounded.flatten().tolist()), reverse=True):
        values |= _means(sample, rounded == timestep, prefix, f"/ts_{timestep:.6g}")
    return values


def _means(sample: GapSample, chosen: Tensor | slice, prefix: str, suffix: str) -> dict[str, float]:
    engine = sample.engine[chosen]
    staleness = sample.staleness[chosen]
    nats = engine * sample.to_nats[chosen]
    means = {
        "engine_gap_mean": float(engine.mean()),
        "engine_gap_abs_mean": float(engine.abs().mean()),
        "engine_gap_nats": float(nats.abs().mean()),
        "engine_kl_nats": estimated_kl(nats) if sample.kl is None else float(sample.kl[chosen].mean()),
        "staleness_abs_mean": float(staleness.abs().mean()),
        "staleness_nats": float((staleness * sample.to_nats[chosen]).abs().mean()),
    }
    return {f"{prefix}{name}{suffix}": value for name, value in means.items()}


@dataclass(frozen=True)
class SampledSteps:
    """The gap of every step, and the fate of the step with the engine as the old policy, as in bypass mode."""

    gap: Float[Tensor, "..."]  # ``l``, mean-pooled
    nats: Float[Tensor, "..."]  # ``l`` of the whole step, in nats
    kl_nats: Float[Tensor, "..."]  # KL of the step's Gaussian, engine to actor, in nats
    size: Float[Tensor, "..."]  # Absolute value of the objective's measure; ``|gap|`` for a plain clip band
    beyond: Bool[Tensor, "..."]  # The step exceeds the objective's limit
    keep: Bool[Tensor, "..."]  # The step passes rejection
    zeroed: Bool[Tensor, "..."]  # The step has an importance weight of 0 in the loss
    image: Int[Tensor, "..."]  # Number of the step's image

    def part(self, chosen: Tensor) -> "SampledSteps":
        """The steps where ``chosen`` is true, flat."""
        return SampledSteps(*(getattr(self, column.name)[chosen] for column in fields(self)))


def apply_limits(
    mode: ModeInForce, sample: GapSample, limits: Mapping[str, Tensor] | None = None, mask: Tensor | None = None
) -> SampledSteps:
    """Compare every sampled step with the objective's limit, and apply the correction.

    Args:
        mode: the objective with its limit, and the correction.
        sample: with the divergence in closed form.
        limits: with ``clip_ratio=auto`` ``clip_widths (n, W)``, the half widths of the clip band; with
            ``rollout_rs_threshold=auto`` ``rollout_rs_bounds (n,)``.
        mask: ``(n, W)``, true where a row has a step; ``None``: everywhere.
    """
    assert sample.kl is not None
    limits = limits or {}
    widths = limits.get(Key.CLIP_WIDTHS)
    gap = sample.engine
    measured = mode.objective.measure(gap, sample.kl / sample.dimensions, sample.stds)
    weights, keep, _ = compute_rollout_correction(
        # Only differences count: with the engine's log-probs at 0, the actor's are the gap.
        gap,
        torch.zeros_like(gap),
        mask,
        config=mode.rollout_correction,
        rs_bounds=limits.get(Key.ROLLOUT_RS_BOUNDS),
    )
    weights_act = weights is not None and mode.rollout_correction.weights_act
    return SampledSteps(
        gap=gap,
        nats=gap * sample.to_nats,
        kl_nats=sample.kl,
        size=measured.abs(),
        beyond=mode.objective.limit.exceeded(
            measured, mode.diffusion_loss, None if widths is None else widths.double()
        ),
        keep=keep,
        zeroed=weights == 0 if weights_act else torch.zeros_like(keep),
        image=torch.arange(len(gap))[:, None].expand(gap.shape),
    )


def step_gap(
    steps: SampledSteps, timestep: float | None, confidence: float = CONFIDENCE, expected: SampledSteps | None = None
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
