"""What must hold whatever the numbers are: identities, dtypes and layouts, and the edges of the input range."""

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch

from flowgrpo_rc.correction import (
    RolloutCorrection,
    RolloutCorrectionConfig,
    compute_rollout_correction,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

RS = "token_k1,token_k2,token_k3,seq_sum_k1,seq_sum_k2,seq_mean_k3,seq_max_k2,seq_max_k3"
BOUNDS = "0.6_1.9,0.3,0.2,0.3_3.0,0.9,0.2,0.4,0.4"


def _config(level: str = "token", mode: str | None = None, threshold: str | float = 1.4) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_mode=mode,
        rollout_is_threshold=threshold,
        rollout_rs=RS,
        rollout_rs_threshold=BOUNDS,
        rollout_token_veto_threshold=0.3,
    )


EVERY = [
    _config("token"),
    _config("sequence", "zero", "0.6_1.9"),
    _config("geometric", "mask", "0.8_1.3"),
    _config("token", "clip", "0.6_1.3"),
]


def _assert_same(a: RolloutCorrection, b: RolloutCorrection, relative: float = 0.0) -> None:
    if relative:
        torch.testing.assert_close(a.weights, b.weights, rtol=relative, atol=relative)
    else:
        assert torch.equal(a.weights, b.weights)
    assert torch.equal(a.mask != 0, b.mask != 0)
    assert a.metrics == pytest.approx(b.metrics, rel=max(relative, 1e-12), abs=max(relative, 1e-12))


# Identities.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("config", EVERY)
def test_equal_policies(config, dtype):
    p, _, mask = reference.random_case(0, 8, 6, dtype=dtype)
    result = compute_rollout_correction(p, p.clone(), mask, config=config)
    assert torch.equal(result.weights, mask.to(result.weights.dtype))
    assert torch.equal(result.mask, mask)
    m = {name.removeprefix("rollout_corr/"): value for name, value in result.metrics.items()}
    ones = ("rollout_is_mean", "rollout_is_min", "rollout_is_max", "rollout_is_eff_sample_size", "ppl_ratio")
    ones += ("rollout_is_seq_mean", "rollout_is_seq_min", "rollout_is_seq_max")
    same = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl")
    for name, value in m.items():
        if name not in same:
            assert value == (1.0 if name in ones else 0.0), name
    assert m["training_ppl"] == m["rollout_ppl"]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("config", EVERY)
