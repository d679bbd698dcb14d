"""Properties that hold for all numbers: identities, dtypes, digits, and the edges of the input range."""

import math

import pytest
import reference
import torch

from flowgrpo_rc.correction import (
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_without_a_valid_element_is_an_error(dtype):
    p = torch.full((3, 2), math.nan)
    with pytest.raises(ValueError, match="no valid element"):
        compute_rollout_correction_weights(p, p, torch.zeros(3, 2, dtype=dtype))


def test_all_weights_zero():
    p = torch.full((3, 2), 5.0)
    result = compute_rollout_correction_weights(p, torch.zeros_like(p), rollout_is_threshold="0.5_2.0")
    assert not result.weights.any()
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert result.metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


# Digits, devices.


@pytest.mark.portable
@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 2.0), (torch.float64, 2.0)])
def test_exponentials_are_exact_to_their_last_digits(dtype, ulps):
    """Against ``math``, in double: weights, and the mean k3 of one element, which is ``expm1(l) - l``."""
    tiny = torch.tensor([1e-7, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.34657, 0.34658, 0.5, 1.0, 2.0], dtype=torch.float64)
    l = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float64), tiny, -tiny]).to(dtype)  # noqa: E741
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1e30)
    weights = compute_rollout_correction(l, torch.zeros_like(l), config=config).weights
    eps = torch.finfo(dtype).eps
    for x, w in zip(l.tolist(), weights.tolist(), strict=True):
        assert w == pytest.approx(math.exp(x), rel=ulps * eps, abs=0)
    for x in tiny.to(dtype).tolist():
        one = torch.tensor([x], dtype=dtype)
        k3 = compute_rollout_correction(one, torch.zeros_like(one), config=config).metrics["rollout_corr/k3_kl"]
        series = sum(x**n / math.factorial(n) for n in range(2, 30))  # of small x more exact than expm1(x) - x
        # In float32 it comes from float64 and is exact; in float64 it is a difference of numbers of the size of x.
        rounding = 0 if dtype == torch.float32 else eps * abs(x)
        assert k3 == pytest.approx(series, rel=20 * eps, abs=rounding)


def test_a_long_row_s_sums_are_exact():
    """A float32 sum of 1e5 elements."""
    generator = torch.Generator().manual_seed(0)
    p = -5.0 - torch.rand(2, 100_003, generator=generator)
    q = p - 1e-3 * torch.rand(2, 100_003, generator=generator)
    metrics = compute_rollout_correction(p, q, config=EVERY[0]).metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(-(p - q).double().mean().item(), rel=2e-7)
    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx(-p.double().mean().item(), rel=2e-7)
    assert metrics["rollout_corr/logprob_abs_diff_max"] == (p - q).abs().max().item()


def test_tensors_on_two_devices_are_refused():
    p, q, mask = reference.random_case(2, 4, 3)
    with pytest.raises(ValueError, match="log_prob is on cpu, but rollout_log_prob is on meta"):
        compute_rollout_correction(p, q.to("meta"), mask, config=EVERY[0])
    with pytest.raises(ValueError, match="but mask is on meta"):
        compute_rollout_correction(p, q, mask.to("meta"), config=EVERY[0])
