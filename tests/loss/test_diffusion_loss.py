"""The actor's loss: a slow float64 loop in every mode, the table of modes cell by cell, sums, edges and ranks."""

import math
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loss_cases import BAND, EXACT, F64, MODES, accumulated, assert_inputs_stay, loop_correction, on_two_ranks, tensor
from tensordict import TensorDict
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.batch import apply_rollout_correction_to_diffusion_batch
from flowgrpo_rc.loss import diffusion_loss, diffusion_loss_sums, token_loss

NORMALIZATIONS = ("all", "kept")


def make_config(mode="decoupled", rc=None, kl=None, **loss):
    """Band of the policy ratio [.9, 1.3], advantages up to 1.5, no correction but what `rc` says."""
    return DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(
            **{"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "adv_clip_max": 1.5, **loss}
        ),
        rollout_correction={**MODES[mode], **(rc or {})},
        use_kl_loss=kl is not None,
        kl_loss_coef=kl or 0.0,
    )


def random_batch(seed=0, b=12, w=2, spread=0.2):
    """Log-probs of three policies, some tenths apart, and advantages of both signs, some beyond the clamp."""
    generator = torch.Generator().manual_seed(seed)
    shape = (b,) if w is None else (b, w)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=F64)

    rollout = draw(*shape)
    old = rollout + spread * draw(*shape)
    new = old + spread * draw(*shape)
    return new, {"old_log_probs": old, "rollout_log_probs": rollout, "advantages": draw(b)}


def with_correction(data, policy, rc):
    """`data` with the weights and the keep-mask that the loop makes of `policy` over the rollout."""
    weights, keep = loop_correction(policy, data["rollout_log_probs"], rc)
    return {**data, "rollout_is_weights": weights * keep, "rollout_keep": keep}


def prepared(mode, rc, new, data):
    """The trainer's batch; in decoupled mode it has its correction."""
    return with_correction(data, data["old_log_probs"], rc) if mode == "decoupled" else data


def run(config, log_probs, data, **model_output):
    """`loss, gradient, metrics`."""
    log_probs = log_probs.detach().clone().requires_grad_()
    loss, metrics = diffusion_loss(config, {"log_probs": log_probs, **model_output}, data)
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


def kl_output(seed, shape, latent=(3, 4)):
    generator = torch.Generator().manual_seed(seed)
    mean, reference = torch.randn(2, *shape, *latent, generator=generator, dtype=F64)
    std = torch.rand(shape, generator=generator, dtype=F64) + 0.5
    return {"transition_means": mean, "ref_transition_means": reference, "transition_stds": std}


# ---------------------------------------------------------------- the loop


def loop_loss(mode, rc, new, data, *, clip_low=0.1, clip_high=0.3, adv_clip_max=1.5):
    """`loss, gradient, kept fraction` from the formulas."""
    anchor = data["old_log_probs"] if mode == "decoupled" else data["rollout_log_probs"]
    weights, keep = loop_correction(
        data["old_log_probs"] if mode == "decoupled" else new, data["rollout_log_probs"], rc
    )
    total, kept, gradient = 0.0, 0, torch.zeros_like(new)
    for at in product(*map(range, new.shape)):
        if not keep[at]:
            continue
        kept += 1
        advantage = float(data["advantages"][at[0]])
        advantage = min(max(advantage, -adv_clip_max), adv_clip_max)
        weight = float(weights[at])
        if mode == "bypass reinforce":
            total += -advantage * float(new[at]) * weight
            gradient[at] = -advantage * weight
            continue
        weight = weight if mode == "decoupled" else 1.0
        ratio = math.exp(float(new[at] - anchor[at]))
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 1 - clip_low), 1 + clip_high)
        total += weight * max(plain, clipped)
        gradient[at] = weight * plain if plain >= clipped else 0.0
    denominator = kept if rc.get("rejection_normalization") == "kept" else new.numel()
    return tensor(total / denominator)[0], gradient / denominator, kept / new.numel()


CORRECTIONS = {
    "none": {},
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 1.1},
    "sequence IcePop": {"rollout_is": "sequence", "rollout_is_threshold": "0.8_1.3"},
    "geometric TIS, seq_mean_k1": {
        "rollout_is": "geometric",
        "rollout_is_threshold": 1.05,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.85_1.1",
    },
    "token TIS, token_k1": {"rollout_is": "token", "rollout_is_threshold": 1.05, **BAND},
    "sequence TIS, seq_sum_k1 and seq_max_k2": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.2,
        "rollout_rs": "seq_sum_k1,seq_max_k2",
        "rollout_rs_threshold": "0.6_1.3,0.04",
    },
    "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.02},
}


