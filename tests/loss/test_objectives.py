"""The objectives: hand-worked numbers, a float64 loop, gradients, and the table of modes cell by cell."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.batch import apply_rollout_correction_to_diffusion_batch
from flowgrpo_rc.loss import diffusion_loss, diffusion_loss_sums, ppo_clip, reinforce

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def config(rc=None, **loss):
    return DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(**{"clip_ratio": 0.2, **loss}),
        rollout_correction=rc if rc is not None else {"rollout_is": None},
    )


def random_batch(seed=0, b=6, w=2, spread=0.3):
    """Log-probs of three policies, a few tenths apart, and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.randn(b, w, generator=generator, dtype=F64)
    old = rollout + spread * torch.randn(b, w, generator=generator, dtype=F64)
    new = old + spread * torch.randn(b, w, generator=generator, dtype=F64)
    advantages = torch.randn(b, generator=generator, dtype=F64)
    return new, {"old_log_probs": old, "rollout_log_probs": rollout, "advantages": advantages}


def gradient(cfg, log_probs, data):
    log_probs = log_probs.clone().requires_grad_()
    loss, metrics = diffusion_loss(cfg, {"log_probs": log_probs}, data)
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


# ---------------------------------------------------------------- element by element


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        # clip_low = .1, clip_high = .3: the band is [.9, 1.3]
        (2.0, 1.2, -2.4, -2.4),  # inside: -A r, slope -A r
        (2.0, 1.5, -2.6, 0.0),  # too high with A > 0: -A 1.3, no slope
        (2.0, 0.5, -1.0, -1.0),  # too low with A > 0: max(-1, -1.8) = -1, still pulls back
        (-2.0, 1.5, 3.0, 3.0),  # too high with A < 0: max(3, 2.6)
        (-2.0, 0.5, 1.8, 0.0),  # too low with A < 0: -A .9
        (-2.0, 0.95, 1.9, 1.9),  # inside
    ],
)
def test_ppo_clip_by_hand(advantage, ratio, loss, slope):
    log_prob = tensor(math.log(ratio) - 1.0).requires_grad_()
    terms = ppo_clip(log_prob, tensor(-1.0), tensor(advantage), clip_low=0.1, clip_high=0.3)
    terms.loss.sum().backward()
    assert_close(terms.loss.detach(), tensor(loss))
    assert_close(log_prob.grad, tensor(slope))


def test_reinforce_by_hand():
    # -A * log_prob * w = -(2)(-3)(.5) = 3, slope -A w = -1
    log_prob = tensor(-3.0).requires_grad_()
    terms = reinforce(log_prob, tensor(-2.5), tensor(2.0), weights=tensor(0.5))
    terms.loss.sum().backward()
    assert_close(terms.loss.detach(), tensor(3.0))
    assert_close(log_prob.grad, tensor(-1.0))
    assert_close(terms.log_ratio, tensor(-0.5))


def test_smooth_objectives_pass_gradcheck():
    generator = torch.Generator().manual_seed(0)
    old, advantages, weights = torch.randn(3, 5, generator=generator, dtype=F64)
    new = (old + 0.01).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old, advantages, clip_low=0.5, clip_high=0.5, weights=weights).loss, new
    )
    assert torch.autograd.gradcheck(lambda x: reinforce(x, old, advantages, weights=weights).loss, new)


@pytest.mark.parametrize("value", [1e4, math.inf, math.nan])
@pytest.mark.parametrize("objective", ["ppo_clip", "reinforce"])
def test_what_is_rejected_cannot_poison_loss_or_gradient(objective, value):
    log_prob = tensor(value, -1.0).requires_grad_()
    keep = torch.tensor([False, True])
    arguments = (log_prob, tensor(-1.0, -1.1), tensor(-1.0, 1.0))
    if objective == "ppo_clip":
        terms = ppo_clip(*arguments, clip_low=0.2, clip_high=0.2, keep=keep, weights=tensor(0.0, 1.0))
    else:
        terms = reinforce(*arguments, keep=keep, weights=tensor(0.0, 1.0))
    terms.loss.sum().backward()
    assert terms.loss[0] == 0
    assert log_prob.grad[0] == 0
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(log_prob.grad).all()


