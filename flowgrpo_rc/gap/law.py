"""The law of the gap: what the log ratio of a step may come out as, given how far apart the two transitions are.

Engine and actor draw a step from Gaussians of one standard deviation whose means differ. For a sample drawn by the
engine the log ratio ``L = log pi_actor - log pi_engine`` of the whole step, in nats, is therefore normal with mean
``-K`` and variance ``2 K``, where ``K`` is the Kullback-Leibler divergence, known in closed form. One sampled image
shows one value of ``L``; its ``K`` tells all values that its noise could have given. So shares and expectations over
that noise are taken over values drawn by the law, and only the differences between images are left to chance.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.gap.units import GapSample

PAIRS = 32
"""Pairs of draws an image; the second of a pair has the first's noise with the other sign."""
SMALLEST_KL = 1e-12
"""Nats; below it the transitions agree to the rounding of their means, and the square root has no gradient."""


def unit_noise(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """``2 PAIRS`` draws of standard normal noise of this shape, the draws first, float64 on the host; they sum to 0."""
    half = torch.randn(PAIRS, *shape, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def log_ratios(
    kl: Float[Tensor, "..."], to_nats: Float[Tensor, "..."], noise: Float[Tensor, "draws ..."]
) -> Float[Tensor, "draws ..."]:
    """``l`` in the unit of log-probs for each draw: ``(-kl + sqrt(2 kl) noise) / to_nats``.

    Its gradient reaches the actor through ``kl``. Averaged over the noise that gradient is the one at samples of the
    engine, since noise at right angles to the difference of the means moves no log ratio.

    Args:
        kl: divergence of each step in nats.
        to_nats: what a log ratio is multiplied with to be in nats.
        noise: of ``unit_noise``.
    """
    kl = kl.clamp(min=SMALLEST_KL)
    return (noise.to(kl) * (2 * kl).sqrt() - kl) / to_nats


def redrawn(sample: GapSample, seed: int) -> GapSample:
    """Every image of the sample ``2 PAIRS`` times, draw after draw, with log ratios drawn by the law."""
    assert sample.kl is not None
    draws = 2 * PAIRS
    noise = unit_noise(tuple(sample.kl.shape), torch.Generator().manual_seed(seed))
    engine = log_ratios(sample.kl, sample.to_nats, noise).flatten(0, 1)
    # Where there is no divergence the log ratio is 0, not what the smallest one would make of it.
    engine = engine * (sample.kl > SMALLEST_KL).repeat(draws, 1)
    return replace(
        sample,
        timesteps=sample.timesteps.repeat(draws, 1),
        engine=engine,
        staleness=sample.staleness.repeat(draws, 1),
        stds=sample.stds.repeat(draws, 1),
        to_nats=sample.to_nats.repeat(draws, 1),
        kl=sample.kl.repeat(draws, 1),
    )
