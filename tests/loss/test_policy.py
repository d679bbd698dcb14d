"""Policy-gradient terms: hand-worked tables, equal policies, the safety bound."""

import math

import pytest
import torch
from loss_cases import F64, tensor
from torch.testing import assert_close

from flowgrpo_rc.loss import ppo_clip, reinforce
from flowgrpo_rc.loss.policy import SAFETY_BOUND, k3_kl

BAND = {"clip_low": 0.1, "clip_high": 0.3}  # ratios in [.9, 1.3]: a swapped or flipped band is another one


def draw(seed, shape, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def slopes(terms, log_prob):
    """Gradient of the terms' sum."""
    return torch.autograd.grad(terms.loss.sum(), log_prob)[0]


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (2.0, 1.2, -2.4, -2.4),  # in the band: -A r; d/d log_prob of it is -A r
        (2.0, 1.5, -2.6, 0.0),  # above, A > 0: max(-3, -2 * 1.3) = -2.6, no slope
        (2.0, 0.5, -1.0, -1.0),  # below, A > 0: max(-1, -2 * .9) = -1: still pushed up
        (-2.0, 1.5, 3.0, 3.0),  # above, A < 0: max(3, 2.6) = 3: still pushed down
        (-2.0, 0.5, 1.8, 0.0),  # below, A < 0: max(1, 2 * .9) = 1.8, no slope
        (-2.0, 0.95, 1.9, 1.9),  # in the band
        (3.0, 0.95, -2.85, -2.85),  # in the band
        (3.0, 1.25, -3.75, -3.75),  # in [.9, 1.3]; with the sides swapped ([.7, 1.1]) it would be -3.3
        (-3.0, 0.8, 2.7, 0.0),  # below .9: 3 * .9; with the sides swapped 2.4
        (0.0, 1.7, 0.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(advantage, ratio, loss, slope):
    log_prob = tensor(math.log(ratio) - 1.5).requires_grad_()
    terms = ppo_clip(log_prob, tensor(-1.5), tensor(advantage), **BAND)
    assert_close(terms.loss.detach(), tensor(loss))
    assert_close(slopes(terms, log_prob), tensor(slope))
    assert_close(terms.log_ratio.detach(), tensor(math.log(ratio)))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (-2.0, 1.5, 3.0, 3.0),  # above the band and A < 0, but below 1.6: -A r
        (-2.0, 1.7, 3.2, 0.0),  # above 1.6: 2 * 1.6, no slope
        (-2.0, 0.5, 1.8, 0.0),  # below the band: 2 * .9, no bound needed; with the ratio flipped it would be 3.2
        (2.0, 1.7, -2.6, 0.0),  # A > 0: as without
        (2.0, 0.5, -1.0, -1.0),
        (0.0, 1.7, 0.0, 0.0),
    ],
)
def test_dual_clip_by_hand(advantage, ratio, loss, slope):
    log_prob = tensor(math.log(ratio) - 1.5).requires_grad_()
    terms = ppo_clip(log_prob, tensor(-1.5), tensor(advantage), **BAND, dual_clip=1.6)
    assert_close(terms.loss.detach(), tensor(loss))
    assert_close(slopes(terms, log_prob), tensor(slope))
    # the weight comes on top of the bound
    weighed = ppo_clip(log_prob, tensor(-1.5), tensor(advantage), **BAND, dual_clip=1.6, weights=tensor(3.0))
    assert_close(weighed.loss.detach(), tensor(3 * loss))


def test_k3_by_hand():
    """d = log 2: 2 - 1 - log 2, slope 1 - 2; d = -log 4: 1/4 - 1 + log 4, slope 1 - 1/4; d = 0: none."""
    log_prob = tensor(-1.0, -1.0, -1.0, -1.0).requires_grad_()
    reference = tensor(math.log(2) - 1, -math.log(4) - 1, -1.0, math.nan).requires_grad_()
    kl = k3_kl(log_prob, reference, keep=torch.tensor([True, True, True, False]))
    assert_close(kl.detach(), tensor(1 - math.log(2), math.log(4) - 0.75, 0.0, 0.0))
    kl.sum().backward()
    assert_close(log_prob.grad, tensor(-1.0, 0.75, 0.0, 0.0))
    assert reference.grad is None


def test_k3_of_small_gaps_keeps_its_digits_in_float32():
    """d^2/2 at d = 1e-3: exp(d) - 1 - d in float32 would be off by a tenth."""
    kl = k3_kl(torch.zeros(1), torch.tensor([1e-3]))
    assert_close(kl, torch.tensor([5.0016671e-7]), rtol=1e-3, atol=0)


def test_reinforce_by_hand():
    # -A log_prob w: -(2)(-3)(.5) = 3, -(-1)(-2)(4) = -8, rejected; slopes -A w: -1, 4, 0
    log_prob = tensor(-3.0, -2.0, -5.0).requires_grad_()
    terms = reinforce(
        log_prob,
        tensor(-2.5, -2.25, -5.5),
        tensor(2.0, -1.0, 1.0),
        weights=tensor(0.5, 4.0, 9.0),
        keep=torch.tensor([True, True, False]),
    )
    assert_close(terms.loss.detach(), tensor(3.0, -8.0, 0.0))
    assert_close(slopes(terms, log_prob), tensor(-1.0, 4.0, 0.0))
    assert_close(terms.log_ratio, tensor(-0.5, 0.25, 0.0))
    assert not terms.log_ratio.requires_grad


def test_equal_policies_give_minus_the_advantage_and_the_slope_of_reinforce():
    old, advantages = draw(5, (6, 2)), draw(9, (6, 2))
    weights, keep = draw(6, (6, 2)).exp(), draw(7, (6, 2)) < 0.4
    log_prob = old.clone().requires_grad_()
    terms = ppo_clip(log_prob, old, advantages, **BAND)
    assert_close(terms.loss.detach(), -advantages, rtol=0, atol=0)
    given = {"weights": weights, "keep": keep}
    assert_close(
        slopes(ppo_clip(log_prob, old, advantages, **BAND, **given), log_prob),
        slopes(reinforce(log_prob, old, advantages, **given), log_prob),
    )


def test_exponents_of_kept_elements_stop_at_the_safety_bound():
    log_prob = tensor(1e4, -1e4, 19.0).requires_grad_()
    terms = ppo_clip(log_prob, torch.zeros(3, dtype=F64), tensor(-1.0, 1.0, -1.0), **BAND)
    # A < 0 above the band: -A r; A > 0 below it: -A r
    assert_close(terms.loss.detach(), tensor(math.exp(SAFETY_BOUND), -math.exp(-SAFETY_BOUND), math.exp(19.0)))
    assert_close(slopes(terms, log_prob), tensor(0.0, 0.0, math.exp(19.0)))


def test_a_nan_at_a_kept_element_is_not_hidden():
    values = tensor(math.nan, -1.0), tensor(-1.0, -1.0), tensor(1.0, 1.0)
    for terms in (ppo_clip(*values, **BAND), ppo_clip(*values, **BAND, dual_clip=1.5), reinforce(*values)):
        assert terms.loss.isnan().tolist() == [True, False]
