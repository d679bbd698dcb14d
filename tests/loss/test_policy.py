"""Policy-gradient terms: hand-worked tables, a slow float64 loop, gradients, and what rejected elements may hold."""

import math
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from flowgrpo_rc.loss import ppo_clip, reinforce
from flowgrpo_rc.loss.policy import SAFETY_BOUND, k3_kl
from flowgrpo_rc.sde import transition_kl

F64 = torch.float64
BAND = {"clip_low": 0.1, "clip_high": 0.3}  # ratios in [.9, 1.3]: a swapped or flipped band is another one


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def draw(seed, shape, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def random_terms(seed, shape):
    """`log_prob, old_log_prob, advantages, weights, keep`: half of the ratios outside the band, a third rejected."""
    old = draw(seed, shape)
    weights = draw(seed + 1, shape).exp()
    keep = draw(seed + 2, shape) < 0.4
    return old + draw(seed + 3, shape, 0.3), old, draw(seed + 4, shape), weights, keep


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


def test_dual_clip_is_a_minimum_at_negative_advantages():
    log_prob, old, advantages, _, _ = random_terms(13, (200,))
    plain = ppo_clip(log_prob, old, advantages, **BAND).loss
    dual = ppo_clip(log_prob, old, advantages, **BAND, dual_clip=1.4).loss
    assert_close(dual, torch.where(advantages < 0, torch.minimum(plain, -1.4 * advantages), plain))
    assert 0 < (dual < plain).sum() < 100
    assert_close(ppo_clip(log_prob, old, advantages, **BAND, dual_clip=1e9).loss, plain, rtol=0, atol=0)


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


def test_ppo_clip_weights_and_rejection_by_hand():
    # ratios 1.2, 1.5, .5, 1.2 with A = 2, 2, -2, 2: -2.4, -2.6, 1.8, -2.4; times 0.5, 3, 2, (rejected)
    log_prob = torch.log(tensor(1.2, 1.5, 0.5, 1.2)).requires_grad_()
    terms = ppo_clip(
        log_prob,
        torch.zeros(4, dtype=F64),
        tensor(2.0, 2.0, -2.0, 2.0),
        **BAND,
        weights=tensor(0.5, 3.0, 2.0, 7.0),
        keep=torch.tensor([True, True, True, False]),
    )
    assert_close(terms.loss.detach(), tensor(-1.2, -7.8, 3.6, 0.0))
    assert_close(slopes(terms, log_prob), tensor(-1.2, 0.0, 0.0, 0.0))
    assert_close(terms.log_ratio.detach(), torch.log(tensor(1.2, 1.5, 0.5, 1.0)))


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


def test_transition_kl_by_hand():
    # step 0: differences 1, 3 -> mean square (1 + 9)/2 = 5, over 2 * .5^2 = .5 -> 10
    # step 1: differences 0, -2 -> (0 + 4)/2 = 2, over 2 * 2^2 = 8 -> .25
    mean = tensor([2.0, 5.0], [1.0, -1.0])[None].requires_grad_()
    reference = tensor([1.0, 2.0], [1.0, 1.0])[None]
    kl = transition_kl(mean, reference, tensor(0.5, 2.0)[None])
    assert_close(kl.detach(), tensor(10.0, 0.25)[None])
    # slope: difference / (dims * std^2): 1/(2 * .25) = 2, 3/.5 = 6; 0, -2/(2 * 4) = -.25
    kl.sum().backward()
    assert_close(mean.grad, tensor([2.0, 6.0], [0.0, -0.25])[None])


# ---------------------------------------------------------------- against a loop


def loop_ppo_clip(log_prob, old, advantages, weights, keep, clip_low, clip_high):
    """Losses and slopes, one float at a time."""
    losses, gradient = torch.zeros_like(old), torch.zeros_like(old)
    for at in product(*map(range, old.shape)):
        if keep is not None and not keep[at]:
            continue
        ratio, advantage = math.exp(float(log_prob[at]) - float(old[at])), float(advantages[at])
        weight = 1.0 if weights is None else float(weights[at])
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 1 - clip_low), 1 + clip_high)
        losses[at] = weight * max(plain, clipped)
        gradient[at] = weight * plain if plain >= clipped else 0.0
    return losses, gradient


def loop_reinforce(log_prob, advantages, weights, keep):
    losses, gradient = torch.zeros_like(advantages), torch.zeros_like(advantages)
    for at in product(*map(range, advantages.shape)):
        if keep is None or keep[at]:
            weight = 1.0 if weights is None else float(weights[at])
            losses[at] = -float(advantages[at]) * float(log_prob[at]) * weight
            gradient[at] = -float(advantages[at]) * weight
    return losses, gradient