def test_kept_overflow_is_bounded():
    """An exponent of 1e4 is clamped to 20; with a negative advantage the loss is large, finite, and its slope 0."""
    log_prob = tensor(1e4).requires_grad_()
    terms = ppo_clip(log_prob, tensor(0.0), tensor(-1.0), clip_low=0.2, clip_high=0.2)
    terms.loss.sum().backward()
    assert_close(terms.loss.detach(), tensor(math.exp(20)))
    assert log_prob.grad.item() == 0


# ---------------------------------------------------------------- whole batches against a loop


def loop_reference(new, data, *, bypass, loss_type, band, is_upper, normalization, clip=0.2):
    """Sequence IS (truncated), seq_mean_k1 rejection; plain floats, straight from the formulas."""
    b, w = new.shape
    total, kept_count = 0.0, 0
    for i in range(b):
        anchor = data["rollout_log_probs"] if bypass else data["old_log_probs"]
        policy = new if bypass else data["old_log_probs"]
        gaps = [float(policy[i, j] - data["rollout_log_probs"][i, j]) for j in range(w)]
        keep = band[0] <= math.exp(sum(gaps) / w) <= band[1]
        weight = min(math.exp(sum(gaps)), is_upper)
        for j in range(w):
            if not keep:
                continue
            kept_count += 1
            advantage = float(data["advantages"][i])
            if bypass and loss_type == "reinforce":
                total += -advantage * float(new[i, j]) * weight
                continue
            ratio = math.exp(float(new[i, j] - anchor[i, j]))
            element = max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip))
            total += element * (1.0 if bypass else weight)
    return total / (kept_count if normalization == "kept" else b * w)


@pytest.mark.parametrize("normalization", ["all", "kept"])
@pytest.mark.parametrize(("bypass", "loss_type"), [(False, "ppo_clip"), (True, "ppo_clip"), (True, "reinforce")])
def test_every_mode_equals_the_loop(bypass, loss_type, normalization):
    rc = {
        "bypass_mode": bypass,
        "loss_type": loss_type,
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.3,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.8_1.15",
        "rejection_normalization": normalization,
    }
    for seed in range(5):
        new, data = random_batch(seed, b=12)
        settings = {"band": (0.8, 1.15), "is_upper": 1.3, "normalization": normalization}
        expected = loop_reference(new, data, bypass=bypass, loss_type=loss_type, **settings)
        if not bypass:
            data, _ = apply_rollout_correction_to_diffusion_batch(data, config(rc).rollout_correction)
            data["rollout_is_weights"] = data["rollout_is_weights"].double()
        loss, _, metrics = gradient(config(rc), new, data)
        assert_close(loss.item(), expected, atol=1e-6, rtol=1e-6)
        assert 0 < metrics["actor/kept_fraction"] < 1


# ---------------------------------------------------------------- the table of modes, cell by cell


def test_decoupled_weights_come_from_the_batch_and_stay():
    new, data = random_batch()
    data["rollout_is_weights"] = torch.full((6, 2), 0.5, dtype=F64)
    half, half_gradient, _ = gradient(config(), new, data)
    whole, whole_gradient, _ = gradient(config(), new, {k: v for k, v in data.items() if k != "rollout_is_weights"})
    assert_close(half, whole / 2)
    assert_close(half_gradient, whole_gradient / 2)
    # the rollout policy does not enter again: the weights are fixed over mini-steps
    moved = {**data, "rollout_log_probs": data["rollout_log_probs"] + 5}
    assert_close(gradient(config(), new, moved)[0], half, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence", None])
def test_weights_do_not_enter_bypass_ppo_clip(level):
    new, data = random_batch()
    loss, slope, metrics = gradient(config({"bypass_mode": True, "rollout_is": level}), new, data)
    plain = {"old_log_probs": data["rollout_log_probs"], "advantages": data["advantages"]}
    expected, expected_slope, _ = gradient(config(), new, plain)
    assert_close(loss, expected, rtol=0, atol=0)
    assert_close(slope, expected_slope, rtol=0, atol=0)
    assert ("actor/rollout_corr/rollout_is_mean" in metrics) is (level is not None)


def test_bypass_ppo_clip_rejects_by_the_current_policy():
    """Row 0 has pi_theta/pi_rollout = 1.9 a step, outside [.6, 1.4]; row 1 has 1/1.5 = .667, inside; row 2 is 1.5."""
    rollout = torch.zeros(3, 2, dtype=F64)
    new = torch.log(tensor(1.9, 1 / 1.5, 1.5))[:, None].expand(3, 2)
    data = {"rollout_log_probs": rollout, "old_log_probs": rollout, "advantages": tensor(1.0, 1.0, 1.0)}
    rc = {"bypass_mode": True, "rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_1.4"}
    loss, slope, metrics = gradient(config(rc, clip_ratio=10.0), new, data)
    assert slope.ne(0).tolist() == [[False, False], [True, True], [False, False]]
    assert_close(loss, tensor(-(2 / 1.5) / 6)[0])
    assert_close(metrics["actor/kept_fraction"], 1 / 3)


def test_bypass_reinforce_weighs_by_the_current_policy():
    rollout = torch.zeros(2, 1, dtype=F64)
    new = torch.log(tensor(1.5, 0.5))[:, None]
    data = {"rollout_log_probs": rollout, "advantages": tensor(1.0, -1.0)}
    rc = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2}
    loss, slope, _ = gradient(config(rc), new, data)
    # weights min(1.5, 1.2) = 1.2 and .5, detached: slopes -A w / 2
    assert_close(slope, tensor(-0.6, 0.25)[:, None], atol=1e-7, rtol=1e-6)
    assert_close(loss, tensor((-1.2 * math.log(1.5) + 0.5 * math.log(0.5)) / 2)[0], atol=1e-7, rtol=1e-6)


