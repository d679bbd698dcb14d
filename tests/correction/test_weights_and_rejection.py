"""Weights and masks against tables worked by hand; against loops: `test_metrics`."""

import math

import pytest
import reference
import torch

from flowgrpo_rc.correction import (
    SAFETY_BOUND,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

LEVELS = ("token", "sequence", "geometric")


def _ratios(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs whose train/rollout ratios are `rows`."""
    log_ratio = torch.tensor(rows, dtype=torch.float64).log()
    rollout = torch.full_like(log_ratio, -1.5)
    return rollout + log_ratio, rollout


# Tables worked by hand. Ratios train/rollout:
#   row 0: 2.0  0.25  3.0 (masked)   product 0.5,  geometric mean sqrt(0.5) = 0.7071
#   row 1: 4.0  1.0   2.0            product 8.0,  geometric mean 2.0
RATIOS = [[2.0, 0.25, 3.0], [4.0, 1.0, 2.0]]
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("level", "mode", "threshold", "expected", "keep"),
    [
        ("token", "truncate", 1.5, [[1.5, 0.25, 0], [1.5, 1.0, 1.5]], [[1, 1, 0], [1, 1, 1]]),
        ("token", "zero", "0.5_2.5", [[2.0, 0, 0], [0, 1.0, 2.0]], [[1, 1, 0], [1, 1, 1]]),
        ("token", "clip", "0.5_2.5", [[2.0, 0.5, 0], [2.5, 1.0, 2.0]], [[1, 1, 0], [1, 1, 1]]),
        ("token", "mask", "0.5_2.5", [[2.0, 0.25, 0], [4.0, 1.0, 2.0]], [[1, 0, 0], [0, 1, 1]]),
        ("sequence", "truncate", 3.0, [[0.5, 0.5, 0], [3.0, 3.0, 3.0]], [[1, 1, 0], [1, 1, 1]]),
        ("sequence", "zero", "0.4_3.0", [[0.5, 0.5, 0], [0, 0, 0]], [[1, 1, 0], [1, 1, 1]]),
        ("sequence", "zero", "0.6_9.0", [[0, 0, 0], [8.0, 8.0, 8.0]], [[1, 1, 0], [1, 1, 1]]),
        ("sequence", "clip", "0.6_3.0", [[0.6, 0.6, 0], [3.0, 3.0, 3.0]], [[1, 1, 0], [1, 1, 1]]),
        ("sequence", "mask", "0.4_3.0", [[0.5, 0.5, 0], [8.0, 8.0, 8.0]], [[1, 1, 0], [0, 0, 0]]),
        ("geometric", "truncate", 1.8, [[math.sqrt(0.5)] * 2 + [0], [1.8] * 3], [[1, 1, 0], [1, 1, 1]]),
        ("geometric", "mask", "0.8_2.1", [[math.sqrt(0.5)] * 2 + [0], [2.0] * 3], [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_weights_of_the_table(level, mode, threshold, expected, keep):
    result = compute_rollout_correction_weights(
        *_ratios(RATIOS), MASK, rollout_is=level, rollout_is_threshold=threshold, rollout_is_mode=mode
    )
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(result.mask, torch.tensor(keep))


@pytest.mark.parametrize(
    ("level", "factor"),
    [
        # truncated at 1.5: (1.5 + 0.25 + 1.5 + 1 + 1.5) / 5 elements
        ("token", 5.75 / 5),
        # rows 0.5 and 1.5: (0.5 + 1.5) / 2 rows, although row 1 has more elements
        ("sequence", 1.0),
        # rows sqrt(0.5) and 1.5
        ("geometric", (math.sqrt(0.5) + 1.5) / 2),
    ],
)
def test_batch_normalisation_of_the_table(level, factor):
    p, q = _ratios(RATIOS)
    plain = compute_rollout_correction_weights(p, q, MASK, rollout_is=level, rollout_is_threshold=1.5)
    result = compute_rollout_correction_weights(
        p, q, MASK, rollout_is=level, rollout_is_threshold=1.5, rollout_is_batch_normalize=True
    )
    assert result.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor, rel=1e-12)
    assert plain.weights is not None
    torch.testing.assert_close(result.weights, plain.weights / factor)


@pytest.mark.parametrize(
    ("option", "threshold", "keep"),
    [
        # The band is on the ratio r: 0.25 is below 0.3, 4.0 above 3.5. Flipped ratios (4, 0.25, 1, 0.5 of
        # 0.5, 4, 0.25, 1, 0.5) would keep other elements.
        ("token_k1", "0.3_3.5", [[1, 0, 0], [0, 1, 1]]),
        ("token_k1", "0.9_5.0", [[1, 0, 0], [1, 1, 1]]),
        ("token_k1", "0_2.5", [[1, 1, 0], [0, 1, 1]]),
        # a lone u means [1/u, u] = [0.4, 2.5]
        ("token_k1", 2.5, [[1, 0, 0], [0, 1, 1]]),
        ("token_k1", "2.5", [[1, 0, 0], [0, 1, 1]]),
        # k2 = l^2/2: log 2 -> 0.2402, log 4 -> 0.9609
        ("token_k2", 0.25, [[1, 0, 0], [0, 1, 1]]),
        # k3 = r - 1 - log r: 2 -> 0.3069, 0.25 -> 0.6363, 4 -> 1.6137, 1 -> 0
        ("token_k3", 0.7, [[1, 1, 0], [0, 1, 1]]),
        # products 0.5 and 8
        ("seq_sum_k1", "0.4_3.0", [[1, 1, 0], [0, 0, 0]]),
        ("seq_sum_k1", "0.6_9.0", [[0, 0, 0], [1, 1, 1]]),
        # row 0: 0.2402 + 0.9609 = 1.2011; row 1: 0.9609 + 0 + 0.2402 = 1.2011
        ("seq_sum_k2", 1.21, [[1, 1, 0], [1, 1, 1]]),
        ("seq_sum_k2", 1.19, [[0, 0, 0], [0, 0, 0]]),
        # row 0: 0.3069 + 0.6363 = 0.9432; row 1: 1.6137 + 0 + 0.3069 = 1.9206
        ("seq_sum_k3", 1.0, [[1, 1, 0], [0, 0, 0]]),
        # geometric means 0.7071 and 2
        ("seq_mean_k1", "0.9_2.5", [[0, 0, 0], [1, 1, 1]]),
        ("seq_mean_k1", "0.6_1.5", [[1, 1, 0], [0, 0, 0]]),
        # 1.2011 / 2 = 0.6005 and 1.2011 / 3 = 0.4004
        ("seq_mean_k2", 0.5, [[0, 0, 0], [1, 1, 1]]),
        # 0.9432 / 2 = 0.4716 and 1.9206 / 3 = 0.6402
        ("seq_mean_k3", 0.5, [[1, 1, 0], [0, 0, 0]]),
        # 0.9609 in both rows
        ("seq_max_k2", 0.95, [[0, 0, 0], [0, 0, 0]]),
        ("seq_max_k2", 0.97, [[1, 1, 0], [1, 1, 1]]),
        # 0.6363 and 1.6137
        ("seq_max_k3", 1.0, [[1, 1, 0], [0, 0, 0]]),
        # all must pass, each with its own threshold
        ("token_k1,seq_sum_k1", "0.3_5.0,0.4_9.0", [[1, 0, 0], [1, 1, 1]]),
        # one threshold for all
        ("token_k2,seq_mean_k2", 0.5, [[0, 0, 0], [0, 1, 1]]),
    ],
)
def test_rejection_of_the_table(option, threshold, keep):
    result = compute_rollout_rejection_mask(*_ratios(RATIOS), MASK, rollout_rs=option, rollout_rs_threshold=threshold)
    assert torch.equal(result.mask, torch.tensor(keep))


@pytest.mark.parametrize(
    ("veto", "keep"),
    [
        (0.2, [[1, 1, 0], [1, 1, 1]]),  # nothing is below 0.2
        (0.3, [[0, 0, 0], [1, 1, 1]]),  # 0.25 is, and takes its row along
        (1.5, [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_veto_of_the_table(veto, keep):
    result = compute_rollout_rejection_mask(*_ratios(RATIOS), MASK, rollout_rs=None, rollout_token_veto_threshold=veto)
    assert torch.equal(result.mask, torch.tensor(keep))


def test_the_veto_looks_at_unclamped_ratios():
    # log ratios -25 and -19; exp(-22) lies between them, beyond the safety bound
    p, q = torch.tensor([[-25.0, 0.0], [-19.0, 0.0]]), torch.zeros(2, 2)
    result = compute_rollout_rejection_mask(p, q, rollout_rs=None, rollout_token_veto_threshold=math.exp(-22.0))
    assert result.mask.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.6, 1.4])
@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_k1_bounds_are_inclusive(option, value, dtype):
    edge = torch.tensor([[math.log(value)]], dtype=dtype)
    step = torch.full_like(edge, math.inf if value > 1 else -math.inf)
    beyond = torch.nextafter(edge, step)
    zero = torch.zeros_like(edge)
    for log_ratio, keeps in ((edge, True), (beyond, False)):
        result = compute_rollout_rejection_mask(log_ratio, zero, rollout_rs=option, rollout_rs_threshold="0.6_1.4")
        assert bool(result.mask.item()) == keeps


@pytest.mark.parametrize("option", ["token_k2", "seq_sum_k2", "seq_mean_k2", "seq_max_k2"])
def test_k2_bounds_are_inclusive(option):
    p = torch.tensor([[0.5], [-0.5], [0.5000001], [-0.5000001]])  # 0.5^2 / 2 = 0.125, exact in binary
    result = compute_rollout_rejection_mask(p, torch.zeros(4, 1), rollout_rs=option, rollout_rs_threshold=0.125)
    assert result.mask.flatten().tolist() == [True, True, False, False]


@pytest.mark.parametrize(("mode", "inside"), [("zero", "weights"), ("mask", "mask")])
@pytest.mark.parametrize("level", LEVELS)
def test_weight_bounds_are_inclusive(level, mode, inside):
    bounds = torch.tensor([[math.log(0.6)], [math.log(1.4)]], dtype=torch.float64)
    outwards = torch.tensor([[-math.inf], [math.inf]], dtype=torch.float64)
    for log_ratio, keeps in ((bounds, True), (torch.nextafter(bounds, outwards), False)):
        result = compute_rollout_correction_weights(
            log_ratio, torch.zeros_like(bounds), rollout_is=level, rollout_is_threshold="0.6_1.4", rollout_is_mode=mode
        )
        assert (getattr(result, inside) != 0).flatten().tolist() == [keeps, keeps]


@pytest.mark.parametrize("level", LEVELS)
def test_exponents_stop_at_the_safety_bound(level):
    assert SAFETY_BOUND == 20.0
    p = torch.tensor([[1e4], [-1e4], [19.0], [-19.0]], dtype=torch.float64)
    result = compute_rollout_correction_weights(p, torch.zeros_like(p), rollout_is=level, rollout_is_threshold=1e12)
    want = torch.tensor([[20.0], [-20.0], [19.0], [-19.0]], dtype=torch.float64).exp()
    torch.testing.assert_close(result.weights, want)


def test_one_dimensional_input_is_one_column():
    p, q, mask = reference.random_case(3, rows=9, columns=1)
    options = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.3,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.7_1.5",
    }
    two = compute_rollout_correction_and_rejection_mask(p, q, mask, **options)
    one = compute_rollout_correction_and_rejection_mask(p[:, 0], q[:, 0], mask[:, 0], **options)
    assert one.weights is not None
    assert two.weights is not None
    assert one.weights.shape == one.mask.shape == (9,)
    assert torch.equal(one.weights, two.weights[:, 0])
    assert torch.equal(one.mask, two.mask[:, 0])
    assert one.metrics == two.metrics