@pytest.mark.parametrize("with_keep", [True, False])
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("shape", [(40,), (20, 3)])
def test_objectives_equal_the_loop(shape, with_weights, with_keep):
    log_prob, old, advantages, weights, keep = random_terms(10, shape)
    given = {"weights": weights if with_weights else None, "keep": keep if with_keep else None}
    expected = loop_ppo_clip(log_prob, old, advantages, *given.values(), **BAND)
    variable = log_prob.clone().requires_grad_()
    terms = ppo_clip(variable, old, advantages, **BAND, **given)
    assert_close((terms.loss.detach(), slopes(terms, variable)), expected)
    assert 0.1 < expected[1].eq(0).double().mean() < 0.9
    terms = reinforce(variable, old, advantages, **given)
    assert_close((terms.loss.detach(), slopes(terms, variable)), loop_reinforce(log_prob, advantages, *given.values()))


@pytest.mark.parametrize("latent", [(5,), (2, 3, 2)])
def test_transition_kl_equals_the_loop(latent):
    mean, reference, std = draw(1, (3, 2, *latent)), draw(2, (3, 2, *latent)), draw(3, (3, 2)).exp()
    expected, gradient = torch.zeros(3, 2, dtype=F64), torch.zeros_like(mean)
    dims = math.prod(latent)
    for i, j in product(range(3), range(2)):
        variance = float(std[i, j]) ** 2
        for at in product(*map(range, latent)):
            gap = float(mean[(i, j, *at)] - reference[(i, j, *at)])
            expected[i, j] += gap * gap / dims / (2 * variance)
            gradient[(i, j, *at)] = gap / (dims * variance)
    mean.requires_grad_()
    kl = transition_kl(mean, reference, std)
    assert_close(kl.detach(), expected)
    assert_close(torch.autograd.grad(kl.sum(), mean)[0], gradient)
    assert_close(transition_kl(mean, mean, std).detach(), torch.zeros(3, 2, dtype=F64), rtol=0, atol=0)


# ---------------------------------------------------------------- gradients


def test_smooth_parts_pass_gradcheck():
    old, advantages, weights = draw(0, (4, 3)), draw(1, (4, 3)), draw(2, (4, 3)).exp()
    # ratios exp(+-.02) lie inside the band, exp(+-1) far outside: no kink within a finite difference
    shifts = torch.tensor([0.02, -0.02, 1.0, -1.0], dtype=F64)[:, None]
    keep = draw(3, (4, 3)) < 0.5
    new = (old + shifts).requires_grad_()
    for kept in (None, keep):
        assert torch.autograd.gradcheck(
            lambda x, k=kept: ppo_clip(x, old, advantages, **BAND, weights=weights, keep=k).loss, new
        )
        assert torch.autograd.gradcheck(
            lambda x, k=kept: reinforce(x, old, advantages, weights=weights, keep=k).loss, new
        )
    reference, std = draw(4, (2, 2, 3)), draw(5, (2, 2)).exp()
    assert torch.autograd.gradcheck(lambda x: transition_kl(x, reference, std), draw(6, (2, 2, 3)).requires_grad_())


def test_constants_get_no_gradient_and_nothing_changes():
    log_prob, old, advantages, weights, keep = random_terms(3, (5, 2))
    before = [t.clone() for t in (log_prob, old, advantages, weights, keep)]
    for constant in (log_prob, old, advantages, weights):
        constant.requires_grad_()
    for terms in (
        ppo_clip(log_prob, old, advantages, **BAND, weights=weights, keep=keep),
        reinforce(log_prob, old, advantages, weights=weights, keep=keep),
    ):
        terms.loss.sum().backward()
    assert log_prob.grad is not None
    assert [t.grad for t in (old, advantages, weights)] == [None, None, None]
    assert all(torch.equal(t, b) for t, b in zip((log_prob, old, advantages, weights, keep), before, strict=True))


# ---------------------------------------------------------------- identities


def test_equal_policies_give_minus_the_advantage_and_the_slope_of_reinforce():
    _, old, advantages, weights, keep = random_terms(5, (6, 2))
    log_prob = old.clone().requires_grad_()
    terms = ppo_clip(log_prob, old, advantages, **BAND)
    assert_close(terms.loss.detach(), -advantages, rtol=0, atol=0)
    given = {"weights": weights, "keep": keep}
    assert_close(
        slopes(ppo_clip(log_prob, old, advantages, **BAND, **given), log_prob),
        slopes(reinforce(log_prob, old, advantages, **given), log_prob),
    )


