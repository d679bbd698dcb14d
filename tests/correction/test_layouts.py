"""The same results however the memory lies, and exact to the last digits."""

import math

import pytest
import reference
import torch

from flowgrpo_rc.correction import RolloutCorrectionConfig, compute_rollout_correction

CONFIG = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold=1.3,
    rollout_rs="token_k1,token_k2,token_k3,seq_sum_k1,seq_mean_k3,seq_max_k2,seq_max_k3",
    rollout_rs_threshold="0.6_1.9,0.3,0.2,0.3_3.0,0.2,0.4,0.4",
    rollout_token_veto_threshold=0.4,
)


@pytest.mark.parametrize("shape", [(24, 3), (6, 200)])
def test_however_the_memory_lies(shape):
    p, q, mask = reference.random_case(12, *shape, dtype=torch.float32)
    expected = compute_rollout_correction(p, q, mask, config=CONFIG)

    def transposed(x):
        return x.t().contiguous().t()

    def strided(x):
        wide = torch.zeros(x.shape[0] * 2, x.shape[1] * 3, dtype=x.dtype)
        wide[::2, 1::3] = x
        return wide[::2, 1::3]

    def unaligned(x):
        return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)

    def negated(x):  # a view that the negative bit belongs to
        return x if x.dtype == torch.bool else torch.complex(torch.zeros_like(x), -x).conj().imag

    def with_gradient(x):
        return x if x.dtype == torch.bool else x.clone().requires_grad_() * 1.0

    assert negated(p).is_neg()
    for lay in (transposed, strided, unaligned, negated, with_gradient):
        found = compute_rollout_correction(lay(p), lay(q), lay(mask), config=CONFIG)
        assert torch.equal(found.weights, expected.weights), lay.__name__
        assert torch.equal(found.mask, expected.mask), lay.__name__
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-6), lay.__name__
        assert not found.weights.requires_grad
    broadcast = p[:1].expand(shape)
    found = compute_rollout_correction(broadcast, q, mask, config=CONFIG)
    assert torch.equal(found.weights, compute_rollout_correction(broadcast.clone(), q, mask, config=CONFIG).weights)


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
    metrics = compute_rollout_correction(p, q, config=CONFIG).metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(-(p - q).double().mean().item(), rel=2e-7)
    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx(-p.double().mean().item(), rel=2e-7)
    assert metrics["rollout_corr/logprob_abs_diff_max"] == (p - q).abs().max().item()


def test_tensors_on_two_devices_are_refused():
    p, q, mask = reference.random_case(2, 4, 3)
    with pytest.raises(ValueError, match="log_prob is on cpu, but rollout_log_prob is on meta"):
        compute_rollout_correction(p, q.to("meta"), mask, config=CONFIG)
    with pytest.raises(ValueError, match="but mask is on meta"):
        compute_rollout_correction(p, q, mask.to("meta"), config=CONFIG)
