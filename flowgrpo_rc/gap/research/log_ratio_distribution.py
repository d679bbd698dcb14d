"""Distribution of a step's log ratio, given how far apart the two transitions are.

Engine and actor draw a step from Gaussians of one standard deviation and different means. For a sample of the engine,
the log ratio ``L = log pi_actor - log pi_engine`` of the whole step, in nats, is therefore normal with mean ``-K`` and
variance ``2 K``, with the Kullback-Leibler divergence ``K`` known in closed form. A sampled image shows one value of
``L``, its ``K`` the distribution over all noise that it might have had. Shares and expectations are taken over values
drawn from that distribution, which leaves only the differences between images to chance.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.gap.statistics import GapSample

# Antithetic pairs of draws per image.
PAIRS = 32
# Nats; below it the transitions agree to the rounding of their means, and the square root has no gradient.
SMALLEST_KL = 1e-12


def antithetic_noise(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """``2 PAIRS`` standard normal draws of this shape, draws first, float64 on the host; they sum to 0."""
    half = torch.randn(PAIRS, *shape, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def log_ratios(
    kl: Float[Tensor, "..."], to_nats: Float[Tensor, "..."], noise: Float[Tensor, "draws ..."]
) -> Float[Tensor, "draws ..."]:
    """``l`` in the unit of log-probs for each draw: ``(-kl + sqrt(2 kl) noise) / to_nats``.

    Its gradient reaches the actor through ``kl``. Averaged over the noise that gradient equals the one at samples of
    the engine, since noise orthogonal to the difference of the means moves no log ratio.

    Args:
        kl: divergence of each step in nats.
        to_nats: factor from a log ratio to nats.
        noise: of ``antithetic_noise``.
    """
    kl = kl.clamp(min=SMALLEST_KL)
    return (noise.to(kl) * (2 * kl).sqrt() - kl) / to_nats


def resample(sample: GapSample, seed: int) -> GapSample:
    """Repeat every image ``2 PAIRS`` times, draw after draw, with log ratios drawn from their distribution."""
    assert sample.kl is not None
    noise = antithetic_noise(tuple(sample.kl.shape), torch.Generator().manual_seed(seed))
    engine = log_ratios(sample.kl, sample.to_nats, noise)
    # Without a divergence the log ratio is 0, not that of the smallest one.
    engine = engine * (sample.kl > SMALLEST_KL)
    return replace(GapSample.concatenate([sample] * len(noise)), engine=engine.flatten(0, 1))
