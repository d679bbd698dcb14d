"""Units and statistics of the gap, and its distribution: equal to their definitions on Gaussians of known means."""

import math
from dataclasses import replace

import pytest
import torch

from flowgrpo_rc.gap.research.drift import PAIRS, SMALLEST_KL, antithetic_noise, log_ratios, resample
from flowgrpo_rc.gap.statistics import GapSample, estimated_kl, gap_metrics, to_nats
from flowgrpo_rc.sde import Transition, draw, log_prob, transition_kl
from flowgrpo_rc.trainer import FlowGRPOTrainer

DIMENSIONS = 16
STD = 0.4


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
@pytest.mark.parametrize("shift", [0.003, 0.05])
def test_nats_and_both_divergences_of_two_gaussians(sde_type, shift):
    """Engine and actor differ by a shift of the mean in every dimension: KL = D shift^2 / (2 std^2)."""
    n = 20_000
    dimensions = 64
    std = 0.4
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(n, dimensions, generator=generator, dtype=torch.float64)
    stds = torch.full((n,), std, dtype=torch.float64)
    engine = Transition(means, stds)
    actor = Transition(means + shift, stds)
    drawn = draw(engine, torch.randn(n, dimensions, generator=generator, dtype=torch.float64))
    l = log_prob(actor, drawn, sde_type=sde_type) - log_prob(engine, drawn, sde_type=sde_type)  # noqa: E741
    nats = l * to_nats(stds, dimensions, sde_type)
    exact = torch.distributions.Normal(means, std).log_prob(drawn).sum(1)
    other = torch.distributions.Normal(means + shift, std).log_prob(drawn).sum(1)
    assert torch.allclose(nats, other - exact, atol=1e-9)
    kl = dimensions * shift**2 / (2 * std**2)
    closed = dimensions * transition_kl(engine.mean, actor.mean, stds)
    assert closed.mean() == pytest.approx(kl)
    assert estimated_kl(nats) == pytest.approx(kl, rel=0.02)
    assert float(nats.mean()) == pytest.approx(-kl, abs=3 * (2 * kl / n) ** 0.5)
    if shift > 0.01:
        assert nats.mean() < -0.9 * kl  # the sign: the engine's draws are likelier under itself
        assert estimated_kl(nats) != pytest.approx(float(nats.square().mean()) / 2, rel=0.1)


def sample(kl=None):
    return GapSample(
        timesteps=torch.tensor([[900.0, 800.0], [800.0, 700.0]]).double(),
        engine=torch.tensor([[1e-3, -2e-3], [4e-3, -8e-3]]).double(),
        staleness=torch.tensor([[0.0, 1e-3], [-2e-3, 0.0]]).double(),
        stds=torch.full((2, 2), 0.5).double(),
        to_nats=torch.full((2, 2), 100.0).double(),
        dimensions=25,
        kl=kl,
    )


def test_metrics_by_hand():
    found = gap_metrics(sample(), "x/")
    assert found["x/engine_gap_abs_mean"] == pytest.approx(3.75e-3)
    assert found["x/engine_gap_abs_max"] == pytest.approx(8e-3)
    assert found["x/engine_gap_nats"] == pytest.approx(0.375)
    assert found["x/engine_gap_per_dimension"] == pytest.approx(0.015)
    assert found["x/engine_gap_mean"] == pytest.approx(-1.25e-3)
    assert found["x/engine_gap_mean/ts_800"] == pytest.approx(1e-3)
    assert found["x/staleness_abs_mean"] == pytest.approx(0.75e-3)
    assert found["x/staleness_nats"] == pytest.approx(0.075)
    assert found["x/staleness_per_dimension"] == pytest.approx(0.003)
    assert found["x/staleness_nats/ts_800"] == pytest.approx(0.15)
    assert found["x/engine_gap_abs_mean/ts_900"] == pytest.approx(1e-3)
    assert found["x/engine_gap_abs_mean/ts_800"] == pytest.approx(3e-3)
    assert found["x/engine_gap_nats/ts_700"] == pytest.approx(0.8)
    assert found["x/staleness_abs_mean/ts_800"] == pytest.approx(1.5e-3)
    assert found["x/engine_kl_nats/ts_700"] == pytest.approx((1 + 0.64) ** 0.5 - 1)
    closed = gap_metrics(sample(torch.tensor([[1.0, 2.0], [4.0, 8.0]])), "x/")
    assert closed["x/engine_kl_nats"] == 3.75
    assert closed["x/engine_kl_nats/ts_800"] == 3.0
    assert closed.keys() == found.keys()


def test_timesteps_of_one_name_share_their_mean():
    """As those of the correction's metrics do; six digits do not tell them apart."""
    made = replace(sample(), timesteps=torch.tensor([[900.0001, 900.0002], [800.0, 700.0]]).double())
    found = gap_metrics(made, "x/")
    assert found["x/engine_gap_abs_mean/ts_900"] == pytest.approx(1.5e-3)
    assert found["x/engine_gap_abs_mean/ts_800"] == pytest.approx(4e-3)


@pytest.mark.run
def test_a_run_logs_the_divergence_from_means_where_the_engine_records_them(small_config):
    """Bypass with an objective of means: the closed form; its estimate, from the same images, is of that size."""
    fp8 = ("actor_rollout_ref.rollout.quantization=fp8", "actor_rollout_ref.rollout.probe.images=16")
    bypass = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.actor.diffusion_loss.clip_ratio=0.01")
    means = FlowGRPOTrainer(
        small_config(*fp8, *bypass, "actor_rollout_ref.actor.diffusion_loss.loss_mode=grpo_guard", folder="means")
    ).train_step()
    without = FlowGRPOTrainer(small_config(*fp8, *bypass, folder="without")).train_step()
    name = "rollout_sync/engine_kl_nats"
    assert without["rollout_sync/engine_gap_nats"] == pytest.approx(means["rollout_sync/engine_gap_nats"], rel=1e-6)
    assert 0.3 < without[name] / means[name] < 3
    assert without[name] != means[name]
    steps = [key for key in means if key.startswith(f"{name}/ts_")]
    assert len(steps) >= 2
    assert "rollout_sync/outside_clip" in without
    assert "rollout_sync/outside_clip" not in means  # another ratio is clipped there


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