def test_sequence_criteria_see_the_trajectory_with_two_dimensions_and_a_step_with_one():
    """Steps of ratio 2 and 1/2: together their geometric mean is 1, alone both are outside [.7, 1.5]."""
    rollout, new = torch.zeros(1, 2, dtype=F64), torch.log(tensor(2.0, 0.5))[None]
    rc = {"bypass_mode": True, "rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.5"}
    data = {"rollout_log_probs": rollout, "advantages": tensor(1.0)}
    assert gradient(config(rc), new, data)[2]["actor/kept_fraction"] == 1.0
    for step in range(2):
        alone = {"rollout_log_probs": rollout[:, step], "advantages": tensor(1.0)}
        with pytest.warns(UserWarning, match="rejected every element"):
            assert gradient(config(rc), new[:, step], alone)[2]["actor/kept_fraction"] == 0.0


def test_steps_together_equal_steps_alone_for_step_level_criteria():
    new, data = random_batch(b=8)
    rc = {"bypass_mode": True, "rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.15"}
    _, together, _ = gradient(config(rc), new, data)
    for step in range(2):
        alone = {k: v if v.dim() == 1 else v[:, step] for k, v in data.items()}
        _, slope, _ = gradient(config(rc), new[:, step], alone)
        assert_close(together[:, step], slope / 2)


# ---------------------------------------------------------------- sums, edges, errors


@pytest.mark.parametrize("bypass", [True, False])
def test_micro_batches_add_up(bypass):
    rc = {
        "bypass_mode": bypass,
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.8_1.15",
        "rejection_normalization": "kept",
    }
    cfg = config(rc)
    new, data = random_batch(b=10)
    if not bypass:
        data, _ = apply_rollout_correction_to_diffusion_batch(data, cfg.rollout_correction)
    whole = diffusion_loss_sums(cfg, {"log_probs": new}, data)
    parts = [
        diffusion_loss_sums(cfg, {"log_probs": new[rows]}, {k: v[rows] for k, v in data.items()})
        for rows in torch.arange(10).split(3)
    ]
    assert_close(sum(p.loss_sum for p in parts), whole.loss_sum)
    assert_close(sum(p.denominator for p in parts), whole.denominator)
    merged = parts[0].metrics
    for part in parts[1:]:
        merged = merged + part.metrics
    assert merged.compute() == pytest.approx(whole.metrics.compute())


def test_metrics_equal_their_definitions():
    new, data = random_batch(b=50, spread=0.5)
    data.pop("rollout_log_probs")
    _, _, metrics = gradient(config(clip_ratio_low=0.1, clip_ratio_high=0.3), new, data)
    log_ratio = new - data["old_log_probs"]
    ratio, advantages = log_ratio.exp(), data["advantages"][:, None].expand_as(log_ratio)
    high, low = ratio > 1.3, ratio < 0.9
    expected = {
        "actor/ppo_kl": -log_ratio.mean(),
        "actor/log_ratio_abs_mean": log_ratio.abs().mean(),
        "actor/ratio_mean": ratio.mean(),
        "actor/ratio_min": ratio.min(),
        "actor/ratio_max": ratio.max(),
        "actor/pg_clipfrac_higher": high.double().mean(),
        "actor/pg_clipfrac_lower": low.double().mean(),
        "actor/pg_clipfrac": (high | low).double().mean(),
        "actor/pg_clipfrac_inert": ((high & (advantages > 0)) | (low & (advantages < 0))).double().mean(),
        "actor/kept_fraction": torch.ones(()),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-6), name
    assert metrics["actor/pg_clipfrac_higher"] != metrics["actor/pg_clipfrac_lower"]


