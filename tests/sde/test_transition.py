"""The transition against hand-worked numbers, against float64 loops, and against its own law."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowgrpo_rc.rollout import RolloutConfig
from flowgrpo_rc.rollout.config import RolloutAlgoConfig
from flowgrpo_rc.sde import SDE_TYPES, SDEWindow, Transition, draw, log_prob, transition, transition_kl
from flowgrpo_rc.sde.types import SDEType


def scalar_step(x, v, s, s_next, eta, kind):
    """SPEC formulas on plain floats."""
    dt = s_next - s
    if kind == "sde":
        g = eta * math.sqrt(s / (1 - (s_next if s == 1 else s)))
        return x * (1 + g * g * dt / (2 * s)) + v * (1 + g * g * (1 - s) / (2 * s)) * dt, g * math.sqrt(-dt)
    if kind == "cps":
        std = s_next * math.sin(eta * math.pi / 2)
        return (1 - s_next) * (x - s * v) + math.sqrt(s_next**2 - std**2) * (x + (1 - s) * v), std
    score = -(x - (1 - s) * (x - s * v)) / s**2
    return x + v * dt + eta**2 / 2 * -dt * score, eta * math.sqrt(-dt)


def one(value):
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "mean", "std"),
    [
        # x=2, v=-1, s=.5, s'=.25, eta=.8, dt=-.25.
        # sde: g^2 = .64*.5/.5 = .64; std = .8*.5 = .4;
        #   mean = 2*(1 - .64*.25/1) + (-1)*(1 + .64*.5/1)*(-.25) = 2*.84 + .33 = 2.01
        ("sde", 2.01, 0.4),
        # cps: std = .25*sin(.4 pi) = .2377641; sqrt(.0625 - .0565318) = .25*cos(.4 pi) = .0772542;
        #   mean = .75*(2.5) + .0772542*(1.5) = 1.9908814
        ("cps", 1.9908814, 0.2377641),
        # dance: std = .8*.5 = .4; score = -(2 - .5*2.5)/.25 = -3; mean = 2 + .25 + .32*.25*(-3) = 2.01
        ("dance_sde", 2.01, 0.4),
    ],
)
def test_hand_worked_step(kind, mean, std):
    step = transition(one(2.0).view(1, 1), one(-1.0).view(1, 1), one(0.5), one(0.25), noise_level=0.8, sde_type=kind)
    assert_close(step.mean.item(), mean, atol=1e-7, rtol=0)
    assert_close(step.step_std.item(), std, atol=1e-7, rtol=0)


@pytest.mark.parametrize("kind", SDE_TYPES)
@pytest.mark.parametrize(("s", "s_next"), [(1.0, 0.9), (0.9, 0.4), (0.3, 0.05), (0.2, 0.0)])
def test_matches_the_formulas_in_float64(kind, s, s_next):
    generator = torch.Generator().manual_seed(3)
    x, v = (torch.randn(4, 3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    step = transition(x, v, one(s).expand(4), one(s_next).expand(4), noise_level=0.6, sde_type=kind)
    for index in torch.cartesian_prod(torch.arange(4), torch.arange(3), torch.arange(5)).tolist():
        mean, std = scalar_step(float(x[tuple(index)]), float(v[tuple(index)]), s, s_next, 0.6, kind)
        assert_close(step.mean[tuple(index)].item(), mean, atol=1e-12, rtol=1e-12)
        assert_close(step.step_std[index[0]].item(), std, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", SDE_TYPES)
@pytest.mark.parametrize("s", [1.0, 0.6])
def test_zero_noise_is_the_euler_step(kind, s):
    x, v = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = transition(x, v, one(s).expand(2), one(0.35).expand(2), noise_level=0.0, sde_type=kind)
    assert_close(step.mean, x + v * (0.35 - s))
    assert_close(step.step_std, torch.zeros(2, dtype=torch.float64))


def test_samples_of_a_batch_do_not_mix():
    """Every sample has its own sigma and noise level."""
    x, v = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    sigma, following, eta = (
        torch.tensor([0.9, 0.5, 0.2]),
        torch.tensor([0.7, 0.3, 0.1]),
        torch.tensor([0.7, 0.0, 1.2]),
    )
    together = transition(x, v, sigma, following, noise_level=eta, sde_type="sde")
    for i in range(3):
        row = slice(i, i + 1)
        alone = transition(x[row], v[row], sigma[row], following[row], noise_level=float(eta[i]), sde_type="sde")
        assert_close(together.mean[row], alone.mean)
        assert_close(together.step_std[row], alone.step_std)


def test_draw_follows_the_law():
    step = Transition(torch.full((20000, 2), 1.5), torch.full((20000,), 0.3))
    drawn = draw(step, torch.randn(20000, 2, generator=torch.Generator().manual_seed(0)))
    assert_close(drawn.mean().item(), 1.5, atol=0.005, rtol=0)
    assert_close(drawn.std().item(), 0.3, atol=0.005, rtol=0)


def test_gaussian_log_prob_is_torch_distributions_averaged():
    generator = torch.Generator().manual_seed(5)
    mean, following = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    std = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    expected = torch.distributions.Normal(mean, std.view(3, 1, 1)).log_prob(following).flatten(1).mean(1)
    for kind in ("sde", "dance_sde"):
        assert_close(log_prob(Transition(mean, std), following, sde_type=kind), expected)


def test_cps_log_prob_is_the_negative_mean_square():
    # ((1-0)^2 + (3-1)^2) / 2 = 2.5, whatever the std
    step = Transition(torch.tensor([[0.0, 1.0]]), torch.tensor([0.01]))
    assert_close(log_prob(step, torch.tensor([[1.0, 3.0]]), sde_type="cps"), torch.tensor([-2.5]))


def test_kl_is_torch_distributions_averaged():
    generator = torch.Generator().manual_seed(6)
    mean, other = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    std = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, std[:, None]), normal(other, std[:, None])).mean(1)
    assert_close(transition_kl(mean, other, std), expected)


@pytest.mark.parametrize("kind", SDE_TYPES)
def test_gradient_reaches_the_velocity(kind):
    x, v, following = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sigma, after = (torch.tensor([1.0, 0.6], dtype=torch.float64), torch.tensor([0.8, 0.3], dtype=torch.float64))

    def score(velocity):
        step = transition(x, velocity, sigma, after, noise_level=0.7, sde_type=kind)
        return log_prob(step, following, sde_type=kind)

    assert torch.autograd.gradcheck(score, v.requires_grad_())


def test_low_precision_velocity_is_promoted_and_inputs_stay():
    x, v = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    low = v.bfloat16()
    before = low.clone()
    step = transition(x, low, torch.tensor([0.8, 0.5]), torch.tensor([0.6, 0.4]), noise_level=0.5, sde_type="sde")
    assert step.mean.dtype == torch.float32
    assert_close(low, before, rtol=0, atol=0)
    same = transition(
        x, low.float(), torch.tensor([0.8, 0.5]), torch.tensor([0.6, 0.4]), noise_level=0.5, sde_type="sde"
    )
    assert_close(step.mean, same.mean, rtol=0, atol=0)


def test_unknown_type_lists_the_known_ones():
    x = torch.zeros(1, 2)
    for of_type in (
        lambda name: transition(x, x, torch.ones(1), torch.ones(1) * 0.5, noise_level=0.5, sde_type=name),
        lambda name: log_prob(Transition(x, torch.ones(1)), x, sde_type=name),
        lambda name: SDEWindow.for_schedule(4, None, None, sde_type=name),
    ):
        with pytest.raises(ValueError, match="sde_type='ddim' is unknown; choose one of sde, cps, dance_sde"):
            of_type("ddim")


def constant_step(x, v, s, s_next, eta):
    """The Euler step with the same noise at every level."""
    return Transition(x + v * (s_next - s), eta * torch.ones_like(s))


def test_a_type_of_step_is_added_by_one_row(monkeypatch):
    """The configuration takes its name and asks its row; the transition computes with its function."""
    with pytest.raises(ValueError, match=r"sde_type: got 'constant'; choose one of sde, cps, dance_sde$"):
        RolloutAlgoConfig(sde_type="constant")
    row = SDEType(f"{__name__}:constant_step", last_step_is_stochastic=False, largest_noise_level=0.5)
    monkeypatch.setitem(SDE_TYPES, "constant", row)
    with pytest.raises(ValueError, match="sde_type=constant takes a level between 0 and 0.5"):
        RolloutAlgoConfig(sde_type="constant", noise_level=0.7)
    algo = RolloutAlgoConfig(sde_type="constant", noise_level=0.25)
    assert RolloutConfig(algo=algo).window == SDEWindow(9, 0, 9)
    step = transition(one(2.0)[None], one(-1.0)[None], one(0.5), one(0.25), noise_level=0.25, sde_type="constant")
    assert (step.mean.item(), step.step_std.item()) == (2.25, 0.25)
    # One standard deviation off: -1/2 - log(.25) - log(2 pi)/2.
    expected = -0.5 - math.log(0.25) - 0.5 * math.log(2 * math.pi)
    assert log_prob(step, one(2.5)[None], sde_type="constant").item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("start", "after", "gap"), [(1.0, 0.9, 0.1), (1 - 1e-6, 0.9, 0.1), (0.99967, 0.9, 0.1), (0.9983, 0.9966, 0.0017)]
)
def test_a_schedule_that_starts_just_below_pure_noise_takes_an_ordinary_first_step(start, after, gap):
    """Flow-GRPO's substitution at 1, also for the first levels of UniPC (1 - 1e-6) and DPM (.99967).

    At .9983, shift 12 in 50 steps, a step of about the same size follows: that level keeps its own.
    """
    x = torch.ones(1, 4, dtype=torch.float64)
    step = transition(x, x, one(start), one(after), noise_level=0.7, sde_type="sde")
    assert step.step_std.item() == pytest.approx(0.7 * math.sqrt(start / gap * (start - after)))
    assert 0.6 < step.step_std.item() < 0.75
