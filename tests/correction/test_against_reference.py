"""Every level, mode and criterion against slow float64 loops, with bounds that tell a ratio from its inverse."""

import math

import pytest
import loops as reference
import torch
from cases import SHAPES, batch

from flowgrpo_rc.correction import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from flowgrpo_rc.correction.thresholds import RS_OPTIONS

PREFIX = "rollout_corr/"
MODES = [("truncate", 1.4), ("truncate", 0.9), ("zero", "0.8_1.5"), ("clip", "0.8_1.5"), ("mask", "0.8_1.5")]
BANDS = ["0.6_1.4", "0.9_1.3", "0.97_2.0", "1.05_1.5", "0_1.2", "1.3"]


def same(actual, expected, *, rel=1e-9, absolute=1e-9):
    for name, value in expected.items():
        got = actual[PREFIX + name]
        assert math.isclose(got, value, rel_tol=rel, abs_tol=absolute), f"{name}: {got}, reference {value}"


def bounds_of(mode, threshold):
    if isinstance(threshold, str):
        lower, upper = (float(part) for part in threshold.split("_"))
        return lower, upper, lower
    return 0.0, threshold, 1.0 / threshold


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "threshold"), MODES)
def test_weights(shape, level, mode, threshold):
    p, q, mask = batch(hash((shape, level, mode)) % 1000, *shape)
    lower, upper, reported = bounds_of(mode, threshold)
    result = compute_rollout_correction_weights(
        p, q, mask, rollout_is=level, rollout_is_threshold=threshold, rollout_is_mode=mode
    )
    expected = reference.weights(p, q, mask, level, mode, lower, upper)
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    same(result.metrics, reference.importance(p, q, mask, level, mode, lower, upper, reported), absolute=1e-7)
    if mode != "mask":
        assert torch.equal(result.mask, mask)
        return
    raw = torch.tensor(expected)
    assert torch.equal(result.mask, mask * ((raw >= lower) & (raw <= upper)))


def thresholds_for(option):
    return BANDS if option.endswith("k1") else ["0.02", "0.15", "1.5"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", RS_OPTIONS)
def test_criteria(shape, option):
    for threshold in thresholds_for(option):
        p, q, mask = batch(hash((shape, option, threshold)) % 1000, *shape, spread=0.2, shift=-0.05)
        lower, upper, _ = bounds_of(None, threshold if "_" in threshold else float(threshold))
        if threshold == "1.3":
            lower = 1.0 / 1.3
        result = compute_rollout_rejection_mask(p, q, mask, rollout_rs=option, rollout_rs_threshold=threshold)
        keep = torch.tensor(reference.criterion_keep(p, q, mask, option, lower, upper))
        assert torch.equal(result.mask, mask * keep), threshold
        same(result.metrics, reference.criterion(p, q, mask, option, lower, upper), absolute=1e-7)
        assert result.weights is None


@pytest.mark.parametrize("shape", SHAPES)
def test_criteria_chain_and_veto(shape):
    p, q, mask = batch(5, *shape, spread=0.6)
    result = compute_rollout_correction_and_rejection_mask(
        p,
        q,
        mask,
        rollout_rs="token_k1,seq_max_k3,token_k2",
        rollout_rs_threshold="0.5_1.6,0.6,0.2",
        rollout_token_veto_threshold=0.3,
    )
    keep = torch.ones_like(mask)
    for option, lower, upper in (("token_k1", 0.5, 1.6), ("seq_max_k3", 0, 0.6), ("token_k2", 0, 0.2)):
        keep *= torch.tensor(reference.criterion_keep(p, q, mask, option, lower, upper))
    vetoed = torch.tensor(reference.veto_keep(p, q, mask, 0.3))
    assert torch.equal(result.mask, mask * keep * vetoed)
    kept, n = result.mask.sum().item(), mask.sum().item()
    rows = mask.sum(1) > 0
    touched = (result.mask.sum(1) < mask.sum(1))[rows].double().mean().item()
    same(
        result.metrics,
        {
            "rollout_rs_masked_fraction": 1 - kept / n,
            "rollout_rs_seq_masked_fraction": touched,
            "rollout_is_veto_fraction": 1 - (vetoed.sum(1) > 0)[rows].double().mean().item(),
            "rollout_is_catastrophic_token_fraction": ((p - q < math.log(0.3)) * mask).sum().item() / n,
        },
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_offpolicy(shape):
    p, q, mask = batch(8, *shape)
    same(compute_offpolicy_metrics(p, q, mask), reference.offpolicy(p, q, mask))


@pytest.mark.parametrize("shape", [(600, 64), (40, 2000), (70000, 1)])
def test_many_blocks_equal_the_reference(shape):
    """Beyond one block of rows; the reference as a vectorised float64 formula."""
    p, q, mask = batch(3, *shape)
    result = compute_rollout_correction_and_rejection_mask(
        p,
        q,
        mask,
        rollout_is="token",
        rollout_is_threshold="0.8_1.5",
        rollout_rs="token_k1",
        rollout_rs_threshold="0.6_1.4",
    )
    ratio = (p - q).exp()
    expected = ratio * mask * (ratio >= 0.8) * (ratio <= 1.5)
    torch.testing.assert_close(result.weights, expected, rtol=1e-12, atol=0)
    assert torch.equal(result.mask, mask * (ratio >= 0.6) * (ratio <= 1.4))
    assert result.metrics[PREFIX + "rollout_is_mean"] == pytest.approx((expected.sum() / mask.sum()).item())
    assert result.metrics[PREFIX + "kl"] == pytest.approx((((q - p) * mask).sum() / mask.sum()).item())
