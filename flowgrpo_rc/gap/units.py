"""Units of the gap between rollout engine and actor: per latent dimension, in nats, as a divergence.

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
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.sde import SDE_TYPES, transition_kl


@dataclass(frozen=True)
class GapSample:
    """``n`` rescored images of ``W`` steps, float64 on the host."""

    timesteps: Float[Tensor, "n W"]
    """As the scheduler names them."""
    engine: Float[Tensor, "n W"]
    """``l`` with equal weights: the effect of precision and kernels alone."""
    staleness: Float[Tensor, "n W"]
    """The actor's present log-prob minus its log-prob with the engine's adapter."""
    stds: Float[Tensor, "n W"]
    """Standard deviation of each step."""
    to_nats: Float[Tensor, "n W"]
    """Factor from ``l`` to nats."""
    dimensions: int
    """Number of latent dimensions."""
    kl: Float[Tensor, "n W"] | None
    """The divergence in closed form, in nats; None if the engine returned no means."""

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
            present: the same with the actor's present adapter; the same object if that is the engine's.
            sde_type: of the stochastic steps.
        """
        log_probs = scored["log_probs"].double()
        stds = scored["transition_stds"].double()
        dimensions = batch[Key.LATENTS].shape[2:].numel()
        means = batch.get(Key.ROLLOUT_MEANS, None)
        return GapSample(
            timesteps=batch[Key.TIMESTEPS].double(),
            engine=log_probs - batch[Key.ROLLOUT_LOG_PROBS].double(),
            staleness=present["log_probs"].double() - log_probs,
            stds=stds,
            to_nats=to_nats(stds, dimensions, sde_type),
            dimensions=dimensions,
            kl=None if means is None else dimensions * _kl_per_dimension(means, scored["transition_means"], stds),
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


def _kl_per_dimension(
    engine_means: Float[Tensor, "B W *L"], actor_means: Float[Tensor, "B W *L"], stds: Float[Tensor, "B W"]
) -> Float[Tensor, "B W"]:
    """KL of each step's Gaussian, engine from actor, from the means of both."""
    engine = engine_means.double().flatten(0, 1)
    return transition_kl(engine, actor_means.double().flatten(0, 1), stds.flatten()).view(stds.shape)


def estimated_kl(nats: Float[Tensor, "..."]) -> float:
    """``K`` of ``l ~ N(-K, 2K)`` from the mean of ``l^2``: ``sqrt(1 + E[l^2]) - 1``, in nats.

    Samples of unequal divergences give a value between their mean and their root mean square.
    """
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
