"""Batch normalisation: the mean weight is as exact for small weights as for weights near 1."""

import math

import pytest
import reference
import torch

from flowgrpo_rc.correction import compute_rollout_correction_and_rejection_mask

LEVELS = ("token", "sequence", "geometric")
FACTOR = "rollout_corr/rollout_is_batch_norm_factor"
# float32's unit in the last place, the exponential's two of them, and some for sums over a row
FLOAT32 = 2e-6


def _normalised(l, level, mask=None, **options):  # noqa: E741
    return compute_rollout_correction_and_rejection_mask(
        l,
        torch.zeros_like(l),
        mask,
        rollout_is=level,
        rollout_is_batch_normalize=True,
        **{"rollout_is_threshold": 1e6, **options},
    )


def _oracle(l, level, mask, upper=1e6):  # noqa: E741
    """The mean weight, in float64 loops."""
    ratios = reference.log_ratios(l, torch.zeros_like(l))
    return reference.importance(ratios, mask.tolist(), level, "truncate", 0.0, upper, True).factor


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(8, 1), (8, 2), (4, 100), (2, 5000)])
@pytest.mark.parametrize("l", [-13.8, -17.9, -6.9, -2.0, -0.7, -0.69, -1e-4, 0.0, 1e-4, 0.4, 5.0])
def test_equal_weights_become_one(l, shape, level):  # noqa: E741
    log_ratio = torch.full(shape, l / shape[1] if level == "sequence" else l)
    result = _normalised(log_ratio, level)
    torch.testing.assert_close(result.weights, torch.ones(shape), rtol=10 * FLOAT32, atol=0)
    expected = _oracle(log_ratio, level, torch.ones(shape, dtype=torch.bool))
    assert result.metrics[FACTOR] == pytest.approx(expected, rel=10 * FLOAT32, abs=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("centre", [-14.0, -8.0, -3.0, -0.7, 0.0, 1.0])
def test_mixed_weights_against_loops(centre, dtype, masked, level):
    g = torch.Generator().manual_seed(3)
    l = centre / (6 if level == "sequence" else 1) + 0.5 * torch.randn(40, 6, generator=g, dtype=torch.float64)  # noqa: E741
    l = l.to(dtype)  # noqa: E741
    mask = torch.rand(40, 6, generator=g) < 0.7 if masked else torch.ones(40, 6, dtype=torch.bool)
    result = _normalised(l, level, mask, rollout_is_threshold=2.0)
    expected = _oracle(l, level, mask, upper=2.0)
    relative = 5 * FLOAT32 if dtype is torch.float32 else 1e-12
    assert result.metrics[FACTOR] == pytest.approx(expected, rel=relative, abs=0)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_all_but_vanish_are_left_alone(level):
    l = torch.full((4, 2), -30.0)  # noqa: E741
    result = _normalised(l, level)
    assert result.metrics[FACTOR] == 1.0
    torch.testing.assert_close(result.weights, torch.full((4, 2), math.exp(-20.0)), rtol=FLOAT32, atol=0)
