"""Loss metrics by hand. Merged over micro-batches and processes: `test_diffusion_loss` and `test_token_path`."""

import math

import pytest
import torch
from loss_cases import F64, tensor
from torch.testing import assert_close

from flowgrpo_rc.loss import LossMetrics
from flowgrpo_rc.loss.policy import PolicyInputs, PolicyLimits, PolicyTerms

BAND = {"clip_low": 0.1, "clip_high": 0.3}


def metrics_of(
    log_ratio,
    advantages,
    keep=None,
    loss_sum=1.0,
    denominator=None,
    kl_sum=0.0,
    valid=None,
    weights=None,
    needs_advantage=True,
    **limits,
):
    return LossMetrics.of(
        PolicyInputs(log_ratio, torch.zeros_like(log_ratio), advantages, weights=weights, keep=keep),
        PolicyTerms(torch.zeros_like(log_ratio), log_ratio),
        PolicyLimits(**{**BAND, **limits}),
        loss_sum=tensor(loss_sum)[0],
        denominator=tensor(log_ratio.numel() if denominator is None else denominator)[0],
        kl_sum=tensor(kl_sum)[0],
        valid=valid,
        needs_advantage=needs_advantage,
    )


def random_case(seed=0, shape=(40, 3), dtype=F64):
    """`log_ratio, advantages, keep`; the log ratio is 0 where nothing is kept, as the objectives leave it."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio, advantages, uniform = (torch.randn(shape, generator=generator, dtype=F64) for _ in range(3))
    keep = uniform < 0.5
    return torch.where(keep, 0.3 * log_ratio, 0.0).to(dtype), advantages.to(dtype), keep


def test_by_hand():
    """Ratios 1.5, 1.5, 1.5, .5, and a rejected one counting as 1; advantages 1, 1, -1, -1, 1; band [.9, 1.3].

    higher: three of five, of which A > 0 makes two inert; lower: one, inert since A < 0.
    """
    log_ratio = torch.log(tensor(1.5, 1.5, 1.5, 0.5, 1.0))
    keep = torch.tensor([True, True, True, True, False])
    metrics = metrics_of(log_ratio, tensor(1.0, 1.0, -1.0, -1.0, 1.0), keep, -6.0, 4, kl_sum=2.0).compute()
    expected = {
        "actor/pg_loss": -1.5,
        "actor/kept_fraction": 0.8,
        "actor/ppo_kl": -(3 * math.log(1.5) - math.log(2)) / 5,
        "actor/pg_clipfrac": 0.8,
        "actor/pg_clipfrac_higher": 0.6,
        "actor/pg_clipfrac_lower": 0.2,
        "actor/pg_clipfrac_inert": 0.6,
        "actor/log_ratio_abs_mean": (3 * math.log(1.5) + math.log(2)) / 5,
        "actor/ratio_mean": (3 * 1.5 + 0.5 + 1.0) / 5,
        "actor/ratio_min": 0.5,
        "actor/ratio_max": 1.5,
        "actor/kl_loss": 0.5,
    }
    assert metrics == pytest.approx(expected)
    assert list(metrics) == list(expected)


def test_steps_that_teach():
    """Inert above the band and below it, rejected, of weight 0, outside and moving back, inside: two of six."""
    log_ratio = torch.log(tensor(1.5, 0.5, 1.0, 1.0, 1.5, 1.1))
    advantages = tensor(1.0, -1.0, 1.0, 1.0, -1.0, 1.0)
    keep = torch.tensor([True, True, False, True, True, True])
    weights = tensor(1.0, 1.0, 0.0, 0.0, 0.5, 2.0)
    found = metrics_of(log_ratio, advantages, keep, weights=weights)
    assert found.teaching_fraction == pytest.approx(2 / 6)
    # Two more were rejected before they were computed; of idle ones no mean takes notice.
    assert found.with_left_out(2, 5, counts_rejected=True).teaching_fraction == pytest.approx(2 / 8)
    assert metrics_of(log_ratio, advantages, keep).teaching_fraction == pytest.approx(3 / 6)


def test_an_advantage_of_0_teaches_where_something_else_does():
    """A KL, or an objective on clean images."""
    none = tensor(0.0, 0.0, 1.0)
    assert metrics_of(0 * none, none).teaching_fraction == pytest.approx(1 / 3)
    assert metrics_of(0 * none, none, needs_advantage=False).teaching_fraction == 1


def test_the_extremes_are_those_of_valid_elements():
    """Ratios 1.5 and 1.2: padding, as ratio 1, is not the smallest."""
    valid = torch.tensor([True, True, False])
    metrics = metrics_of(torch.log(tensor(1.5, 1.2, 1.0)), tensor(1.0, 1.0, 1.0), valid, valid=valid).compute()
    assert (metrics["actor/ratio_min"], metrics["actor/ratio_max"]) == pytest.approx((1.2, 1.5))


def test_a_ratio_on_the_edge_of_the_band_is_inside():
    log_ratio = tensor(-0.4, 0.3)
    low, high = (log_ratio.exp() - 1).abs().tolist()  # exact, and so is 1 -+ it
    metrics = metrics_of(log_ratio, tensor(-1.0, 1.0), clip_low=low, clip_high=high).compute()
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_inert"] == 0.0
    metrics = metrics_of(log_ratio, tensor(-1.0, 1.0), clip_low=low - 1e-9, clip_high=high - 1e-9).compute()
    assert metrics["actor/pg_clipfrac_lower"] == metrics["actor/pg_clipfrac_higher"] == 0.5


def test_carries_no_gradient_and_changes_nothing():
    log_ratio, advantages, keep = random_case(3)
    before = log_ratio.clone()
    metrics = metrics_of(log_ratio.requires_grad_(), advantages, keep)
    assert not any(t.requires_grad for t in (metrics.sums, metrics.extremes))
    assert metrics.sums.dtype == F64
    assert_close(log_ratio.detach(), before, rtol=0, atol=0)
