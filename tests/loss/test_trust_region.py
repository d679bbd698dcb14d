"""GRPO-Guard and Flow-DPPO: hand-worked numbers, the published formula, and what mixing timesteps must not do."""

import math

import pytest
import torch
from loss_cases import F64, tensor
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.loss import diffusion_loss
from flowgrpo_rc.loss.policy import PolicyInputs, PolicyLimits, TransitionShift, flow_dppo, grpo_guard


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "shift", "std", "dt", "loss"),
    [
        # (.3 + .02/(2*.25)) * .5 = .17: ratio e^.17 = 1.185305, inside [.9, 1.3]; / .2
        (1.0, 0.3, 0.02, 0.5, 0.2, -math.exp(0.17) / 0.2),
        # (.8 + .04) * .5 = .42: ratio 1.52 above 1.3 with A > 0: -1.3 / .2
        (1.0, 0.8, 0.02, 0.5, 0.2, -1.3 / 0.2),
        # (-.6 + .04) * .5 = -.28: ratio .7558 below .9 with A < 0: .9 * 2 / .1
        (-2.0, -0.6, 0.02, 0.5, 0.1, 1.8 / 0.1),
    ],
)
def test_guard_by_hand(advantage, log_ratio, shift, std, dt, loss):
    shift = TransitionShift(tensor(shift / (2 * std**2)), tensor(std), tensor(dt))
    inputs = PolicyInputs(tensor(log_ratio - 1), tensor(-1.0), tensor(advantage), shift=shift)
    terms = grpo_guard(inputs, PolicyLimits(clip_low=0.1, clip_high=0.3))
    assert_close(terms.loss, tensor(loss))


@pytest.mark.parametrize(
    ("advantage", "ratio", "kl", "loss", "masked"),
    [
        (2.0, 1.5, 0.5, -3.0, False),  # inside the region (threshold 1): unclipped
        (2.0, 1.5, 1.0, 0.0, True),  # at the threshold and moving out
        (2.0, 0.5, 2.0, -1.0, False),  # outside, but coming back
        (-2.0, 0.5, 2.0, 0.0, True),  # outside, moving out
        (-2.0, 1.5, 2.0, 3.0, False),
    ],
)
def test_dppo_by_hand(advantage, ratio, kl, loss, masked):
    log_prob = tensor(math.log(ratio)).requires_grad_()
    shift = TransitionShift(tensor(kl), tensor(1.0))
    inputs = PolicyInputs(log_prob, tensor(0.0), tensor(advantage), shift=shift)
    terms = flow_dppo(inputs, PolicyLimits(clip_low=0.1, clip_high=0.1, threshold=1.0))
    terms.loss.sum().backward()
    assert_close(terms.loss.detach(), tensor(loss))
    assert_close(log_prob.grad, tensor(loss))  # d(-A r)/d log_prob = -A r, and 0 where masked
    assert terms.left_out.tolist() == [masked]


def case(seed=0, b=5, w=2, dims=6):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)  # noqa: E731
    old_mean = draw(b, w, dims)
    mean = old_mean + 0.1 * draw(b, w, dims)
    sigmas = torch.rand(b, w, generator=generator, dtype=F64) * 0.4 + 0.5
    output = {
        "log_probs": draw(b, w),
        "transition_means": mean,
        "transition_stds": torch.rand(b, w, generator=generator, dtype=F64) + 0.3,
    }
    data = {"advantages": draw(b), "sigmas": sigmas, "next_sigmas": sigmas - 0.1 - 0.2 * sigmas}
    data["old_log_probs"] = output["log_probs"] - 0.2 * draw(b, w)
    return output, data, old_mean


def config(mode, bypass=False, **loss):
    rc = {"bypass_mode": bypass, "rollout_is": None}
    options = DiffusionLossConfig(loss_mode=mode, **{"clip_ratio": 0.05, **loss})
    return DiffusionActorConfig(diffusion_loss=options, rollout_correction=rc)


@pytest.mark.parametrize("bypass", [False, True])
def test_guard_equals_a_loop_over_samples_of_mixed_timesteps(bypass):
    output, data, old_mean = case()
    data["rollout_means" if bypass else "old_transition_means"] = old_mean
    if bypass:
        data["rollout_log_probs"] = data.pop("old_log_probs")
    anchor = data["rollout_log_probs" if bypass else "old_log_probs"]
    total = 0.0
    for i in range(5):
        for j in range(2):
            s, dt = float(output["transition_stds"][i, j]), float(data["sigmas"][i, j] - data["next_sigmas"][i, j])
            shift = float(((output["transition_means"][i, j] - old_mean[i, j]) ** 2).mean())
            ratio = math.exp((float(output["log_probs"][i, j] - anchor[i, j]) + shift / (2 * s * s)) * s)
            advantage = float(data["advantages"][i])
            total += max(-advantage * ratio, -advantage * min(max(ratio, 0.95), 1.05)) / dt
    loss, _ = diffusion_loss(config("grpo_guard", bypass), output, data)
    assert_close(loss.item(), total / 10)


def test_guard_is_the_published_formula_when_all_share_a_timestep():
    """Published: std and sqrt(dt) averaged over the micro-batch; the same only where they are all equal."""
    output, data, old_mean = case()
    data["old_transition_means"] = old_mean
    output["transition_stds"] = torch.full((5, 2), 0.4, dtype=F64)
    data["sigmas"], data["next_sigmas"] = torch.full((5, 2), 0.8, dtype=F64), torch.full((5, 2), 0.6, dtype=F64)
    s, dt = output["transition_stds"].mean(), (data["sigmas"] - data["next_sigmas"]).sqrt().mean() ** 2
    shift = ((output["transition_means"] - old_mean) ** 2).mean(-1)
    ratio = torch.exp((output["log_probs"] - data["old_log_probs"] + shift / (2 * s**2)) * s)
    advantage = data["advantages"][:, None]
    published = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.95, 1.05)).mean() / dt
    assert_close(diffusion_loss(config("grpo_guard"), output, data)[0], published)


