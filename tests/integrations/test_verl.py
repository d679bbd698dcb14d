"""The verl drop-in against verl 0.9.1 itself."""

import inspect
import math
import random

import pytest
import torch
from torch import Tensor

from flowgrpo_rc.integrations import verl as ours

pytest.importorskip("verl")
theirs = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

K1 = ("0.6_1.4", "0.9_1.05", "0.5_2.0", "1.3", "0.7_3.0", "1.01_1.2")
UPPER = {"k2": ("0.02", "0.3", "0.001"), "k3": ("0.02", "0.3", "0.001")}


def _case(seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, object]]:
    """A batch and options: lengths, masks, dtypes and thresholds all drawn from `seed`."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    rows, columns = rng.choice([(1, 1), (5, 1), (16, 2), (7, 10), (3, 70), (2, 300)])
    spread, shift = rng.choice([0.01, 0.1, 0.5, 2.0]), rng.choice([0.0, 0.05, -0.3])
    p = -2.0 * torch.rand(rows, columns, generator=g)
    q = p - shift - spread * torch.randn(rows, columns, generator=g)
    mask = (torch.rand(rows, columns, generator=g) < rng.choice([1.1, 0.7, 0.3])).to(
        rng.choice([torch.float32, torch.int64, torch.bool])
    )
    mask[0, 0] = 1
    options = rng.sample(ours.RS_OPTIONS, rng.choice([0, 1, 1, 2, 3, 4]))
    entries = [rng.choice(K1 if o.endswith("k1") else UPPER[o[-2:]]) for o in options]
    return (p, q, mask), {
        "rollout_is": rng.choice([None, "token", "sequence"]),
        "rollout_is_threshold": rng.choice([2.0, 1.05, 0.8, "3.0", "0.5_1.7", "0.95_1.02", "1.1_4.0"]),
        "rollout_is_batch_normalize": rng.random() < 0.3,
        "rollout_rs": ",".join(options) or None,
        "rollout_rs_threshold": ",".join(entries) or None,
    }


@pytest.mark.parametrize("block", range(20))
def test_agrees_with_verl_on_random_configurations(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        (p, q, mask), options = _case(seed)
        try:
            expected = theirs.compute_rollout_correction_and_rejection_mask(p, q, mask, **options)
            exact = theirs.compute_rollout_correction_and_rejection_mask(p.double(), q.double(), mask, **options)
        except ZeroDivisionError:  # verl's effective sample size, when every weight is zero
            continue
        actual = ours.compute_rollout_correction_and_rejection_mask(p, q, mask, **options)
        about = f"seed {seed}: {options}"
        assert (expected[0] is None) == (actual[0] is None), about
        if expected[0] is not None:
            weights, verl_weights = (proto.batch["rollout_is_weights"] for proto in (actual[0], expected[0]))
            torch.testing.assert_close(
                weights, verl_weights, rtol=1e-5, atol=1e-9, msg=lambda m, about=about: f"{m}\n{about}"
            )
        assert torch.equal(actual[1], expected[1]), about
        assert actual[1].dtype == expected[1].dtype
        _check_metrics(actual[2], expected[2], 1e-4, about, exact=False)  # verl in float32, with its rounding
        _check_metrics(actual[2], exact[2], 2e-6, about, exact=True)


def _check_metrics(
    actual: dict[str, float], expected: dict[str, float], absolute: float, about: str, *, exact: bool
) -> None:
    for name, value in expected.items():
        assert math.isfinite(actual[name])
        if (name.endswith("eff_sample_size") and value > 1.001) or not math.isfinite(value):
            continue  # an overflow of verl's, or its 1e-8 in a denominator that is smaller still
        if name.endswith("_std") and not exact:  # a difference of squares of float32 figures, in verl worse
            continue
        within = 1e-4 if name.endswith("_std") else absolute
        close = math.isclose(actual[name], value, rel_tol=1e-4, abs_tol=within)
        assert close, f"{name}: {actual[name]}, verl {value}; {about}"


def _same(actual: dict[str, float], expected: dict[str, float]) -> None:
    _check_metrics(actual, expected, 1e-4, "", exact=False)


def test_the_parts_agree_with_verl() -> None:
    (p, q, mask), _ = _case(7)
    log_ratio = p - q
    for threshold in (1.3, "0.8_1.4"):
        weights, metrics = ours.compute_rollout_correction_weights(log_ratio, mask, "sequence", threshold, True)
        expected, expected_metrics = theirs.compute_rollout_correction_weights(
            log_ratio, mask, "sequence", threshold, True
        )
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-9)
        _same(metrics, expected_metrics)
    kept, metrics = ours.compute_rollout_rejection_mask(log_ratio, mask, "seq_mean_k1,token_k2", "0.6_1.3,0.2")
    expected, expected_metrics = theirs.compute_rollout_rejection_mask(
        log_ratio, mask, "seq_mean_k1,token_k2", "0.6_1.3,0.2"
    )
    assert torch.equal(kept, expected)
    _same(metrics, expected_metrics)
    assert set(metrics) == set(expected_metrics)
    _same(ours.compute_offpolicy_metrics(p, q, mask), theirs.compute_offpolicy_metrics(p, q, mask))
    _same(ours.compute_offpolicy_metrics(p, None, mask), theirs.compute_offpolicy_metrics(p, None, mask))
    _same(
        ours.compute_rollout_corr_metrics_from_logprobs(p, q, mask),
        theirs.compute_rollout_corr_metrics_from_logprobs(p, q, mask),
    )


def test_every_public_function_is_there_with_verls_signature() -> None:
    own = {name: f for name, f in vars(theirs).items() if inspect.isfunction(f) and f.__module__ == theirs.__name__}
    for name, function in own.items():
        if name.startswith("_"):
            continue
        made, expected = (inspect.signature(f).parameters.values() for f in (getattr(ours, name), function))
        assert [(p.name, p.kind, p.default) for p in made] == [(p.name, p.kind, p.default) for p in expected], name
        assert name in ours.__all__


@pytest.mark.parametrize("seed", range(40))
def test_metric_helpers_agree_with_verl(seed: int) -> None:
    """On what verl itself hands to them, taken down during one of its calls, in both precisions."""
    (p, q, mask), options = _case(seed)
    options |= {"rollout_is": ("token", "sequence")[seed % 2], "rollout_rs": ",".join(ours.RS_OPTIONS)}
    options["rollout_rs_threshold"] = ",".join("0.6_1.4" if o.endswith("k1") else "0.02" for o in ours.RS_OPTIONS)
    calls = []

    def noting(name: str):
        original = getattr(theirs, name)

        def call(*args, **kwargs):
            metrics = original(*args, **kwargs)
            calls.append((name, args, kwargs, dict(metrics)))
            return metrics

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("compute_is_metrics", "compute_rs_metrics"):
            patch.setattr(theirs, name, noting(name))
        for dtype in (torch.float32, torch.float64):
            before = len(calls)
            try:
                theirs.compute_rollout_correction_and_rejection_mask(p.to(dtype), q.to(dtype), mask, **options)
            except ZeroDivisionError:  # verl's effective sample size, when every weight is zero
                continue
            assert len(calls) == before + 1 + len(ours.RS_OPTIONS)
    for name, args, kwargs, expected in calls:
        actual = getattr(ours, name)(*args, **kwargs)
        assert set(actual) == set(expected)
        exact = any(torch.is_tensor(x) and x.dtype == torch.float64 for x in (*args, *kwargs.values()))
        _check_metrics(actual, expected, 2e-6 if exact else 1e-4, f"seed {seed}: {name}", exact=exact)


def test_metric_helpers_where_verl_fails() -> None:
    zero, mask = torch.zeros(2, 3), torch.ones(2, 3)
    arguments = (zero, zero + 9.0, zero + 2.2, mask, "token", 2.0, 0.5)
    with pytest.raises(ZeroDivisionError):
        theirs.compute_is_metrics(*arguments)
    metrics = ours.compute_is_metrics(*arguments)
    assert (metrics["rollout_is_eff_sample_size"], metrics["rollout_is_ratio_fraction_high"]) == (0.0, 1.0)
    for module in (theirs, ours):
        with pytest.raises(ValueError, match="response_mask"):
            module.compute_is_metrics(zero, zero, zero, zero, "token", 2.0)


def test_the_band_is_verls() -> None:
    """A ratio of 1.5 lies outside "0.6_1.4", but inside its mirror image [0.714, 1.667]."""
    log_ratio, mask = torch.tensor([[1.5, 0.65, 1.0]]).log(), torch.ones(1, 3)
    kept, _ = ours.compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.6_1.4")
    assert kept.tolist() == [[1.0, 0.0, 1.0]]
    assert torch.equal(kept, theirs.compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.6_1.4")[0])


def test_finite_where_verl_overflows() -> None:
    p, q, mask = torch.tensor([[0.0, -100.0]]), torch.tensor([[-100.0, 0.0]]), torch.ones(1, 2)
    expected = theirs.compute_offpolicy_metrics(p * 2, q * 2, mask)
    assert math.isinf(expected["k3_kl"])
    assert all(math.isfinite(v) for v in ours.compute_offpolicy_metrics(p * 2, q * 2, mask).values())


def test_a_batch_gets_mask_and_weights() -> None:
    from omegaconf import OmegaConf
    from verl.protocol import DataProto

    (p, q, _), _ = _case(11)
    mask = torch.ones_like(p)
    config = OmegaConf.create({"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"})
    made = []
    for module in (ours, theirs):
        proto = DataProto.from_dict({"old_log_probs": p, "rollout_log_probs": q, "response_mask": mask})
        made.append(module.compute_rollout_correction_and_add_to_batch(proto, config))
    torch.testing.assert_close(made[0][0].batch["rollout_is_weights"], made[1][0].batch["rollout_is_weights"])
    assert torch.equal(made[0][0].batch["response_mask"], made[1][0].batch["response_mask"])
    _same(made[0][1], made[1][1])


def test_bypass_sets_the_loss() -> None:
    from omegaconf import OmegaConf
    from verl.protocol import DataProto

    proto = DataProto.from_dict({"rollout_log_probs": torch.zeros(2, 3)})
    loss = OmegaConf.create({"loss_mode": "vanilla"})
    ours.apply_bypass_mode(proto, OmegaConf.create({"bypass_mode": True}), loss)
    assert torch.equal(proto.batch["old_log_probs"], torch.zeros(2, 3))
    assert loss.loss_mode == "bypass_mode"
    assert loss.rollout_correction.bypass_mode
    with pytest.raises(ValueError, match="rollout_log_probs"):
        ours.apply_bypass_mode(DataProto.from_dict({"old_log_probs": torch.zeros(2, 3)}), None, loss)


def test_install_replaces_and_undo_restores() -> None:
    before = theirs.compute_offpolicy_metrics
    replacement = ours.install()
    try:
        assert theirs.compute_offpolicy_metrics is ours.compute_offpolicy_metrics
        assert theirs.compute_rollout_correction_and_rejection_mask is (
            ours.compute_rollout_correction_and_rejection_mask
        )
        assert "verl.trainer.ppo.rollout_corr_helper.apply_bypass_mode" in replacement.places
    finally:
        replacement.undo()
    assert theirs.compute_offpolicy_metrics is before


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {"rollout_is": "token", "rollout_is_threshold": True}),
        (ValueError, {"rollout_is": "token", "rollout_is_threshold": "2_1"}),
        (ValueError, {"rollout_is": "row"}),
        (ValueError, {"rollout_rs": "token_k1"}),
        (ValueError, {"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}),
        (ValueError, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0_1.5"}),
        (ValueError, {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.5"}),
    ],
)
def test_refuses_what_verl_refuses(error: type[Exception], options: dict[str, object]) -> None:
    for module in (theirs, ours):
        with pytest.raises(error, match="not a boolean" if error is TypeError else None):
            module.compute_rollout_correction_and_rejection_mask(
                torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2), **options
            )


@pytest.mark.parametrize(
    "options",
    [
        # verl's bounds of k1 are of rollout/train: a band that is the same both ways round.
        {"rollout_is": "token", "rollout_is_threshold": 1.005, "rollout_rs": "token_k1", "band": 0.98},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.005, "rollout_rs": "seq_mean_k1", "band": 0.9985},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.02, "rollout_rs": "seq_sum_k1", "band": 0.99},
        {"rollout_is": None, "rollout_rs": "seq_max_k3,token_k2", "rollout_rs_threshold": "0.0001,0.00001"},
    ],
    ids=lambda options: options["rollout_rs"],
)
def test_the_prompt_writer_learns_with_verls_numbers(options: dict[str, object]) -> None:
    """Tokens that a bfloat16 engine has recorded: mask and weights in decoupled mode, then the loss."""
    from types import SimpleNamespace

    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    from flowgrpo_rc import token_loss
    from flowgrpo_rc.batch import Key
    from flowgrpo_rc.writer import LanguageModel, PromptWriterConfig, WriterActor, WriterEngine

    options = dict(options)
    if low := options.pop("band", None):
        options["rollout_rs_threshold"] = f"{low}_{1 / low}"
    config = PromptWriterConfig(path="asset:tiny_writer", max_new_tokens=40, actor={"rollout_correction": options})
    torch.manual_seed(0)
    language = LanguageModel(config, "cpu")
    engine, actor = WriterEngine(language), WriterActor(language, 1)
    engine.adapter_version = 0  # an adapter of zeros, as the actor's
    batch = engine.write(["forty-two", "ninety"] * 8, list(range(16))).batch
    old = actor.score(batch)
    mask, rollout = batch[Key.RESPONSE_MASK], batch[Key.ROLLOUT_LOG_PROBS]
    expected = theirs.compute_rollout_correction_and_rejection_mask(old.log_probs, rollout, mask, **options)
    weights = None if expected[0] is None else expected[0].batch["rollout_is_weights"]
    kept = expected[1].bool()
    corrected, gap = actor.correct(batch, old)
    assert 0.2 < float(kept.sum() / mask.sum()) < 1
    assert torch.equal(corrected.keep & mask, kept)
    torch.testing.assert_close(
        corrected.weights[kept],
        torch.ones_like(rollout)[kept] if weights is None else weights[kept],
        rtol=1e-5,
        atol=1e-7,
    )
    figures = gap.compute()
    # Figures of one k1 criterion are of the ratio the other way round.
    _same(figures, {name: value for name, value in expected[2].items() if "_k1_" not in name})
    assert figures["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - int(kept.sum()) / int(mask.sum()))
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(16, 1, generator=generator).expand_as(rollout)
    log_probs = old.log_probs + 0.3 * torch.randn(rollout.shape, generator=generator)
    data = {Key.RESPONSE_MASK: mask, Key.ADVANTAGES: advantages, Key.ROLLOUT_LOG_PROBS: rollout}
    found, _ = token_loss(config.actor, {"log_probs": log_probs}, data | corrected.batch_keys())
    clip = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        get=lambda name, default: {"clip_ratio_c": 3.0}.get(name, default),
        global_batch_info={},
    )
    loss, _ = compute_policy_loss_vanilla(
        old.log_probs, log_probs, advantages, kept.float(), config=clip, rollout_is_weights=weights
    )
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-7)
