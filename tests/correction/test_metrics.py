"""Metrics: each against its definition recomputed with loops, merged exactly, and moved to the host once."""

import math

import pytest
import reference
import torch

from flowgrpo_rc.correction import (
    MetricAccumulator,
    RolloutCorrection,
    RolloutCorrectionConfig,
    compute_offpolicy_metrics,
    compute_rollout_correction,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_rejection_mask,
    slime_metrics,
)
from flowgrpo_rc.correction.plan import RS_OPTIONS

EVERYTHING = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold="0.7_1.6",
    rollout_is_batch_normalize=True,
    rollout_rs=",".join(RS_OPTIONS),
    rollout_rs_threshold="0.6_1.9,0.2,0.1,0.4_3.0,0.9,0.7,0.8_1.3,0.15,0.12,0.5,0.4",
    rollout_token_veto_threshold=0.4,
)


def _assert_metrics(actual: dict[str, float], expected: dict[str, float], relative: float = 1e-9) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        # a standard deviation is the root of a difference of nearly equal squares where it is small
        mean = expected.get(name.removesuffix("_std") + "_mean", 0.0)
        absolute = 1e-7 * max(1.0, abs(mean)) if name.endswith("_std") else 1e-12
        assert type(actual[name]) is float, name
        assert actual[name] == pytest.approx(value, rel=relative, abs=absolute), name