@pytest.mark.parametrize("name", ["sigmas", "next_sigmas"])
def test_levels_of_another_shape_are_refused(name):
    """They would broadcast."""
    output, data, old_mean = case(b=2)
    data["old_transition_means"] = old_mean
    data[name] = data[name][:1]
    with pytest.raises(ValueError, match=rf"^{name} has shape \(1, 2\); expected \(2, 2\)"):
        diffusion_loss(config("grpo_guard"), output, data)


def test_means_in_half_precision_are_compared_in_float32():
    output, data, old_mean = case()
    data["old_transition_means"] = old_mean.half()
    output["transition_means"] = (old_mean + 0.01).half()
    single = {**output, "transition_means": output["transition_means"].float()}
    found, expected = (diffusion_loss(config("grpo_guard"), given, data)[0] for given in (output, single))
    assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", ["grpo_guard", "flow_dppo"])
def test_equal_policies_and_gradients(mode):
    """At equal policies the ratio is 1; the gradient through log-prob and mean passes gradcheck."""
    output, data, _ = case()
    data |= {"old_transition_means": output["transition_means"], "old_log_probs": output["log_probs"]}
    _, metrics = diffusion_loss(config(mode), output, data)
    assert metrics["actor/ratio_min"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/pg_clipfrac_inert"] == 0.0
    output, data, old_mean = case(seed=1)
    data["old_transition_means"] = old_mean

    def objective(log_probs, means):
        inputs = {**output, "log_probs": log_probs, "transition_means": means}
        return diffusion_loss(config(mode, clip_ratio=0.9, kl_mask_threshold=100.0), inputs, data)[0]

    arguments = (output["log_probs"].requires_grad_(), output["transition_means"].requires_grad_())
    assert torch.autograd.gradcheck(objective, arguments)


def test_dppo_counts_what_it_leaves_out():
    output, data, old_mean = case(b=40)
    data["old_transition_means"] = old_mean
    kl = ((output["transition_means"] - old_mean) ** 2).mean(-1) / (2 * output["transition_stds"] ** 2)
    threshold = float(kl.median())
    _, metrics = diffusion_loss(config("flow_dppo", kl_mask_threshold=threshold), output, data)
    log_ratio, advantage = output["log_probs"] - data["old_log_probs"], data["advantages"][:, None]
    masked = (kl >= threshold) & (log_ratio * advantage > 0)
    assert metrics["actor/pg_clipfrac_inert"] == pytest.approx(masked.double().mean().item())
    assert 0.1 < metrics["actor/pg_clipfrac_inert"] < 0.4


REJECTED = ("transition_means", "old_transition_means", "transition_stds", "sigmas", "next_sigmas", "advantages")


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.parametrize("mode", ["grpo_guard", "flow_dppo"])
def test_what_a_rejected_element_holds_reaches_nothing(mode, name, value):
    """Neither the loss nor the gradient of log-probs and means; a std or dt of 0 divides nothing."""
    output, data, old_mean = case()
    data |= {"old_transition_means": old_mean, "rollout_keep": torch.ones(5, 2, dtype=torch.bool)}
    data["rollout_keep"][1, 0] = False
    data["advantages"] = data["advantages"][:, None].repeat(1, 2)

    def gradients():
        leaves = [output[key].clone().requires_grad_() for key in ("log_probs", "transition_means")]
        inputs = {**output, "log_probs": leaves[0], "transition_means": leaves[1]}
        with torch.autograd.set_detect_anomaly(True):
            loss, metrics = diffusion_loss(config(mode), inputs, data)
            loss.backward()
        return loss.detach(), leaves[0].grad, leaves[1].grad, metrics

    expected = gradients()
    holder = output if name in output else data
    holder[name] = holder[name].clone()
    holder[name][1, 0] = value
    if name == "sigmas" and value == 0.0:
        data["next_sigmas"][1, 0] = 0.0
    *tensors, metrics = gradients()
    assert_close(tensors, list(expected[:3]), rtol=0, atol=0)
    assert metrics == expected[3]
    assert tensors[1][1, 0] == 0


@pytest.mark.parametrize("mode", ["grpo_guard", "flow_dppo"])
def test_missing_inputs_are_named(mode):
    output, data, old_mean = case()
    with pytest.raises(ValueError, match="lacks 'old_transition_means'"):
        diffusion_loss(config(mode), output, data)
    with pytest.raises(ValueError, match="lacks 'rollout_means'"):
        diffusion_loss(config(mode, bypass=True), output, {**data, "old_transition_means": old_mean})
    with pytest.raises(ValueError, match=r"the old transition means has shape \(5, 6\); expected \(5, 2, 6\)"):
        diffusion_loss(config(mode), output, {**data, "old_transition_means": old_mean[:, 0]})
    with pytest.raises(ValueError, match="lacks 'transition_means'"):
        diffusion_loss(config(mode), {"log_probs": output["log_probs"]}, {**data, "old_transition_means": old_mean})


def test_reinforce_has_no_ratio_to_guard():
    with pytest.raises(ValueError, match="loss_mode: got grpo_guard with loss_type=reinforce"):
        DiffusionActorConfig(
            diffusion_loss=DiffusionLossConfig(loss_mode="grpo_guard"),
            rollout_correction={"bypass_mode": True, "loss_type": "reinforce"},
        )
