"""The C extension against torch and against exact exponentials: every shape, type and layout of memory."""

import itertools
import math
from dataclasses import replace

import pytest
import reference
import torch

from flowgrpo_rc.correction import RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.correction.numerics import blocks, native
from flowgrpo_rc.correction.plan import RS_OPTIONS

pytestmark = pytest.mark.skipif(
    not native.is_built(), reason="the C extension is not built: there was no C compiler when the package was installed"
)

CONFIG = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold=1.3,
    rollout_rs="token_k1,token_k2,token_k3,seq_sum_k1,seq_mean_k3,seq_max_k2,seq_max_k3",
    rollout_rs_threshold="0.6_1.9,0.3,0.2,0.3_3.0,0.2,0.4,0.4",
    rollout_token_veto_threshold=0.4,
)
KINDS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)


def without_it(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(native, "_native", None)
        return compute_rollout_correction(*args, **kwargs)


def assert_close(found, expected, relative):
    assert (found.weights is None) == (expected.weights is None)
    if found.weights is not None:
        assert found.weights.dtype == expected.weights.dtype
        torch.testing.assert_close(found.weights, expected.weights, rtol=relative, atol=0)
    assert found.mask.dtype == expected.mask.dtype
    assert torch.equal(found.mask, expected.mask)
    assert list(found.metrics) == list(expected.metrics)
    for name, value in expected.metrics.items():
        # a standard deviation is the root of a difference of nearly equal squares where it is small
        mean = expected.metrics.get(name.removesuffix("_std") + "_mean", 0.0)
        spread = max(1.0, abs(mean)) if name.endswith("_std") else 0.0
        assert found.metrics[name] == pytest.approx(value, rel=10 * relative, abs=max(spread * relative**0.5, 1e-12)), (
            name
        )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 80, 511, 512, 513, 1025])
def test_every_shape_gives_what_torch_gives(columns, level, monkeypatch):
    config = replace(CONFIG, rollout_is=level)
    for rows in (1, 2, 15, 16, 17, 33):
        p, q, mask = reference.random_case(rows * columns, rows, columns, dtype=torch.float64)
        mask[0, 0] = True
        for given in (mask, None):
            assert_close(
                compute_rollout_correction(p, q, given, config=config),
                without_it(monkeypatch, p, q, given, config=config),
                1e-12,
            )


@pytest.mark.parametrize("mode", ["truncate", "zero", "clip", "mask"])
@pytest.mark.parametrize("option", RS_OPTIONS)
def test_every_option_gives_what_torch_gives(option, mode, monkeypatch):
    for level, threshold, veto in itertools.product(("token", "sequence"), (1.2, 0.9), (None, 0.5)):
        config = RolloutCorrectionConfig(
            rollout_is=level,
            rollout_is_threshold=threshold if mode == "truncate" else f"0.4_{threshold}",
            rollout_is_mode=mode,
            rollout_rs=option,
            rollout_rs_threshold="0.7_1.4" if option.endswith("k1") else 0.1,
            rollout_token_veto_threshold=veto,
        )
        p, q, mask = reference.random_case(7, 21, 5, dtype=torch.float64)
        found = compute_rollout_correction(p, q, mask, config=config)
        assert_close(found, without_it(monkeypatch, p, q, mask, config=config), 1e-12)