@pytest.mark.parametrize("batch_normalize", [False, True])
@pytest.mark.parametrize(("mode", "threshold", "lower", "upper"), reference.FORMS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_and_their_metrics_equal_the_loops(level, mode, threshold, lower, upper, batch_normalize):
    for seed, shape in enumerate([(7, 5), (3, 70), (4, 1), (2, 3), (1, 1), (1, 6)]):
        p, q, mask = reference.random_case(seed, *shape)
        form = {"level": level, "mode": mode, "lower": lower, "upper": upper, "batch_normalize": batch_normalize}
        weights = reference.importance(reference.log_ratios(p, q), reference.valid_table(mask, p), **form)
        result = compute_rollout_correction_and_rejection_mask(
            p,
            q,
            mask,
            rollout_is=level,
            rollout_is_threshold=threshold,
            rollout_is_mode=mode,
            rollout_is_batch_normalize=batch_normalize,
        )
        want = torch.tensor(weights.final, dtype=torch.float64)
        torch.testing.assert_close(result.weights, want, rtol=1e-12, atol=1e-15)
        assert torch.equal(result.mask, mask & torch.tensor(weights.keep))
        _assert_metrics(result.metrics, reference.metrics(p, q, mask, weights=weights, **form))


@pytest.mark.parametrize("option", RS_OPTIONS)
def test_each_criterion_and_its_metrics_equal_the_loops(option):
    shapes = [(7, 5), (9, 3), (3, 70), (4, 1), (1, 1)]
    kept = rejected = 0
    for seed in range(15):
        p, q, mask = reference.random_case(seed, *shapes[seed % len(shapes)], spread=0.3)
        criteria, text = reference.random_criteria(seed, [option])
        keep = reference.reject(reference.log_ratios(p, q), reference.valid_table(mask, p), criteria[0]).keep
        result = compute_rollout_correction_and_rejection_mask(p, q, mask, rollout_rs=option, rollout_rs_threshold=text)
        assert result.weights is None
        assert torch.equal(result.mask, mask & torch.tensor(keep)), f"seed {seed}, {text}"
        _assert_metrics(result.metrics, reference.metrics(p, q, mask, criteria=criteria))
        kept += int(result.mask.sum())
        rejected += int(mask.sum() - result.mask.sum())
    assert kept > 0
    assert rejected > 0


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("seed", range(6))
def test_several_criteria_and_all_metrics_equal_the_loops(seed, level):
    p, q, mask = reference.random_case(seed, 12, 6, spread=0.3)
    options = list(RS_OPTIONS[seed : seed + 4])
    criteria, text = reference.random_criteria(seed, options)
    ratios, valid = reference.log_ratios(p, q), reference.valid_table(mask, p)
    form = {"level": level, "mode": "mask", "lower": 0.5, "upper": 3.0, "batch_normalize": True}
    weights = reference.importance(ratios, valid, **form)
    want = mask & torch.tensor(weights.keep) & ~torch.tensor(reference.veto(ratios, valid, 0.55)).unsqueeze(1)
    for c in criteria:
        want &= torch.tensor(reference.reject(ratios, valid, c).keep)
    result = compute_rollout_correction_and_rejection_mask(
        p,
        q,
        mask,
        rollout_is=level,
        rollout_is_threshold="0.5_3.0",
        rollout_is_mode="mask",
        rollout_is_batch_normalize=True,
        rollout_rs=",".join(options),
        rollout_rs_threshold=text,
        rollout_token_veto_threshold=0.55,
    )
    assert torch.equal(result.mask, want)
    torch.testing.assert_close(result.weights, torch.tensor(weights.final, dtype=torch.float64))
    expected = reference.metrics(p, q, mask, weights=weights, criteria=criteria, veto_threshold=0.55, **form)
    _assert_metrics(result.metrics, expected)


def test_float32_metrics_at_the_scale_of_sde_steps():
    # |l| near 1e-4: exp(l) - 1 - l in float32 would be rounding noise of 1e-8, larger than k3 itself
    g = torch.Generator().manual_seed(0)
    q = torch.randn(64, 2, generator=g)
    p = q + 1e-4 * torch.randn(64, 2, generator=g)
    weights = reference.importance(
        reference.log_ratios(p, q), reference.valid_table(None, p), "sequence", "truncate", 0.0, 2.0, False
    )
    expected = reference.metrics(p, q, None, weights=weights, level="sequence")
    actual = compute_rollout_correction_and_rejection_mask(p, q, rollout_is="sequence").metrics
    assert expected["rollout_corr/k3_kl"] < 1e-8
    for name in ("k3_kl", "chi2_token", "chi2_seq", "kl", "log_ppl_abs_diff", "rollout_is_std"):
        key = f"rollout_corr/{name}"
        assert actual[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-9), name


@pytest.mark.parametrize("log_ratio", [1e-6, -3e-6, 1e-5, -1e-4, 1e-3, -0.0299, 0.0301, -0.1, 1.0, -5.0, 19.0])
@pytest.mark.parametrize("option", ["token_k3", "seq_mean_k3", "seq_sum_k3", "seq_max_k3"])
def test_k3_keeps_its_digits_in_float32(log_ratio, option):
    """At |l| of 1e-5 the float32 difference of expm1(l) and l has one digit of k3; it would reject by chance."""
    p = torch.full((3, 1), log_ratio)
    exact = p[0, 0].double()
    k3 = (torch.expm1(exact) - exact).item()
    metrics = compute_rollout_rejection_mask(p, torch.zeros(3, 1), rollout_rs=option, rollout_rs_threshold=1e9).metrics
    for name in ("k3_kl", *(f"rollout_rs_{option}_{figure}" for figure in ("mean", "min", "max", "seq_mean"))):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(k3, rel=1e-5), name


@pytest.mark.parametrize("shift", [25.0, -25.0, 1000.0, -1000.0])
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
def test_extremes_beyond_the_safety_bound_are_those_of_the_bound(shift, statistic):
    """All elements on one side of the bound: both extremes are that of 20."""
    q = torch.zeros(2, 3, dtype=torch.float64)
    p = q + shift + torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bound = math.copysign(20.0, shift)
    expected = {"k1": -bound, "k2": 200.0, "k3": math.expm1(bound) - bound}[statistic]
    name = f"token_{statistic}"
    metrics = compute_rollout_rejection_mask(p, q, rollout_rs=name, rollout_rs_threshold=2.0).metrics
    for figure in ("min", "max"):
        assert metrics[f"rollout_corr/rollout_rs_{name}_{figure}"] == pytest.approx(expected, rel=1e-12), figure


def test_hand_worked_metrics():
    # ratios 2 and 1/4 in row 0, 1 and (masked) 8 in row 1; rollout log-probs all -1
    rollout = torch.full((2, 2), -1.0, dtype=torch.float64)
    ratios = torch.tensor([[2.0, 0.25], [1.0, 8.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    metrics = compute_offpolicy_metrics(rollout + ratios.log(), rollout, mask)
    log2 = math.log(2.0)
    expected = {
        "kl": log2 / 3,  # -(log 2 - 2 log 2 + 0) / 3
        "k3_kl": ((2 - 1 - log2) + (0.25 - 1 + 2 * log2) + 0) / 3,
        "chi2_token": (4 + 0.0625 + 1) / 3 - 1,
        "chi2_seq": (0.25 + 1) / 2 - 1,  # products 0.5 and 1
        "log_ppl_diff": (log2 / 2 + 0) / 2,  # row means of -l: log(2)/2 and 0
        "log_ppl_diff_max": log2 / 2,
        "log_ppl_diff_min": 0.0,
        "ppl_ratio": (math.sqrt(2.0) + 1) / 2,
        "rollout_ppl": math.e,
        "training_log_ppl": 1 + log2 / 4,
        "logprob_abs_diff_mean": 3 * log2 / 3,
        "logprob_abs_diff_max": 2 * log2,
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=1e-12), name


def test_the_fraction_that_is_high_has_a_large_train_over_rollout_ratio():
    p = torch.tensor([[3.0], [3.0], [-3.0], [0.0]])
    metrics = compute_rollout_correction_and_rejection_mask(
        p, torch.zeros_like(p), rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    ).metrics
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0.25
    assert metrics["rollout_corr/rollout_rs_token_k1_fraction_high"] == 0.5
    assert metrics["rollout_corr/rollout_rs_token_k1_fraction_low"] == 0.25
    assert metrics["rollout_corr/rollout_rs_token_k1_mean"] == -0.75  # the statistic itself stays -l


# Merging.


def _parts(config: RolloutCorrectionConfig, sizes: tuple[int, ...]) -> tuple[RolloutCorrection, list]:
    rows = sum(sizes)
    p, q, mask = reference.random_case(21, rows, 4, spread=0.4)
    timesteps = torch.tensor([900.0, 700.0, 500.0, 300.0], dtype=torch.float64).repeat(rows, 1)
    whole = compute_rollout_correction(p, q, mask, config=config, timesteps=timesteps)
    parts, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        start += size
        parts.append(compute_rollout_correction(p[part], q[part], mask[part], config=config, timesteps=timesteps[part]))
    return whole, parts


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("sizes", [(6, 6), (9, 3), (3, 4, 5), (12,)])
def test_accumulated_micro_batches_equal_the_whole(level, sizes):
    for threshold, mode in ((1.4, None), ("0.7_1.6", "zero"), ("0.6_1.7", "mask")):
        values = {**EVERYTHING.to_dict(), "rollout_is": level, "rollout_is_mode": mode}
        whole, parts = _parts(RolloutCorrectionConfig(**{**values, "rollout_is_threshold": threshold}), sizes)
        accumulator = MetricAccumulator()
        for part in parts:
            accumulator.add(part)
        _assert_metrics(accumulator.compute(), whole.metrics)
        named = accumulator.compute(prefix="actor/rollout_corr/", slime=True)
        assert named["actor/rollout_corr/kl"] == named["mismatch_kl"] == accumulator.compute()["rollout_corr/kl"]
        accumulator.reset()
        assert accumulator.compute() == {}


def test_results_of_different_options_do_not_merge():
    p, q, mask = reference.random_case(0)
    accumulator = MetricAccumulator()
    accumulator.add(compute_rollout_correction(p, q, mask, config=EVERYTHING))
    with pytest.raises(ValueError, match="same options"):
        accumulator.add(compute_rollout_correction(p, q, mask, config=RolloutCorrectionConfig()))


# Timesteps.


def test_gaps_by_timestep_value():
    # windows start at different steps, so column 0 holds two timesteps, and 700 occurs in both columns
    p = torch.tensor([[0.1, -0.3], [0.5, 0.0], [-0.2, 0.7]], dtype=torch.float64)
    timesteps = torch.tensor([[900.0, 700.0], [700.0, 500.0], [900.0, 700.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    metrics = compute_offpolicy_metrics(p, torch.zeros_like(p), mask, timesteps=timesteps)
    by_step = {name: value for name, value in metrics.items() if "/ts_" in name}
    assert by_step == {
        "rollout_corr/logprob_abs_diff/ts_500": pytest.approx(0.0),
        "rollout_corr/logprob_abs_diff/ts_700": pytest.approx((0.3 + 0.5) / 2),
        "rollout_corr/logprob_abs_diff/ts_900": pytest.approx((0.1 + 0.2) / 2),
    }


def test_timesteps_of_one_name_share_their_mean():
    """Six digits do not tell 999.1231 from 999.1234: one mean over three elements, not the last one's."""
    p = torch.tensor([[0.1, -0.3], [0.5, 0.2]], dtype=torch.float64)
    q, timesteps = torch.zeros_like(p), torch.tensor([[999.1231, 500.0], [999.1234, 999.1234]], dtype=torch.float64)
    expected = {
        "rollout_corr/logprob_abs_diff/ts_500": pytest.approx(0.3),
        "rollout_corr/logprob_abs_diff/ts_999.123": pytest.approx((0.1 + 0.5 + 0.2) / 3),
    }
    accumulated = MetricAccumulator()
    for row in (slice(0, 1), slice(1, 2)):
        accumulated.add(
            compute_rollout_correction(
                p[row], q[row], config=RolloutCorrectionConfig.disabled(), timesteps=timesteps[row]
            )
        )
    for metrics in (compute_offpolicy_metrics(p, q, timesteps=timesteps), accumulated.compute()):
        assert {name: value for name, value in metrics.items() if "/ts_" in name} == expected


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_timestep_that_is_no_number_is_an_error_where_it_counts(wrong):
    p, timesteps = torch.zeros(2, 2), torch.tensor([[900.0, wrong], [900.0, 700.0]])
    with pytest.raises(ValueError, match=f"timesteps: got {wrong} for a valid element; give finite numbers"):
        compute_offpolicy_metrics(p, p, timesteps=timesteps)
    masked = compute_offpolicy_metrics(p, p, torch.tensor([[1, 0], [1, 1]]), timesteps=timesteps)
    assert sum("/ts_" in name for name in masked) == 2


# One transfer.


class _Transfers(torch.overrides.TorchFunctionMode):
    """Notes the calls that would make the host wait for the device."""

    WAITS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.device_waits: list[str] = []
        self.to_host = 0
        self._on_host: set[int] = set()
        self._alive: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        target = kwargs.get("device", args[1] if len(args) > 1 and isinstance(args[1], str) else None)
        moves = name == "cpu" or (name == "to" and target is not None and torch.device(target).type == "cpu")
        if moves:
            self.to_host += 1
            self._mark(out)
        elif any(id(a) in self._on_host for a in _tensors(args)):
            self._mark(out)  # computed from what was moved already
        elif name in self.WAITS:
            self.device_waits.append(name)
        return out

    def _mark(self, out) -> None:
        for tensor in _tensors((out,)):
            self._on_host.add(id(tensor))
            self._alive.append(tensor)


def _tensors(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_tensors(value))
    return found


@pytest.mark.parametrize("shape", [(12, 2), (6, 300), (40, 4000)])
@pytest.mark.parametrize("config", [EVERYTHING, RolloutCorrectionConfig(), RolloutCorrectionConfig.geo_rs()])
def test_one_transfer_per_call(config, shape):
    # As on an accelerator, where looking whether the mask has a gap would be a transfer.
    p, q, mask = reference.random_case(2, *shape, dtype=torch.float32)
    timesteps = torch.full(shape, 500.0)
    compute_rollout_correction(p, q, mask, config=config)
    for given in (None, mask):
        with _Transfers() as transfers:
            compute_rollout_correction(p, q, given, config=config, timesteps=timesteps)
        assert transfers.to_host == 1
        assert transfers.device_waits == []


@pytest.mark.gpu
def test_one_synchronisation_on_a_gpu():
    p, q, mask = (t.cuda() for t in reference.random_case(2, 64, 8, dtype=torch.float32))
    compute_rollout_correction(p, q, mask, config=EVERYTHING)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compute_rollout_correction(p, q, mask, config=EVERYTHING)
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert len(copies) == 1


@pytest.mark.portable
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("shift", [-12.0, -9.0, -3.0, -0.01, 0.5])
def test_small_weights_keep_their_figures_in_float32(shift, level):
    """Weights near 0 do not drown in 1 - 1, nor weights near 1 in their own rounding."""
    generator = torch.Generator().manual_seed(0)
    p = shift + 0.3 * torch.randn(64, 1, generator=generator)
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=10.0)
    metrics = compute_rollout_correction(p, torch.zeros_like(p), config=config).metrics
    w = p.double().exp()
    for name, value in (
        ("mean", w.mean()),
        ("std", w.std(correction=0)),
        ("eff_sample_size", w.mean() ** 2 / (w**2).mean()),
    ):
        assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(value.item(), rel=1e-5, abs=0), name


# slime's names.


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("mode", "threshold", "lower", "upper"),
    [
        ("truncate", 1.3, 0.0, 1.3),
        ("clip", "0.6_1.3", 0.6, 1.3),
        ("mask", "0.6_1.3", 0.6, 1.3),
        ("clip", "0_1.3", 0.0, 1.3),
        ("mask", "0_1.3", 0.0, 1.3),
    ],
)
def test_slime_names(level, mode, threshold, lower, upper):
    p, q, mask = reference.random_case(8, 10, 6)
    valid = reference.valid_table(mask, p)
    form = {"level": level, "mode": mode, "lower": lower, "upper": upper, "batch_normalize": True}
    weights = reference.importance(reference.log_ratios(p, q), valid, **form)
    result = compute_rollout_correction_and_rejection_mask(
        p,
        q,
        mask,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_mode=mode,
        rollout_is_batch_normalize=True,
        rollout_token_veto_threshold=0.5,
    )
    defined = reference.metrics(p, q, mask, weights=weights, veto_threshold=0.5, **form)
    plain = {k.removeprefix("rollout_corr/"): v for k, v in defined.items()}
    shared = ("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl", "kl", "k3_kl")
    raw = reference.flat(weights.raw, valid)
    expected = {f"mismatch_{n}": plain[n] for n in (*shared, "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")}
    expected |= {
        "train_rollout_logprob_abs_diff": plain["logprob_abs_diff_mean"],
        "mis_mean_is_weight_before_clip": reference.mean(raw),
        "mis_ratio_mean_after_mis": plain["rollout_is_mean"],
        "mis_batch_norm_factor": plain["rollout_is_batch_norm_factor"],
        "mis_catastrophic_token_fraction": plain["rollout_is_catastrophic_token_fraction"],
        "mis_catastrophic_seq_fraction": plain["rollout_is_veto_fraction"],
        "ois": 1.25,
    }
    high, low = (reference.mean([float(w > upper) for w in raw]), reference.mean([float(w < lower) for w in raw]))
    if mode == "truncate":
        expected["mis_truncate_fraction"] = high
    else:
        expected |= {f"mis_{mode}_fraction_low": low, f"mis_{mode}_fraction_high": high}
    _assert_metrics(slime_metrics(result, ppo_ratio_mean=1.25), expected)
    assert slime_metrics(result.moments) == {k: v for k, v in slime_metrics(result).items() if k != "ois"}