def test_masked_elements_equal_removed_elements(config, normalize):
    config = RolloutCorrectionConfig(**{**config.to_dict(), "rollout_is_batch_normalize": normalize})
    p, q, _ = reference.random_case(3, 6, 4, spread=0.3)
    padded_p, padded_q = (torch.full((9, 7), 3.0, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(9, 7)
    columns = torch.tensor([0, 2, 3, 6])
    rows = torch.tensor([0, 1, 3, 4, 6, 8])
    grid = (rows.unsqueeze(1), columns)
    padded_p[grid], padded_q[grid], mask[grid] = p, q - 0.0, 1.0
    padded_q[mask == 0] -= 17.0  # whatever is there
    whole = compute_rollout_correction(p, q, config=config)
    padded = compute_rollout_correction(padded_p, padded_q, mask, config=config)
    torch.testing.assert_close(padded.weights[grid], whole.weights, rtol=1e-12, atol=0)
    assert torch.equal(padded.mask[grid] != 0, whole.mask)
    assert torch.count_nonzero(padded.weights * (1 - mask)) == 0
    assert torch.count_nonzero(padded.mask * (1 - mask)) == 0
    assert padded.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-9)


def test_no_gradient_reaches_the_outputs_and_inputs_stay_as_they_are():
    p, q, mask = reference.random_case(4)
    before = p.clone(), q.clone(), mask.clone()
    p.requires_grad_()
    q.requires_grad_()
    result = compute_rollout_correction(p, q, mask, config=EVERY[0])
    assert not result.weights.requires_grad
    assert not result.mask.requires_grad
    assert p.requires_grad
    for tensor, copy in zip((p, q, mask), before, strict=True):
        assert torch.equal(tensor.detach(), copy)
    float_mask = mask.double().requires_grad_()
    assert not compute_rollout_correction(p, q, float_mask, config=EVERY[0]).mask.requires_grad


def test_results_share_no_memory_with_the_inputs():
    p, q, _ = reference.random_case(4)
    mask = torch.ones_like(p)
    result = compute_rollout_correction(p, q, mask, config=RolloutCorrectionConfig.disabled())
    result.mask.zero_()
    assert mask.all()


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("shape", [(7, 5), (5, 90)])
def test_non_contiguous_inputs(config, shape):
    p, q, mask = reference.random_case(5, *shape)
    expected = compute_rollout_correction(p, q, mask, config=config)
    wide = torch.stack([p, q], dim=-1)
    strided = compute_rollout_correction(wide[..., 0], wide[..., 1], mask.t().contiguous().t(), config=config)
    _assert_same(strided, expected)
    q_expanded = q[:, :1].expand_as(p)
    _assert_same(
        compute_rollout_correction(p, q_expanded, mask, config=config),
        compute_rollout_correction(p, q_expanded.contiguous(), mask, config=config),
    )
    assert strided.weights.is_contiguous()


@pytest.mark.parametrize(
    "mask_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [EVERY[0], EVERY[2]])
def test_dtypes_and_mask_types(config, dtype, mask_dtype):
    p, q, mask = reference.random_case(6, dtype=dtype)
    result = compute_rollout_correction(p, q, mask.to(mask_dtype), config=config)
    assert result.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.mask.dtype == mask_dtype
    # whatever the input's dtype, what it holds is computed in float32 at least
    exact = compute_rollout_correction(p.double(), q.double(), mask, config=config)
    torch.testing.assert_close(result.weights.double(), exact.weights, rtol=1e-6, atol=1e-9)
    assert torch.equal(result.mask != 0, exact.mask)
    assert result.metrics == pytest.approx(exact.metrics, rel=1e-5, abs=1e-6)


def test_mixed_dtypes():
    p, q, mask = reference.random_case(6)
    result = compute_rollout_correction(p, q.float(), mask, config=EVERY[0])
    assert result.weights.dtype == torch.float64
    half = compute_rollout_correction(p.float(), q.bfloat16(), mask, config=EVERY[0])
    assert half.weights.dtype == torch.float32
    exact = compute_rollout_correction(p.float(), q.bfloat16().float(), mask, config=EVERY[0])
    _assert_same(half, exact)


def test_mask_values_other_than_one_stay():
    p = torch.tensor([[0.0, 3.0, 0.0]])
    mask = torch.tensor([[2.0, 0.5, 0.25]])
    result = compute_rollout_rejection_mask(
        p, torch.zeros_like(p), mask, rollout_rs="token_k1", rollout_rs_threshold=2.0
    )
    assert result.mask.tolist() == [[2.0, 0.0, 0.25]]
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)


# Extremes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("config", EVERY)
def test_huge_log_ratios_stay_finite(config, sign, dtype):
    p = torch.zeros(4, 3, dtype=dtype)
    q = torch.zeros(4, 3, dtype=dtype)
    p[1, 1], p[2] = sign * 1e4, -sign * 1e4
    result = compute_rollout_correction(p, q, torch.ones(4, 3), config=config)
    assert torch.isfinite(result.weights).all()
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.mask[0].all()
    assert result.mask[3].all()
    assert not result.mask[1:3].any()


def test_divergences_of_huge_ratios_are_those_of_the_safety_bound():
    p = torch.tensor([[1e4], [-1e4]], dtype=torch.float64)
    metrics = compute_rollout_correction_and_rejection_mask(p, torch.zeros_like(p), rollout_is="sequence").metrics
    k3 = ((math.exp(20.0) - 1 - 20) + (math.exp(-20.0) - 1 + 20)) / 2
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx((math.exp(20) + math.exp(-20)) / 2)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx((math.exp(20) + math.exp(-20)) / 2)
    assert metrics["rollout_corr/logprob_abs_diff_max"] == 1e4
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["log_prob", "rollout_log_prob"])
@pytest.mark.parametrize("config", [*EVERY, RolloutCorrectionConfig.disabled()])
def test_non_finite_valid_log_probs_are_an_error(config, which, value):
    p, q, _ = reference.random_case(7, 5, 4)
    mask = torch.ones(5, 4)
    target = p if which == "log_prob" else q
    target[2, 3] = target[4, 0] = value
    with pytest.raises(ValueError, match=rf"2 of 20 positions .* the first is \(2, 3\): .*{which}={value}"):
        compute_rollout_correction(p, q, mask, config=config)
    with pytest.raises(ValueError, match=r"2 of 20 positions .* the first is \(2, 3\)"):
        compute_rollout_correction(p, q, config=config)


