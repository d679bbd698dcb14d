"""The gap in nats and as a divergence: equal to its definitions on Gaussians of known means."""

from dataclasses import replace

import pytest
import torch

from flowgrpo_rc.gap.statistics import GapSample, estimated_kl, gap_metrics, to_nats
from flowgrpo_rc.sde import Transition, draw, log_prob, transition_kl
from flowgrpo_rc.trainer import FlowGRPOTrainer


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


def test_processes_are_put_together():
    other = GapSample(*(torch.zeros(0, 2) for _ in range(5)), dimensions=25, kl=None)
    both = GapSample.concatenate([sample(), other, sample()])
    assert both.engine.shape == (4, 2)
    assert both.kl is None
    assert gap_metrics(both, "") == pytest.approx(gap_metrics(sample(), ""))


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