def test_a_wide_band_never_clips():
    log_prob, old, advantages, _, _ = random_terms(6, (8,))
    assert_close(
        ppo_clip(log_prob, old, advantages, clip_low=1.0, clip_high=1e9).loss, -advantages * (log_prob - old).exp()
    )


def test_old_log_prob_does_not_enter_reinforce():
    log_prob, old, advantages, weights, _ = random_terms(7, (8,))
    loss = reinforce(log_prob, old, advantages, weights=weights).loss
    assert_close(reinforce(log_prob, old + 3.0, advantages, weights=weights).loss, loss, rtol=0, atol=0)


def test_weights_of_one_and_a_mask_of_ones_are_none():
    log_prob, old, advantages, weights, _ = random_terms(8, (8,))
    ones = {"weights": torch.ones_like(weights), "keep": torch.ones(8, dtype=torch.bool)}
    bare = ppo_clip(log_prob, old, advantages, **BAND)
    assert_close(tuple(ppo_clip(log_prob, old, advantages, **BAND, **ones)), tuple(bare), rtol=0, atol=0)
    bare = reinforce(log_prob, old, advantages)
    assert_close(tuple(reinforce(log_prob, old, advantages, **ones)), tuple(bare), rtol=0, atol=0)


def test_rejected_equals_removed():
    log_prob, old, advantages, weights, keep = random_terms(9, (30,))
    rejected = ppo_clip(log_prob, old, advantages, **BAND, weights=weights, keep=keep).loss
    removed = ppo_clip(log_prob[keep], old[keep], advantages[keep], **BAND, weights=weights[keep]).loss
    assert_close(rejected[keep], removed, rtol=0, atol=0)
    assert rejected[~keep].eq(0).all()


# ---------------------------------------------------------------- extremes

OBJECTIVES = {
    "ppo_clip": lambda *args, **given: ppo_clip(*args, **BAND, **given),
    "dual clip": lambda *args, **given: ppo_clip(*args, **BAND, dual_clip=1.5, **given),
    "reinforce": reinforce,
}


@pytest.mark.parametrize("value", [1e4, -1e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["log_prob", "old_log_prob", "advantages", "weights"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_at_a_rejected_element_reaches_loss_or_gradient(objective, where, value):
    """Selection comes before the exponential and before the product: 0 times an overflow is NaN."""
    names = ("log_prob", "old_log_prob", "advantages", "weights")
    given = dict(zip(names, (t.clone() for t in random_terms(11, (4,))[:4]), strict=True))
    keep = torch.tensor([True, False, True, True])
    call = OBJECTIVES[objective]

    def run(values):
        log_prob = values["log_prob"].clone().requires_grad_()
        with torch.autograd.set_detect_anomaly(True):
            terms = call(log_prob, values["old_log_prob"], values["advantages"], weights=values["weights"], keep=keep)
            return terms.loss.detach(), slopes(terms, log_prob), terms.log_ratio.detach()

    expected = run(given)
    given[where][1] = value
    poisoned = run(given)
    assert_close(poisoned, expected, rtol=0, atol=0)
    assert [part[1].item() for part in poisoned] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_everything_rejected_gives_exact_zeros(dtype):
    log_prob, old, advantages, weights, _ = (t.to(dtype) for t in random_terms(12, (3, 2)))
    keep = torch.zeros(3, 2, dtype=torch.bool)
    for call in OBJECTIVES.values():
        log_prob = log_prob.detach().requires_grad_()
        terms = call(log_prob, old, advantages, weights=weights, keep=keep)
        zeros = torch.zeros(3, 2, dtype=dtype)
        assert_close(
            (terms.loss.detach(), slopes(terms, log_prob), terms.log_ratio.detach()), (zeros,) * 3, rtol=0, atol=0
        )


def test_exponents_of_kept_elements_stop_at_the_safety_bound():
    log_prob = tensor(1e4, -1e4, 19.0).requires_grad_()
    terms = ppo_clip(log_prob, torch.zeros(3, dtype=F64), tensor(-1.0, 1.0, -1.0), **BAND)
    # A < 0 above the band: -A r; A > 0 below it: -A r
    assert_close(terms.loss.detach(), tensor(math.exp(SAFETY_BOUND), -math.exp(-SAFETY_BOUND), math.exp(19.0)))
    assert_close(slopes(terms, log_prob), tensor(0.0, 0.0, math.exp(19.0)))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_nan_at_a_kept_element_is_not_hidden(objective):
    log_prob = tensor(math.nan, -1.0)
    terms = OBJECTIVES[objective](log_prob, tensor(-1.0, -1.0), tensor(1.0, 1.0), keep=torch.tensor([True, True]))
    assert terms.loss.isnan().tolist() == [True, False]