def test_everything_rejected_is_zero_with_zero_gradients():
    new, data = random_batch()
    for normalization in ("all", "kept"):
        rc = {
            "bypass_mode": True,
            "rollout_is": None,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "50_60",
            "rejection_normalization": normalization,
        }
        with pytest.warns(UserWarning, match="rejected every element of this batch"):
            loss, slope, metrics = gradient(config(rc), new, data)
        assert loss.item() == 0.0
        assert slope.eq(0).all()
        assert metrics["actor/kept_fraction"] == 0.0


def test_advantages_are_clamped():
    new, data = random_batch(b=2)
    data["advantages"] = tensor(100.0, -100.0)
    clamped = {**data, "advantages": tensor(1.5, -1.5)}
    cfg = config(adv_clip_max=1.5)
    assert_close(gradient(cfg, new, data)[0], gradient(cfg, new, clamped)[0], rtol=0, atol=0)


def test_kl_to_the_reference_is_added_with_its_coefficient():
    new, data = random_batch(b=2)
    generator = torch.Generator().manual_seed(3)
    mean, reference = torch.randn(2, 2, 2, 4, generator=generator, dtype=F64)
    std = torch.tensor([[0.5, 1.0], [2.0, 0.1]], dtype=F64)
    output = {"transition_means": mean, "ref_transition_means": reference, "transition_stds": std}
    cfg = config()
    cfg.use_kl_loss, cfg.kl_loss_coef = True, 0.25
    plain = gradient(config(), new, data)[0]
    loss, metrics = diffusion_loss(cfg, {"log_probs": new, **output}, data)
    kl = (((mean - reference) ** 2).mean(-1) / (2 * std**2)).mean()
    assert_close(loss, plain + 0.25 * kl)
    assert metrics["actor/kl_loss"] == pytest.approx(kl.item())


def test_containers_and_inputs():
    """dict and TensorDict agree; nothing that was passed in changes; only log_probs gets a gradient."""
    new, data = random_batch()
    rc = {"bypass_mode": True, "rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    before = {k: v.clone() for k, v in data.items()}
    for value in data.values():
        value.requires_grad_()
    loss, slope, _ = gradient(config(rc), new, data)
    assert all(v.grad is None for v in data.values())
    plain = {k: v.detach() for k, v in data.items()}
    again, other, _ = gradient(config(rc), new, TensorDict(plain, batch_size=[6]))
    assert_close(loss, again, rtol=0, atol=0)
    assert_close(slope, other, rtol=0, atol=0)
    assert all(torch.equal(before[k], plain[k]) for k in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": None}, r"data lacks 'advantages'; it holds: old_log_probs, rollout_log_probs"),
        ({"old_log_probs": None}, "data lacks old_log_probs; it holds"),
        ({"old_log_probs": torch.zeros(6, 3)}, r"old_log_probs has shape \(6, 3\) but log_probs has \(6, 2\)"),
        ({"advantages": torch.zeros(5)}, r"advantages has shape \(5,\); expected \(6,\) or \(6, 2\)"),
        ({"rollout_is_weights": torch.ones(6)}, r"rollout_is_weights has shape \(6,\) but log_probs has \(6, 2\)"),
    ],
)
def test_errors_name_the_key(change, message):
    new, data = random_batch()
    data = {k: v for k, v in {**data, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        diffusion_loss(config(), {"log_probs": new}, data)


def test_missing_model_output_is_named():
    new, data = random_batch()
    with pytest.raises(ValueError, match="model_output lacks 'log_probs'"):
        diffusion_loss(config(), {"log_prob": new}, data)
    cfg = config()
    cfg.use_kl_loss = True
    with pytest.raises(ValueError, match="lacks 'transition_means'"):
        diffusion_loss(cfg, {"log_probs": new}, data)


def test_non_finite_log_prob_in_bypass_is_an_error():
    new, data = random_batch()
    new[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"1 of 12 positions .* the first is \(2, 1\)"):
        diffusion_loss(config({"bypass_mode": True}), {"log_probs": new}, data)