@pytest.mark.parametrize("w", [None, 3])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_the_loop(mode, correction, normalization, w):
    rc = {**CORRECTIONS[correction], "rejection_normalization": normalization}
    for seed in range(3):
        new, data = random_batch(seed, b=16, w=w)
        expected, gradient, kept = loop_loss(mode, rc, new, data)
        loss, slope, metrics = run(make_config(mode, rc), new, prepared(mode, rc, new, data))
        assert_close(loss, expected)
        assert_close(slope, gradient)
        assert metrics["actor/kept_fraction"] == pytest.approx(kept)
        assert metrics["actor/loss"] == metrics["actor/pg_loss"] == pytest.approx(expected.item())
        assert (0.1 < kept < 0.9) is ("rollout_rs" in rc)


def test_decoupled_equals_the_loop_with_the_correction_that_the_batch_functions_make():
    for seed, correction in enumerate(CORRECTIONS.values()):
        new, data = random_batch(seed, b=16, w=3)
        expected, gradient, _ = loop_loss("decoupled", correction, new, data)
        config = make_config("decoupled", correction)
        batch, _ = apply_rollout_correction_to_diffusion_batch(dict(data), config.rollout_correction)
        loss, slope, _ = run(config, new, batch)
        assert_close(loss, expected, rtol=1e-5, atol=1e-7)  # the batch's weights are float32
        assert_close(slope, gradient, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- by hand


def test_decoupled_by_hand():
    """Two images, two steps, clip [.9, 1.3].

    image 0, A = 1: ratio 1.5, weight .5: -1.3 * .5 = -.65, no slope; ratio 1.2, weight 2: -2.4, slope -2.4
    image 1, A = -9, clamped to -1.5: ratio .8, weight 1: 1.5 * .9 = 1.35, no slope; the other is rejected
    sum -1.7; over 4 elements -.425, over 3 kept -.5667
    """
    old = torch.zeros(2, 2, dtype=F64)
    new = torch.log(tensor([1.5, 1.2], [0.8, 3.0]))
    data = {
        "old_log_probs": old,
        "advantages": tensor(1.0, -9.0),
        "rollout_is_weights": tensor([0.5, 2.0], [1.0, 0.0]),
        "rollout_keep": torch.tensor([[True, True], [True, False]]),
    }
    loss, slope, metrics = run(make_config(), new, data)
    assert_close(loss, tensor(-0.425)[0])
    assert_close(slope, tensor([0.0, -0.6], [0.0, 0.0]))
    assert metrics["actor/kept_fraction"] == 0.75
    loss, slope, _ = run(make_config(rc={"rejection_normalization": "kept"}), new, data)
    assert_close(loss, tensor(-1.7 / 3)[0])
    assert_close(slope, tensor([0.0, -0.8], [0.0, 0.0]))


# ---------------------------------------------------------------- the table of modes: old_log_prob


def same(config, new, one, other):
    """Loss and gradient agree to the last bit."""
    assert_close(run(config, new, one)[:2], run(config, new, other)[:2], **EXACT)


def differ(config, new, one, other):
    assert abs(run(config, new, one)[0] - run(config, new, other)[0]) > 1e-3


@pytest.mark.parametrize("mode", ["bypass ppo_clip", "bypass reinforce"])
def test_bypass_ratio_is_over_the_rollout_policy(mode):
    new, data = random_batch()
    config = make_config(mode, {"rollout_is": "token", **BAND})
    differ(config, new, data, {**data, "rollout_log_probs": data["rollout_log_probs"] + 0.1})
    same(config, new, data, {**data, "old_log_probs": data["old_log_probs"] + 0.1})
    same(config, new, data, {k: v for k, v in data.items() if k != "old_log_probs"})
    # a batch that carries the rollout's log-probs as the old ones only
    renamed = {"old_log_probs": data["rollout_log_probs"], "advantages": data["advantages"]}
    same(config, new, data, renamed)


# ---------------------------------------------------------------- the table of modes: weights


def test_decoupled_weights_and_rejection_are_fixed_over_epochs():
    """pi_theta walks away; the correction stays pi_old's, and the tensors that hold it are untouched."""
    rc = CORRECTIONS["token TIS, token_k1"]
    new, data = random_batch()
    batch = with_correction(data, data["old_log_probs"], rc)
    kept = batch["rollout_keep"].clone()
    for _ in range(3):
        expected, gradient, _ = loop_loss("decoupled", rc, new, data)
        loss, slope, _ = run(make_config(rc=rc), new, batch)
        assert_close((loss, slope), (expected, gradient))
        new = new - 2.0 * slope
    assert torch.equal(batch["rollout_keep"], kept)
    far = data["rollout_log_probs"] + 3.0  # outside every band, yet kept: these are not pi_old's ratios
    assert run(make_config(rc=rc), far, batch)[2]["actor/kept_fraction"] == kept.double().mean()


@pytest.mark.parametrize("mode", ["bypass ppo_clip", "bypass reinforce"])
def test_bypass_ignores_weights_and_keep_of_the_batch(mode):
    new, data = random_batch()
    stale = {"rollout_is_weights": torch.full_like(new, 0.1), "rollout_keep": torch.zeros_like(new, dtype=torch.bool)}
    same(make_config(mode, {"rollout_is": "token", **BAND}), new, data, {**data, **stale})


# ---------------------------------------------------------------- the table of modes: rejection


@pytest.mark.parametrize("mode", ["bypass ppo_clip", "bypass reinforce"])
def test_bypass_rejects_by_the_current_policy_at_every_call(mode):
    """Band [.8, 1.15] of pi_theta/pi_rollout: 1.2 is out, 1/1.2 = .833 in, .9 in, 1/.9 = 1.11 in, .79 out."""
    rollout = tensor(-1.0, -2.0, -3.0, -4.0, -5.0)
    data = {
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + 7.0,
        "advantages": tensor(1.0, -1.0, 1.0, -1.0, 1.0),
    }
    config = make_config(mode, BAND, clip_ratio_low=0.99, clip_ratio_high=9.0)
    new = rollout + torch.log(tensor(1.2, 1 / 1.2, 0.9, 1 / 0.9, 0.79))
    _, slope, metrics = run(config, new, data)
    assert slope.ne(0).tolist() == [False, True, True, True, False]
    assert metrics["actor/kept_fraction"] == 0.6
    assert metrics["actor/rollout_corr/rollout_rs_token_k1_fraction_high"] == pytest.approx(0.2)
    assert metrics["actor/rollout_corr/rollout_rs_token_k1_fraction_low"] == pytest.approx(0.2)
    _, slope, _ = run(config, new - math.log(1.1), data)  # 1.09, .758, .818, 1.01, .718
    assert slope.ne(0).tolist() == [True, False, True, True, False]


def test_mask_mode_rejects_in_bypass_ppo_clip():
    """Its weights stay out of the loss as in every mode; what lies outside the band rejects like `token_k1`."""
    new, data = random_batch()
    band = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.15"}
    weights = {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_threshold": "0.8_1.15"}
    expected = run(make_config("bypass ppo_clip", {"rollout_is": None, **band}), new, data)
    loss, slope, metrics = run(make_config("bypass ppo_clip", weights), new, data)
    assert_close((loss, slope), expected[:2], **EXACT)
    assert 0 < metrics["actor/kept_fraction"] == expected[2]["actor/kept_fraction"] < 1


def test_decoupled_rejection_is_the_batchs():
    new, data = random_batch(b=4)
    keep = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
    whole = run(make_config(), new, data)
    _, slope, metrics = run(make_config(), new, {**data, "rollout_keep": keep})
    assert_close(slope, torch.where(keep, whole[1], 0.0))
    assert metrics["actor/kept_fraction"] == 0.5
    # the mask in another dtype, or folded into the weights alone
    for form in ({"rollout_keep": keep.to(torch.int32)}, {"rollout_is_weights": keep.double()}):
        for normalization in NORMALIZATIONS:
            config = make_config(rc={"rejection_normalization": normalization})
            same(config, new, {**data, "rollout_keep": keep}, {**data, **form})


def test_a_zeroed_weight_is_not_a_rejection():
    """IcePop sets weights to 0 and leaves the mask: with `kept` such an element stays in the denominator."""
    new, data = random_batch(b=1)
    data |= {"rollout_is_weights": tensor([0.0, 1.0]), "rollout_keep": torch.ones(1, 2, dtype=torch.bool)}
    config = make_config(rc={"rejection_normalization": "kept"})
    assert diffusion_loss_sums(config, {"log_probs": new}, data).denominator == 2


# ---------------------------------------------------------------- edges of rejection


@pytest.mark.parametrize("kl", [None, 0.5])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_everything_rejected_is_zero_with_zero_gradients_and_a_warning(mode, normalization, kl):
    rc = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "50_60"}
    rc["rejection_normalization"] = normalization
    new, data = random_batch()
    if mode == "decoupled":
        data["rollout_keep"] = torch.zeros_like(new, dtype=torch.bool)
        data["rollout_is_weights"] = torch.zeros_like(new)
    output = kl_output(0, new.shape)
    output["transition_means"].requires_grad_()
    with pytest.warns(UserWarning, match="rejected every element of this batch: loss and gradients are 0"):
        loss, slope, metrics = run(make_config(mode, rc, kl=kl), new, data, **output)
    assert_close((loss, slope), (tensor(0.0)[0], torch.zeros_like(new)), **EXACT)
    assert kl is None or output["transition_means"].grad.eq(0).all()
    assert metrics["actor/kept_fraction"] == metrics["actor/loss"] == metrics["actor/kl_loss"] == 0.0
    assert all(math.isfinite(value) for name, value in metrics.items() if "rollout_corr" not in name)


@pytest.mark.parametrize("value", [1e4, -1e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["log_probs", "old_log_probs", "rollout_is_weights"])
def test_decoupled_rejected_elements_cannot_poison_anything(where, value):
    new, data = random_batch()
    data["rollout_keep"] = torch.ones_like(new, dtype=torch.bool)
    data["rollout_keep"][3, 1] = False
    data["rollout_is_weights"] = torch.full_like(new, 0.7)
    expected = run(make_config(), new, data)
    (new if where == "log_probs" else data[where])[3, 1] = value
    loss, slope, metrics = run(make_config(), new, data)
    assert_close((loss, slope), expected[:2], **EXACT)
    assert slope[3, 1] == 0
    assert metrics == expected[2]


@pytest.mark.parametrize("gap", [1e4, -1e4, 700.0])
@pytest.mark.parametrize("mode", ["bypass ppo_clip", "bypass reinforce"])
def test_bypass_rejected_overflows_cannot_poison_anything(mode, gap):
    new, data = random_batch()
    keep = loop_correction(new, data["rollout_log_probs"], BAND)[1]
    out = (~keep).nonzero()[0].tolist()
    rc = {"rollout_is": "token", **BAND}
    expected = run(make_config(mode, rc), new, data)
    new[tuple(out)] = data["rollout_log_probs"][tuple(out)] + gap
    loss, slope, metrics = run(make_config(mode, rc), new, data)
    assert_close((loss, slope), expected[:2], **EXACT)
    assert metrics["actor/ratio_max"] == expected[2]["actor/ratio_max"]


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_steps_together_equal_steps_alone_for_step_level_criteria(mode, normalization):
    rc = {**CORRECTIONS["token TIS, token_k1"], "rejection_normalization": normalization}
    config = make_config(mode, rc)
    new, data = random_batch(w=3)
    data = prepared(mode, rc, new, data)
    whole = diffusion_loss_sums(config, {"log_probs": new}, data)
    alone = [
        diffusion_loss_sums(
            config, {"log_probs": new[:, j]}, {k: v[:, j] if v.dim() == 2 else v for k, v in data.items()}
        )
        for j in range(3)
    ]
    assert_close(sum(part.loss_sum for part in alone), whole.loss_sum)
    assert_close(sum(part.denominator for part in alone), whole.denominator)
    merged = alone[0].metrics + alone[1].metrics + alone[2].metrics
    assert merged.compute() == pytest.approx(whole.metrics.compute())


def test_trajectory_criteria_tell_a_window_from_a_step():
    """Steps of ratio 1.6 and .65: their geometric mean 1.02 passes [.8, 1.15]; alone neither does."""
    new = torch.log(tensor([1.6, 0.65]))
    rc = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.15"}
    data = {"rollout_log_probs": torch.zeros(1, 2, dtype=F64), "advantages": tensor(1.0)}
    config = make_config("bypass ppo_clip", rc)
    assert run(config, new, data)[2]["actor/kept_fraction"] == 1.0
    for j in range(2):
        alone = {"rollout_log_probs": torch.zeros(1, dtype=F64), "advantages": tensor(1.0)}
        with pytest.warns(UserWarning, match="rejected every element"):
            assert run(config, new[:, j], alone)[2]["actor/kept_fraction"] == 0.0


@pytest.mark.parametrize("w", [None, 2])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_any_cut_and_any_order_give_the_same_update(mode, normalization, w):
    rc = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.2,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.8_1.15",
        "rejection_normalization": normalization,
    }
    config = make_config(mode, rc, kl=0.3)
    new, data = random_batch(b=13, w=w)
    data, output = prepared(mode, rc, new, data), {"log_probs": new, **kl_output(2, new.shape)}
    for name in ("log_probs", "transition_means"):
        output[name].requires_grad_()
    whole = accumulated(diffusion_loss_sums, config, output, data, [torch.arange(13)])
    assert 0 < whole[2]["actor/kept_fraction"] < 1
    loss, slope, _ = run(config, new, data, **{k: v.detach() for k, v in output.items() if k != "log_probs"})
    assert_close((whole[0], whole[1]["log_probs"]), (loss, slope))
    shuffled = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    for cut in (torch.arange(13).split(1), torch.arange(13).split(5), shuffled.split(4)):
        parts = accumulated(diffusion_loss_sums, config, output, data, cut)
        assert_close(parts[:2], whole[:2])
        assert parts[2] == pytest.approx(whole[2])


# ---------------------------------------------------------------- KL to the reference


def test_kl_by_hand():
    """Two images of one step, dims 2: mean squares (1 + 9)/2 = 5 and 2, std 1 and 2: KL 2.5 and .25; ratio 1, A = 1.

    -1 + .1 * (2.5 + .25)/2 = -.8625; without image 0, over both: (-1 + .1 * .25)/2 = -.4875
    """
    new = torch.zeros(2, dtype=F64)
    data = {"old_log_probs": new, "advantages": tensor(1.0, 1.0)}
    output = {
        "transition_means": tensor([1.0, 3.0], [2.0, 0.0]),
        "ref_transition_means": torch.zeros(2, 2, dtype=F64),
        "transition_stds": tensor(1.0, 2.0),
    }
    loss, _, metrics = run(make_config(kl=0.1), new, data, **output)
    assert_close(loss, tensor(-0.8625)[0])
    assert metrics["actor/kl_loss"] == pytest.approx(1.375)
    assert metrics["actor/pg_loss"] == pytest.approx(-1.0)
    assert metrics["actor/loss"] == pytest.approx(-0.8625)
    loss, _, metrics = run(make_config(kl=0.1), new, {**data, "rollout_keep": torch.tensor([False, True])}, **output)
    assert_close(loss, tensor(-0.4875)[0])
    assert metrics["actor/kl_loss"] == pytest.approx(0.125)


@pytest.mark.parametrize("w", [None, 2])
def test_kl_gradient_reaches_the_means_of_kept_elements_only(w):
    new, data = random_batch(w=w)
    output = kl_output(5, new.shape)
    for name in ("transition_means", "ref_transition_means"):
        output[name].requires_grad_()
    keep = data["rollout_keep"] = new > 0
    run(make_config(kl=0.3), new, data, **output)
    gap, std = output["transition_means"] - output["ref_transition_means"], output["transition_stds"]
    scale = 0.3 * keep / (12 * std**2 * keep.numel())
    assert_close(output["transition_means"].grad, (gap * scale[..., None, None]).detach())
    assert output["ref_transition_means"].grad is None
    assert run(make_config(), new, data, **output)[2]["actor/kl_loss"] == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("name", ["transition_means", "ref_transition_means", "transition_stds"])
@pytest.mark.parametrize("w", [None, 2])
def test_kl_of_rejected_elements_reaches_nothing(w, name, value):
    new, data = random_batch(w=w)
    output = kl_output(5, new.shape)
    at = (3,) if w is None else (3, 1)
    data["rollout_keep"] = torch.ones_like(new, dtype=torch.bool)
    data["rollout_keep"][at] = False

    def gradients():
        means = output["transition_means"].clone().requires_grad_()
        with torch.autograd.set_detect_anomaly(True):
            loss, slope, metrics = run(make_config(kl=0.3), new, data, **{**output, "transition_means": means})
        return loss, slope, means.grad, metrics

    expected = gradients()
    output[name][at] = value
    *tensors, metrics = gradients()
    assert_close(tensors, list(expected[:3]), **EXACT)
    assert metrics == expected[3]
    assert tensors[2][at].eq(0).all()


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("mode", MODES)
def test_only_log_probs_get_a_gradient_and_inputs_stay_as_they_are(mode):
    rc = CORRECTIONS["token TIS, token_k1"]
    new, data = random_batch()
    data = with_correction(data, data["old_log_probs"], rc)
    kept = new.clone()
    assert_inputs_stay(lambda data: run(make_config(mode, rc), new, data), data)
    assert_close(new, kept, **EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_containers_agree(mode):
    rc = CORRECTIONS["token TIS, token_k1"]
    new, data = random_batch()
    data, output = prepared(mode, rc, new, data), {"log_probs": new, **kl_output(0, new.shape)}
    config = make_config(mode, rc, kl=0.1)
    loss, metrics = diffusion_loss(config, output, data)
    held = (TensorDict(x, batch_size=[len(new)]) for x in (output, data))
    other, other_metrics = diffusion_loss(config, *held)
    assert_close(other, loss, **EXACT)
    assert other_metrics == metrics
    held, _ = diffusion_loss(config, output, SimpleNamespace(batch=data))
    assert_close(held, loss, **EXACT)


def test_advantages_one_an_image_or_one_a_step_clamped():
    new, data = random_batch(b=3)
    data["advantages"] = tensor(100.0, -100.0, 0.5)
    expected = run(make_config(adv_clip_max=2.0), new, {**data, "advantages": tensor(2.0, -2.0, 0.5)})
    assert_close(run(make_config(adv_clip_max=2.0), new, data)[:2], expected[:2], **EXACT)
    spread = {**data, "advantages": data["advantages"][:, None].expand(3, 2)}
    assert_close(run(make_config(adv_clip_max=2.0), new, spread)[:2], expected[:2], **EXACT)
    spread["advantages"] = spread["advantages"].clone()
    spread["advantages"][0, 1] = -1.0
    steps = [run(make_config(), new[:, j], {k: v[:, j] for k, v in spread.items()})[1] for j in range(2)]
    assert_close(run(make_config(), new, spread)[1], torch.stack(steps, 1) / 2)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_half_precision_log_probs_are_computed_in_float32(normalization):
    """With its 8 bits bfloat16 knows neither 1 + 1e-4 nor the count 301."""
    new, data = random_batch(b=301, w=None, spread=0.002)
    data["rollout_keep"] = torch.ones(301, dtype=torch.bool)
    config = make_config(rc={"rejection_normalization": normalization}, clip_ratio_low=1e-4, clip_ratio_high=2e-4)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in data.items()}
    single = {k: v.float() if v.is_floating_point() else v for k, v in half.items()}
    sums = diffusion_loss_sums(config, {"log_probs": new.bfloat16()}, half)
    expected = diffusion_loss_sums(config, {"log_probs": new.bfloat16().float()}, single)
    assert_close(sums.denominator, torch.tensor(301.0), **EXACT)
    assert_close(sums.loss_sum, expected.loss_sum, **EXACT)


def test_bypass_reports_the_gap_with_its_timesteps():
    new, data = random_batch(b=2)
    data["timesteps"] = tensor([900.0, 700.0], [700.0, 500.0])
    gap = (new - data["rollout_log_probs"]).abs()
    metrics = run(make_config("bypass ppo_clip"), new, data)[2]
    assert metrics["actor/rollout_corr/logprob_abs_diff_mean"] == pytest.approx(gap.mean().item())
    assert metrics["actor/rollout_corr/logprob_abs_diff/ts_700"] == pytest.approx((gap[0, 1] + gap[1, 0]).item() / 2)
    assert not [name for name in run(make_config(), new, data)[2] if "rollout_corr" in name]


# ---------------------------------------------------------------- errors


def without(data, *names):
    return {k: v for k, v in data.items() if k not in names}


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        ("decoupled", {"advantages": None}, "data lacks 'advantages'; it holds: old_log_probs, rollout_log_probs"),
        ("decoupled", {"old_log_probs": None}, "data lacks old_log_probs; it holds: advantages, rollout_log_probs"),
        (
            "bypass ppo_clip",
            {"old_log_probs": None, "rollout_log_probs": None},
            "lacks rollout_log_probs or old_log_probs",
        ),
        ("decoupled", {"old_log_probs": (4, 3)}, r"old_log_probs has shape \(4, 3\) but log_probs has \(4, 2\)"),
        ("bypass reinforce", {"rollout_log_probs": (1, 2)}, r"rollout_log_probs has shape \(1, 2\) but log_probs has"),
        ("decoupled", {"advantages": (5,)}, r"advantages has shape \(5,\); expected \(4,\) or \(4, 2\)"),
        ("decoupled", {"rollout_is_weights": (4,)}, r"rollout_is_weights has shape \(4,\) but log_probs has \(4, 2\)"),
        ("decoupled", {"rollout_keep": (4, 1)}, r"rollout_keep has shape \(4, 1\) but log_probs has \(4, 2\)"),
    ],
)
def test_errors_name_what_is_missing_or_misshapen(mode, change, message):
    new, data = random_batch(b=4)
    absent = [name for name, shape in change.items() if shape is None]
    shapes = {name: torch.ones(shape, dtype=F64) for name, shape in change.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        diffusion_loss(make_config(mode), {"log_probs": new}, {**without(data, *absent), **shapes})
    if absent:  # None counts as absent
        with pytest.raises(ValueError, match="lacks"):
            diffusion_loss(make_config(mode), {"log_probs": new}, {**data, **dict.fromkeys(absent)})


def test_errors_name_what_the_model_output_lacks():
    new, data = random_batch(b=4)
    with pytest.raises(ValueError, match="model_output lacks 'log_probs'; it holds: log_prob"):
        diffusion_loss(make_config(), {"log_prob": new}, data)
    output = {"log_probs": new, **kl_output(0, new.shape)}
    for name in ("transition_means", "ref_transition_means", "transition_stds"):
        with pytest.raises(ValueError, match=rf"model_output \(use_kl_loss=true\) lacks '{name}'; it holds: "):
            diffusion_loss(make_config(kl=0.1), without(output, name), data)
        diffusion_loss(make_config(), without(output, name), data)
    for name, shape in (
        ("transition_means", (4, 1, 3, 4)),
        ("ref_transition_means", (4, 2, 1, 4)),
        ("transition_stds", (4, 1)),
    ):
        with pytest.raises(ValueError, match=f"^{name} has shape "):
            diffusion_loss(make_config(kl=0.1), {**output, name: torch.ones(shape, dtype=F64)}, data)


@pytest.mark.parametrize("mode", ["bypass ppo_clip", "bypass reinforce"])
def test_a_non_finite_log_prob_in_bypass_is_an_error(mode):
    new, data = random_batch()
    new[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"1 of 24 positions .* the first is \(2, 1\)"):
        diffusion_loss(make_config(mode, BAND), {"log_probs": new}, data)


# ---------------------------------------------------------------- ranks

RANK_CASES = [
    (mode, normalization, keep_first)
    for mode in MODES
    for normalization in NORMALIZATIONS
    for keep_first in (True, False)
]
"""`keep_first=False`: everything on rank 0 is rejected."""


def rank_batch(mode, normalization, keep_first):
    """Nine images, of which rank 0 holds four and rank 1 five, with different numbers kept."""
    rc = {**CORRECTIONS["token TIS, token_k1"], "rejection_normalization": normalization}
    new, data = random_batch(4, b=9)
    if not keep_first:  # far from both bands
        data["rollout_log_probs"][:4] -= 2.0
    config = make_config(mode, rc)
    return config, new, prepared(mode, rc, new, data)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:rollout correction rejected every element")
def test_averaging_over_ranks_gives_the_gradient_of_the_joined_batch(tmp_path):
    """As DDP averages: two gloo processes with unequal shards and unequal kept counts."""
    ranks = on_two_ranks(tmp_path, diffusion_loss, RANK_CASES, rank_batch, first=4)
    for case, first, second in zip(RANK_CASES, *ranks, strict=True):
        config, new, data = rank_batch(*case)
        expected = run(config, new, data)
        for result in (first, second):
            assert_close(result[:2], expected[:2], msg=lambda m, c=case: f"{c}: {m}")
            assert result[3] == pytest.approx(expected[2])  # the correction's metrics among them
        assert ("actor/rollout_corr/logprob_abs_diff_max" in first[3]) is (case[0] != "decoupled")
        # without the group each rank divides by its own count
        alone = run(config, new[:4], {k: v[:4] for k, v in data.items()})
        assert_close(first[2], alone[0])
        assert (alone[2]["actor/kept_fraction"] == 0) is not case[2]
        assert alone[2]["actor/kept_fraction"] != pytest.approx(expected[2]["actor/kept_fraction"])


NOT_FINITE = [(name, math.nan) for name in ("advantages", "old_log_probs", "rollout_is_weights", "log_probs")]
NOT_FINITE += [("old_log_probs", math.inf), ("old_log_probs", -math.inf), ("rollout_is_weights", math.inf)]


@pytest.mark.parametrize(("name", "value"), NOT_FINITE)
def test_a_loss_that_is_not_finite_is_an_error_that_names_its_cause(name, value):
    """Also where the loss itself stays finite, as it clamps log ratios."""
    new, data = random_batch()
    data |= {"rollout_is_weights": torch.ones_like(new), "rollout_keep": torch.ones_like(new).bool()}
    where, holder = ("model_output", {"log_probs": new}) if name == "log_probs" else ("data", data)
    holder[name] = holder[name].clone()
    holder[name].view(-1)[3] = value
    with pytest.raises(ValueError, match=rf"actor/\w+ is (nan|-?inf); NaN or .*: 1 of \d+ in {where}\['{name}'\]$"):
        diffusion_loss(make_config(), {"log_probs": holder.get("log_probs", new)}, data)


def test_finite_inputs_with_an_infinite_loss_are_said_to_be():
    new, data = random_batch()
    output = kl_output(0, new.shape)
    output["transition_stds"] = torch.zeros_like(output["transition_stds"])
    with pytest.raises(ValueError, match="actor/loss is inf; all of this rank's inputs are finite: .* a std is 0"):
        run(make_config(kl=0.1), new, data, **output)


ASKED = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
VETO = {"rollout_token_veto_threshold": 1e-4}


@pytest.mark.parametrize("rc", [ASKED, VETO, {"rollout_is": "token"}])
def test_a_decoupled_batch_without_its_correction_warns(rc):
    new, data = random_batch()
    with pytest.warns(UserWarning, match="with bypass_mode=false, but data holds neither") as caught:
        run(make_config(rc=rc), new, data)
    assert Path(caught[0].filename) == Path(__file__)
    tokens = {**data, "response_mask": torch.ones_like(new)}
    with pytest.warns(UserWarning, match="hands it to flowgrpo_rc.token_loss") as caught:
        run(make_config(), new, tokens)
    assert Path(caught[0].filename) == Path(__file__)
    with pytest.warns(UserWarning, match="this loss is not corrected"):
        diffusion_loss_sums(make_config(rc=rc), {"log_probs": new}, data)


def test_a_batch_that_needs_no_correction_does_not_warn():
    new, data = random_batch()
    tokens = {**data, "response_mask": torch.ones_like(new)}
    on_policy = {name: data[name] for name in ("old_log_probs", "advantages")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(make_config(), new, data)
        run(make_config(rc=ASKED), new, {**data, "rollout_is_weights": torch.ones_like(new)})
        run(make_config("bypass ppo_clip", rc=ASKED), new, data)  # corrects by itself
        run(make_config(rc=ASKED), new, on_policy)  # nothing to correct with
        token_loss(make_config(rc=BAND), {"log_probs": new}, tokens)  # the mask may hold the rejection


def test_auto_clips_every_element_by_its_own_width():
    """Bands of 0.1 and 0.001: the same ratios are inside one and outside the other."""
    config = make_config("bypass ppo_clip")
    config.diffusion_loss.clip_ratio = "auto"
    config.diffusion_loss.clip_ratio_low = config.diffusion_loss.clip_ratio_high = None
    rollout = torch.zeros(2, 2, dtype=torch.float64)
    log_probs = torch.tensor([[1.01, 1.01], [0.99, 0.99]], dtype=torch.float64).log().requires_grad_()
    data = {"rollout_log_probs": rollout, "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    with pytest.raises(ValueError, match="data lacks 'clip_widths'"):
        diffusion_loss(config, {"log_probs": log_probs}, data)
    data["clip_widths"] = torch.tensor([[0.1, 0.001], [0.1, 0.001]], dtype=torch.float64)
    loss, metrics = diffusion_loss(config, {"log_probs": log_probs}, data)
    loss.backward()
    # inside: -A * ratio; outside: the clipped ratio, without a gradient
    assert loss.item() == pytest.approx((-1.01 - 1.001 + 0.99 + 0.999) / 4)
    assert log_probs.grad.flatten().tolist() == pytest.approx([-1.01 / 4, 0.0, 0.99 / 4, 0.0])
    assert metrics["actor/pg_clipfrac"] == 0.5
    for bad in (0.0, -1e-3, math.inf, math.nan):
        widths = data["clip_widths"].clone()
        widths[1, 0] = bad
        with pytest.raises(
            ValueError, match=r"actor/loss is nan; .*: 1 of 4 in data\['clip_widths'\] \(or not above 0\)"
        ):
            diffusion_loss(config, {"log_probs": log_probs}, {**data, "clip_widths": widths})
    with pytest.raises(ValueError, match="clip_widths has shape"):
        diffusion_loss(config, {"log_probs": log_probs}, {**data, "clip_widths": torch.ones(2)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widths_in_half_precision_clip_what_float32_clips(dtype):
    """1 - 1e-4 is 1 in half precision, and every ratio would lie outside."""
    config = make_config("bypass ppo_clip")
    config.diffusion_loss.clip_ratio = "auto"
    config.diffusion_loss.clip_ratio_low = config.diffusion_loss.clip_ratio_high = None
    log_probs = torch.tensor([[5e-5, 2e-4]]).requires_grad_()
    data = {"rollout_log_probs": torch.zeros(1, 2), "advantages": torch.ones(1)}
    data["clip_widths"] = torch.full((1, 2), 1e-4).to(dtype)
    loss, metrics = diffusion_loss(config, {"log_probs": log_probs}, data)
    loss.backward()
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert log_probs.grad.flatten().tolist() == pytest.approx([-0.5, 0.0], abs=1e-4)
