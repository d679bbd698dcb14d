"""Aggregation of token losses: each mode by hand, verl's formulas, and cuts."""

import pytest
import torch
from loss_cases import F64, verl_agg_loss
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionLossConfig
from flowgrpo_rc.loss.aggregation import AGGREGATIONS


def aggregate(loss, keep, mode, factor=None):
    return AGGREGATIONS[mode].loss_sum(loss, keep, factor)


def count(keep, mode):
    return AGGREGATIONS[mode].denominator(keep)


# Kept tokens 3, 1, 0 of T = 4: sums 6, 5, 0; token means 2, 5, none.
LOSS = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=F64)
KEEP = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("mode", "factor", "total", "denominator"),
    [
        ("token-mean", None, 11.0, 4),
        ("seq-mean-token-sum", None, 11.0, 2),  # the third sequence has nothing kept: it counts nowhere
        ("seq-mean-token-mean", None, 7.0, 2),
        ("seq-mean-token-sum-norm", None, 11.0 / 4, 2),  # T = 4
        ("seq-mean-token-sum-norm", 10.0, 1.1, 2),
        ("token-mean", 10.0, 11.0, 4),  # only the norm mode reads the factor
        ("seq-mean-token-sum", 10.0, 11.0, 2),
        ("seq-mean-token-mean", 10.0, 7.0, 2),
    ],
)
def test_by_hand(mode, factor, total, denominator):
    assert_close(aggregate(LOSS, KEEP, mode, factor), torch.tensor(total, dtype=F64))
    assert count(KEEP, mode) == denominator


def random_case(seed, b=9, t=6):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(b, t, generator=generator) < 0.5
    keep[b // 2] = False
    return torch.randn(b, t, generator=generator, dtype=F64), keep


@pytest.mark.parametrize("factor", [None, 17.0])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_equals_verls_formula(mode, factor):
    for seed in range(5):
        loss, keep = random_case(seed)
        ours = aggregate(torch.where(keep, loss, 0.0), keep, mode, factor) / count(keep, mode)
        assert_close(ours, verl_agg_loss(loss, keep.to(F64), mode, factor))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_cuts_between_sequences_add_up(mode):
    loss, keep = random_case(7)
    loss = torch.where(keep, loss, 0.0)
    for sizes in ([1] * 9, [4, 5], [2, 7]):
        parts = list(zip(loss.split(sizes), keep.split(sizes), strict=True))
        assert_close(sum(aggregate(*part, mode) for part in parts), aggregate(loss, keep, mode))
        assert sum(count(part, mode) for _, part in parts) == count(keep, mode)


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_agg_mode": "mean"}, "diffusion_loss.loss_agg_mode: got 'mean'; choose one of token-mean, "),
        ({"loss_scale_factor": 0.0}, "diffusion_loss.loss_scale_factor: got 0.0; give a number above 0 or null"),
        ({"clip_ratio_c": 1.0}, "diffusion_loss.clip_ratio_c: got 1.0; give a number above 1 or null"),
        ({"clip_ratio_c": 0.5}, "diffusion_loss.clip_ratio_c: got 0.5; give a number above 1"),
        ({"clip_ratio_c": float("nan")}, "diffusion_loss.clip_ratio_c: got nan; give a number above"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        DiffusionLossConfig(**options)


def test_defaults_are_verls():
    options = DiffusionLossConfig()
    assert (options.loss_agg_mode, options.loss_scale_factor, options.clip_ratio_c) == ("token-mean", None, 3.0)
    for mode in AGGREGATIONS:
        assert aggregate(LOSS, KEEP, DiffusionLossConfig(loss_agg_mode=mode).loss_agg_mode) > 0