def test_equal_infinities_are_an_error_too():
    p = torch.tensor([[-math.inf, 0.0]])
    with pytest.raises(ValueError, match=r"1 of 2 positions .* the first is \(0, 0\)"):
        compute_rollout_correction_weights(p, p.clone())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("shape", [(6, 4), (4, 80), (300, 200)])
@pytest.mark.parametrize("config", EVERY)
def test_anything_at_masked_positions_has_no_effect(config, shape, value):
    p, q, mask = reference.random_case(8, *shape, dtype=torch.float32)
    expected = compute_rollout_correction(p, q, mask, config=config)
    for target in (p, q, torch.empty(0)):
        dirty_p, dirty_q = p.clone(), q.clone()
        if target is not q:
            dirty_p[~mask] = value
        if target is not p:
            dirty_q[~mask] = value
        result = compute_rollout_correction(dirty_p, dirty_q, mask, config=config)
        assert torch.equal(result.weights, expected.weights)
        assert torch.equal(result.mask, expected.mask)
        assert result.metrics == expected.metrics


@pytest.mark.parametrize("scale", [1e5, -1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_density_log_probs(scale, dtype):
    # log densities are not bounded by 0, and summed over latent dimensions they are huge
    g = torch.Generator().manual_seed(0)
    p = scale + torch.rand(6, 2, generator=g, dtype=torch.float64).round(decimals=2).to(dtype)
    result = compute_rollout_correction(p, torch.full_like(p, scale), config=EVERY[0])
    assert torch.isfinite(result.weights).all()
    assert all(math.isfinite(value) for value in result.metrics.values())
    if scale < 0:
        assert result.metrics["rollout_corr/training_ppl"] == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 6), (5, 1)])
