"""The law of the gap: drawn log ratios against those of real Gaussian steps, in float64."""

import math

import pytest
import torch

from flowgrpo_rc.gap.research.log_ratio_distribution import PAIRS, SMALLEST_KL, antithetic_noise, log_ratios, resample
from flowgrpo_rc.gap.statistics import GapSample, to_nats
from flowgrpo_rc.sde import Transition, log_prob

DIMENSIONS = 16
STD = 0.4


def gaussian_log_ratios(difference, draws, sde_type):
    """``log pi_actor - log pi_engine`` at samples of the engine, whose mean is 0; the actor's is ``difference``."""
    generator = torch.Generator().manual_seed(1)
    samples = STD * torch.randn(draws, DIMENSIONS, generator=generator, dtype=torch.float64)
    std = torch.full((draws,), STD, dtype=torch.float64)

    def of(mean):
        return log_prob(Transition(mean.expand(draws, -1), std), samples, sde_type=sde_type)

    return of(difference) - of(torch.zeros_like(difference))


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_drawn_log_ratios_are_distributed_as_those_of_samples(sde_type):
    """Mean and deviation, and the share beyond an uneven band, which a flipped sign of the mean would exchange."""
    difference = torch.linspace(0.05, 0.4, DIMENSIONS, dtype=torch.float64)
    kl = difference.square().sum() / (2 * STD**2)
    std = torch.tensor([STD], dtype=torch.float64)
    sampled = gaussian_log_ratios(difference, 200_000, sde_type)
    drawn = log_ratios(kl[None], to_nats(std, DIMENSIONS, sde_type), NORMAL[:, None])
    scale = DIMENSIONS if sde_type == "sde" else DIMENSIONS / (2 * STD**2)
    assert drawn.mean() * scale == pytest.approx(-float(kl), rel=1e-6)
    assert sampled.mean() * scale == pytest.approx(-float(kl), rel=0.02)
    for found in (drawn, sampled):
        assert found.std() * scale == pytest.approx(math.sqrt(2 * kl), rel=0.02)
    for bound in (-1.5 * kl / scale, 0.5 * kl / scale):
        share = float((sampled < bound).double().mean())
        assert float((drawn < bound).double().mean()) == pytest.approx(share, abs=0.005)


NORMAL = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
"""The normal distribution at the middles of 4,000 equal shares, in place of random draws."""


def test_the_gradient_is_that_of_the_log_ratio_at_the_engine_s_samples():
    """Of ``E[(|l| - c)+]`` in the actor's mean: from the law, and from a million samples of all dimensions."""
    difference = torch.linspace(-0.2, 0.3, DIMENSIONS, dtype=torch.float64, requires_grad=True)
    kl = difference.square().sum() / (2 * STD**2)
    width = 0.8 * math.sqrt(2 * float(kl.detach())) / DIMENSIONS
    ratios = log_ratios(kl[None], torch.full((1,), float(DIMENSIONS)).double(), NORMAL[:, None])
    (by_law,) = torch.autograd.grad((ratios.abs() - width).clamp(min=0).mean(), difference)
    generator = torch.Generator().manual_seed(0)
    noise = STD * torch.randn(1_000_000, DIMENSIONS, generator=generator, dtype=torch.float64)
    sampled = ((2 * noise * difference - difference.square()).mean(1)) / (2 * STD**2)
    (by_samples,) = torch.autograd.grad((sampled.abs() - width).clamp(min=0).mean(), difference)
    assert (by_law - by_samples).norm() < 0.02 * by_samples.norm()
    # It points away from the engine: descending closes the gap.
    assert by_law @ difference > 0


def test_redrawn_images_keep_what_is_theirs():
    kl = torch.tensor([[0.1, 0.0], [0.4, 0.2]], dtype=torch.float64)
    full = torch.full_like(kl, 8.0)
    timesteps = torch.tensor([[900.0, 600.0], [600.0, 300.0]], dtype=torch.float64)
    sample = GapSample(timesteps, kl, 0 * kl, full / 16, full, 8, kl)
    found = resample(sample, 3)
    draws = found.engine.view(2 * PAIRS, 2, 2)
    assert torch.equal(found.timesteps.view(2 * PAIRS, 2, 2)[7], timesteps)
    assert draws.mean(0) == pytest.approx(-kl / 8, rel=1e-9)
    assert torch.equal(draws[:, 0, 1], torch.zeros(2 * PAIRS, dtype=torch.float64))  # no divergence, no log ratio
    assert draws[:, 1, 0].std() > 1.3 * draws[:, 0, 0].std()


def test_without_a_divergence_the_gradient_is_0_and_not_nan():
    difference = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    kl = difference.square().sum()[None]
    ratios = log_ratios(kl, torch.ones(1).double(), antithetic_noise((1,), torch.Generator()))
    (gradient,) = torch.autograd.grad(ratios.abs().sum(), difference)
    assert torch.equal(gradient, torch.zeros(4, dtype=torch.float64))
    assert ratios.abs().max() < 10 * math.sqrt(SMALLEST_KL)