@pytest.mark.portable
@pytest.mark.parametrize("shape", [(20, 3), (5, 100)])
@pytest.mark.parametrize("kind", [*KINDS, torch.bfloat16, torch.float16, torch.int16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_type_gives_what_torch_gives(dtype, kind, shape, monkeypatch):
    p, q, mask = reference.random_case(11, *shape, dtype=torch.float64)
    p, q, mask = p.to(dtype), q.to(dtype), mask.to(kind)
    if kind != torch.bool:
        mask = mask * 3  # what counts is not zero, and keeps its value
    relative = 1e-12 if dtype == torch.float64 else 1e-5  # torch's k3 of small log ratios is rounding in float32
    config = replace(CONFIG, rollout_rs="token_k1,token_k3", rollout_rs_threshold="0.6_1.9,0.2")
    config = replace(config, rollout_token_veto_threshold=None)
    found = compute_rollout_correction(p, q, mask, config=config)
    assert_close(found, without_it(monkeypatch, p, q, mask, config=config), relative)
    assert set(found.mask.double().unique().tolist()) == ({0.0, 1.0} if kind == torch.bool else {0.0, 3.0})


KINDS = {"tiny": (1e-4, 0.0), "small": (0.3, 0.0), "wide": (6.0, 0.0), "huge": (300.0, 0.0), "one-sided": (0.01, 0.7)}


@pytest.mark.parametrize("shape", [(7, 1), (9, 5), (4, 3000), (5, 9000)])
@pytest.mark.parametrize("mode", ["truncate", "zero", "clip", "mask"])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_every_kind_in_turn(masked, mode, shape, monkeypatch):
    """Differences far below and far above every bound, in blocks one after the other."""
    threshold = 1.4 if mode == "truncate" else "0.7_1.4"
    config = replace(CONFIG, rollout_is_mode=mode, rollout_is_threshold=threshold)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for scale, shift in KINDS.values():
        p = -torch.rand(shape, generator=generator, dtype=torch.float64)
        l = shift + scale * torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E741
        mask = torch.rand(shape, generator=generator) < 0.8
        mask[:, 0] = True
        batches.append((p, p - l, mask if masked else None))
    for batch in 2 * batches:
        assert_close(
            compute_rollout_correction(*batch, config=config), without_it(monkeypatch, *batch, config=config), 1e-12
        )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("lay", ["bfloat16", "transposed"])
def test_what_is_converted_block_by_block_is_as_if_it_were_plain(lay, threads):
    """More rows than one block has, in shares of several threads."""
    p, q, mask = reference.random_case(6, 700, 600, dtype=torch.bfloat16)
    assert 3 * blocks.HOST_BLOCK < 700 * 600
    expected = compute_rollout_correction(p.float(), q.float(), mask, config=CONFIG)
    if lay == "transposed":
        p, q, mask = (x.t().contiguous().t() for x in (p.float(), q.float(), mask))
    torch.set_num_threads(threads)
    found = compute_rollout_correction(p, q, mask, config=CONFIG)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.mask, expected.mask)
    assert found.metrics == expected.metrics


def test_log_probs_of_two_types(monkeypatch):
    p, q, mask = reference.random_case(11, 20, 3, dtype=torch.float64)
    for a, b in ((p.float(), q), (p.bfloat16(), q.float()), (p, q.half())):
        found = compute_rollout_correction(a, b, mask, config=CONFIG)
        assert_close(
            found,
            without_it(monkeypatch, a, b, mask, config=CONFIG),
            1e-12 if a.dtype == p.dtype or b.dtype == p.dtype else 1e-5,
        )


@pytest.mark.parametrize("shape", [(24, 3), (6, 200)])
@pytest.mark.usefixtures("both_passes")
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
        assert found.metrics == expected.metrics, lay.__name__
        assert not found.weights.requires_grad
        broadcast = p[:1].expand(shape)
        assert_close(
            compute_rollout_correction(broadcast, q, mask, config=CONFIG),
            compute_rollout_correction(broadcast.clone(), q, mask, config=CONFIG),
            0.0,
        )


@pytest.mark.portable
@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 2.0), (torch.float64, 2.0)])
def test_exponentials_are_exact_to_their_last_digits(dtype, ulps):
    """Against `math`, in double: weights, and the mean k3 of one element, which is `expm1(l) - l`."""
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
        assert k3 == pytest.approx(series, rel=20 * eps, abs=0)


def test_a_long_row_s_sums_are_exact():
    """Lanes are summed apart and put together in double: 1e5 elements lose nothing to float32."""
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


def test_a_tensor_without_memory_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises((ValueError, RuntimeError), match="without memory|data pointer"):
        compute_rollout_correction(torch.zeros(4, 3), torch.zeros(4, 3), config=CONFIG)


@pytest.mark.parametrize("size", [0, 8, 489])
def test_a_plan_of_another_build_is_refused(size):
    with pytest.raises(ValueError, match="plan: expected"):
        native._native.run(bytes(size), *[0] * 11)
    with pytest.raises(ValueError, match="reduction: expected"):
        native._native.reduce(bytes(size), 0, 0, 0)


def test_another_build_s_extension_is_left_alone(monkeypatch):
    monkeypatch.setattr(native._native, "SOURCES", "0123456789abcdef")
    with pytest.warns(UserWarning, match="built from other sources.*make install"):
        assert native._load() is None
    monkeypatch.undo()
    assert native._load() is native._native


def test_an_infinite_mask_value_leaves_with_its_element():
    p, q, _ = reference.random_case(3, 6, 2, dtype=torch.float32)
    mask = torch.full(p.shape, math.inf)
    q[0] = p[0] - 5.0
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.1_10")
    assert compute_rollout_correction(p, q, mask, config=config).mask[0].tolist() == [0.0, 0.0]