def test_one_element_and_one_row(config, shape):
    p = torch.full(shape, -1.0) + 0.1
    result = compute_rollout_correction(p, torch.full(shape, -1.0), config=config)
    assert result.weights.shape == result.mask.shape == shape
    assert result.mask.dtype == torch.bool
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["rollout_corr/rollout_is_std"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["rollout_corr/rollout_is_seq_std"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("config", EVERY)
def test_rows_without_a_valid_element_change_nothing(config):
    p, q, mask = reference.random_case(9, 6, 3)
    mask[1] = True
    expected = compute_rollout_correction(p, q, mask, config=config)
    more = [torch.cat([t, t.new_full((4, 3), 5)]) for t in (p, q)]
    more_mask = torch.cat([mask, torch.zeros(4, 3, dtype=torch.bool)])
    result = compute_rollout_correction(*more, more_mask, config=config)
    assert torch.equal(result.weights[:6], expected.weights)
    assert not result.weights[6:].any()
    assert torch.equal(result.mask[:6], expected.mask)
    assert not result.mask[6:].any()
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_batch_is_an_error(shape):
    with pytest.raises(ValueError, match=rf"The batch is empty: log_prob has shape \({shape[0]}"):
        compute_rollout_correction_weights(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_without_a_valid_element_is_an_error(dtype):
    p = torch.full((3, 2), math.nan)
    with pytest.raises(ValueError, match="no valid element"):
        compute_rollout_correction_weights(p, p, torch.zeros(3, 2, dtype=dtype))


def test_everything_rejected():
    p = torch.full((3, 2), 5.0)
    result = compute_rollout_correction_and_rejection_mask(
        p, torch.zeros_like(p), rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.6_1.4"
    )
    assert not result.mask.any()
    assert torch.equal(result.weights, torch.full((3, 2), 2.0))
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


def test_all_weights_zero():
    p = torch.full((3, 2), 5.0)
    result = compute_rollout_correction_weights(p, torch.zeros_like(p), rollout_is_threshold="0.5_2.0")
    assert not result.weights.any()
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert result.metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


# Wrong shapes and types. The suite's run-time checks of shapes would answer first, so these run without them.

_WRONG = """
import json, torch
from flowgrpo_rc.correction import compute_rollout_correction_weights as f

def message(*args):
    try:
        f(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

z = torch.zeros
print(json.dumps([
    message(z(2, 3), z(3, 2)),
    message(z(2, 3), z(2, 3), z(2, 1)),
    message(z(2, 3), z(3)),
    message(z(2, 3, 4), z(2, 3, 4)),
    message(z(()), z(())),
    message(z(2, 3, dtype=torch.int64), z(2, 3)),
]))
"""


def test_wrong_shapes_and_types():
    run = subprocess.run([sys.executable, "-c", _WRONG], capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(run.stdout) == [
        ["ValueError", "log_prob has shape (2, 3), but rollout_log_prob has shape (3, 2)."],
        ["ValueError", "log_prob has shape (2, 3), but mask has shape (2, 1)."],
        ["ValueError", "log_prob has shape (2, 3), but rollout_log_prob has shape (3,)."],
        ["ValueError", "log_prob must be (B,) or (B, T), got shape (2, 3, 4)."],
        ["ValueError", "log_prob must be (B,) or (B, T), got shape ()."],
        [
            "TypeError",
            "log-probs must be floating point, got log_prob torch.int64 and rollout_log_prob torch.float32.",
        ],
    ]


# Calls share nothing that a caller could notice.


def _calls() -> list[tuple[tuple[torch.Tensor, ...], RolloutCorrectionConfig]]:
    shapes = [(8, 1), (8, 4), (3, 90), (300, 200), (20000, 2)]
    return [(reference.random_case(i, *s, dtype=torch.float32), c) for i, s in enumerate(shapes) for c in EVERY[:3]]


def _copy(result: RolloutCorrection) -> RolloutCorrection:
    return RolloutCorrection(result.weights.clone(), result.mask.clone(), dict(result.metrics), result.moments)


def test_a_later_call_leaves_earlier_results_alone():
    calls = _calls()
    results = [compute_rollout_correction(*tensors, config=config) for tensors, config in calls]
    copies = [_copy(result) for result in results]
    for (p, q, mask), config in calls:
        compute_rollout_correction(p + 0.3, q - 0.3, ~mask, config=config)
        compute_rollout_correction(p, q, config=config)
    again = [compute_rollout_correction(*tensors, config=config) for tensors, config in calls]
    for result, copy, repeated in zip(results, copies, again, strict=True):
        for other in (copy, repeated):
            assert torch.equal(result.weights, other.weights)
            assert torch.equal(result.mask, other.mask)
            assert result.metrics == other.metrics


def test_an_error_leaves_nothing_behind():
    p, q, mask = reference.random_case(1, 6, 4)
    expected = compute_rollout_correction(p, q, mask, config=EVERY[0])
    bad = torch.full_like(p, math.nan)
    for given in (mask, None):
        with pytest.raises(ValueError, match="NaN or infinite"):
            compute_rollout_correction(bad, q, given, config=EVERY[0])
    _assert_same(compute_rollout_correction(p, q, mask, config=EVERY[0]), expected)


def test_threads_do_not_disturb_each_other():
    # one shape, so that all would share whatever is kept between calls
    calls = [reference.random_case(seed, 300, 40, dtype=torch.float32) for seed in range(40)]
    expected = [_copy(compute_rollout_correction(*call, config=EVERY[0])) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda call: compute_rollout_correction(*call, config=EVERY[0]), calls))
    finally:
        sys.setswitchinterval(interval)
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result.weights, want.weights)
        assert torch.equal(result.mask, want.mask)
        assert result.metrics == want.metrics


@pytest.mark.parametrize("shape", [(11, 1), (11, 3), (11, 77), (11, 4000)])
def test_inference_mode_before_and_after(shape):
    p, q, mask = reference.random_case(2, *shape)
    with torch.inference_mode():
        inside = compute_rollout_correction(p, q, mask, config=EVERY[0])
        level = compute_rollout_correction(p, q, mask, config=EVERY[1])
    outside = compute_rollout_correction(p, q, mask, config=EVERY[0])
    _assert_same(outside, inside)
    _assert_same(compute_rollout_correction(p, q, mask, config=EVERY[1]), level)
    with torch.inference_mode():
        _assert_same(compute_rollout_correction(p, q, mask, config=EVERY[0]), inside)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    (outside.weights * scale).sum().backward()  # results take part in autograd
    assert scale.grad is not None


@pytest.mark.parametrize("shape", [(13, 1), (13, 3), (13, 77)])
@pytest.mark.parametrize("setting", ["device", "dtype"])
def test_default_device_and_dtype_do_not_matter(setting, shape):
    p, q, mask = reference.random_case(2, *shape)
    before = torch.get_default_dtype()
    for masks in (mask, None):
        try:
            if setting == "dtype":
                torch.set_default_dtype(torch.bfloat16)
                result = compute_rollout_correction(p, q, masks, config=EVERY[1])
            else:
                with torch.device("meta"):
                    result = compute_rollout_correction(p, q, masks, config=EVERY[1])
        finally:
            torch.set_default_dtype(before)
        _assert_same(result, compute_rollout_correction(p, q, masks, config=EVERY[1]))
