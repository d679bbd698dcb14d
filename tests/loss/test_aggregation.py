"""Aggregation of token losses: each mode by hand. Against verl's formulas, and over cuts: `test_token_path`."""

import pytest
import torch
from loss_cases import F64
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionLossConfig
from flowgrpo_rc.loss.aggregation import AGGREGATIONS

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
    assert_close(AGGREGATIONS[mode].loss_sum(LOSS, KEEP, factor), torch.tensor(total, dtype=F64))
    assert AGGREGATIONS[mode].denominator(KEEP) == denominator


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_agg_mode": "mean"}, "diffusion_loss.loss_agg_mode: got 'mean'; choose one of token-mean, "),
        ({"loss_scale_factor": 0.0}, "diffusion_loss.loss_scale_factor: got 0.0; give a number above 0 or null"),
        ({"clip_ratio_c": 1.0}, "diffusion_loss.clip_ratio_c: got 1.0; give a number above 1 or null"),
        ({"clip_ratio_c": float("nan")}, "diffusion_loss.clip_ratio_c: got nan; give a number above"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        DiffusionLossConfig(**options)
