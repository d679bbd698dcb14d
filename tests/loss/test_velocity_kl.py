"""The KL on velocities: a slow float64 loop, gradients, what is rejected or missing, and the norms beside it."""

import math
import random

import pytest
import torch
from loss_cases import F64, MODES, accumulated, tensor
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.loss import diffusion_loss, diffusion_loss_sums

COEFFICIENT = 0.7


def make_config(objective="flow_grpo", normalization="all", kind="velocity", mode="decoupled"):
    return DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(loss_mode=objective, clip_ratio=0.1, kl_mask_threshold=0.3),
        rollout_correction={**MODES[mode], "rejection_normalization": normalization},
        use_kl_loss=kind is not None,
        kl_loss_coef=COEFFICIENT,
        kl_loss_type=kind or "gaussian",
    )


def random_case(seed, shape, latent, kept=0.6):
    """``output, data`` with a mask that keeps some elements."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=F64)

    names = ("velocities", "ref_velocities", "transition_means", "old_transition_means")
    large = {name: draw(*shape, *latent) for name in names}
    data = {"old_log_probs": draw(*shape), "advantages": draw(shape[0])}
    data |= {"sigmas": torch.full(shape, 0.8, dtype=F64), "next_sigmas": torch.full(shape, 0.5, dtype=F64)}
    data["rollout_keep"] = torch.rand(shape, generator=generator) < kept
    data["old_transition_means"] = large.pop("old_transition_means")
    output = {"log_probs": data["old_log_probs"] + 0.1 * draw(*shape), "transition_stds": 0.5 + draw(*shape).abs()}
    return output | large, data


def loop(output, data, normalization):
    """KL, its gradient by the velocities, and both norms, one float at a time."""
    keep = data["rollout_keep"].reshape(-1).tolist()
    rows = [output[name].reshape(len(keep), -1).tolist() for name in ("velocities", "ref_velocities")]
    count = sum(keep) if normalization == "kept" else len(keep)
    total, squares, gradient = 0.0, [0.0, 0.0], []
    for own, reference, is_kept in zip(*rows, keep, strict=True):
        for v, r in zip(own, reference, strict=True):
            gradient.append(COEFFICIENT * 2 * (v - r) / (len(own) * count) if is_kept else 0.0)
            if is_kept:
                total += (v - r) ** 2 / len(own) / count
                squares[0] += v**2 / len(own)
                squares[1] += r**2 / len(own)
    return total, torch.tensor(gradient, dtype=F64), [math.sqrt(square / sum(keep)) for square in squares]


@pytest.mark.parametrize("seed", range(8))
def test_value_gradient_and_norms_are_those_of_a_loop(seed):
    """Over random shapes, masks and normalisations; the policy's term has the gradient that it has without a KL."""
    dice = random.Random(seed)
    shape = (dice.randint(2, 7), *([dice.randint(1, 4)] if seed % 2 else []))
    latent = tuple(dice.randint(1, 5) for _ in range(dice.randint(1, 3)))
    normalization = dice.choice(["all", "kept"])
    output, data = random_case(seed, shape, latent)
    data["rollout_keep"].view(-1)[0] = True
    leaves = {name: value.clone().requires_grad_() for name, value in output.items()}
    loss, metrics = diffusion_loss(make_config(normalization=normalization), leaves, data)
    loss.backward()
    kl, gradient, norms = loop(output, data, normalization)
    assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-12)
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"] + COEFFICIENT * kl, rel=1e-12)
    assert_close(leaves["velocities"].grad.flatten(), gradient)
    assert leaves["ref_velocities"].grad is None
    assert [metrics[f"actor/{name}"] for name in ("velocity_norm", "ref_velocity_norm")] == pytest.approx(norms)
    plain = output["log_probs"].clone().requires_grad_()
    diffusion_loss(make_config(normalization=normalization, kind=None), {"log_probs": plain}, data)[0].backward()
    assert_close(leaves["log_probs"].grad, plain.grad)


def test_by_hand():
    """Differences (1, 3) and (2, 0): KL 5 and 2, mean 3.5; without the first 2 / 2 = 1, and a norm of sqrt(2)."""
    output = {
        "log_probs": torch.zeros(2, dtype=F64),
        "velocities": tensor([1.0, 3.0], [2.0, 0.0]),
        "ref_velocities": tensor([0.0, 0.0], [0.0, 0.0]),
    }
    data = {"old_log_probs": torch.zeros(2, dtype=F64), "advantages": tensor(1.0, 1.0)}
    metrics = diffusion_loss(make_config(), output, data)[1]
    assert metrics["actor/kl_loss"] == pytest.approx(3.5)
    assert metrics["actor/velocity_norm"] == pytest.approx(math.sqrt(3.5))
    metrics = diffusion_loss(make_config(), output, {**data, "rollout_keep": torch.tensor([False, True])})[1]
    assert metrics["actor/kl_loss"] == pytest.approx(1.0)
    assert (metrics["actor/velocity_norm"], metrics["actor/ref_velocity_norm"]) == pytest.approx((math.sqrt(2), 0.0))
    with pytest.warns(UserWarning, match="rejected every element"):
        metrics = diffusion_loss(make_config(), output, {**data, "rollout_keep": torch.tensor([False, False])})[1]
    assert metrics["actor/kl_loss"] == metrics["actor/velocity_norm"] == 0.0


@pytest.mark.parametrize("objective", ["grpo_guard", "flow_dppo"])
def test_objectives_that_compare_means_still_do(objective):
    """Their loss is the one without a KL, plus the KL."""
    output, data = random_case(3, (6, 2), (3, 2))
    with_kl, metrics = diffusion_loss(make_config(objective), output, data)
    plain, _ = diffusion_loss(make_config(objective, kind=None), output, data)
    assert_close(with_kl, plain + COEFFICIENT * metrics["actor/kl_loss"])
    del output["transition_means"]
    with pytest.raises(ValueError, match=r"model_output \(this loss_mode\) lacks 'transition_means'"):
        diffusion_loss(make_config(objective), output, data)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["velocities", "ref_velocities"])
def test_what_is_rejected_reaches_nothing_and_what_is_kept_is_an_error(name, value):
    output, data = random_case(4, (5, 3), (2, 2))
    keep = data["rollout_keep"]
    expected, of_all = diffusion_loss(make_config(), output, data)
    output[name] = torch.where(keep[..., None, None], output[name], value).requires_grad_()
    loss, metrics = diffusion_loss(make_config(), output, data)
    assert_close(loss, expected)
    assert metrics == pytest.approx(of_all)
    if name == "velocities":
        loss.backward()
        assert output[name].grad[~keep].eq(0).all()
    output[name] = output[name].detach().index_put(tuple(keep.nonzero()[:1].T), tensor(value)[0])
    with pytest.raises(ValueError, match=rf"actor/loss is (nan|inf); NaN or .* in model_output\['{name}'\]$"):
        diffusion_loss(make_config(), output, data)


def test_what_is_missing_or_of_another_shape_is_named():
    output, data = random_case(5, (4, 2), (3,))
    for name in ("velocities", "ref_velocities"):
        lacking = {key: value for key, value in output.items() if key != name}
        with pytest.raises(ValueError, match=rf"model_output \(kl_loss_type=velocity\) lacks '{name}'; it holds: "):
            diffusion_loss(make_config(), lacking, data)
        for shape in ((4, 1, 3), (4, 2, 1)):
            if (name, shape) != ("velocities", (4, 2, 1)):  # the latents' own shape is free
                with pytest.raises(ValueError, match=f"^{name} has shape "):
                    diffusion_loss(make_config(), {**output, name: torch.ones(shape, dtype=F64)}, data)
    plain = diffusion_loss(make_config(kind=None), {"log_probs": output["log_probs"]}, data)[1]
    assert not [name for name in plain if "velocity" in name]
    measured = diffusion_loss(make_config(kind=None), {n: output[n] for n in ("log_probs", "velocities")}, data)[1]
    assert [name for name in measured if "velocity" in name] == ["actor/velocity_norm"]


def test_half_precision_is_measured_in_float32():
    """A bfloat16 square would be off by a part in 256."""
    output, data = random_case(6, (4, 2), (16,))
    half = {
        **output,
        "velocities": output["velocities"].bfloat16(),
        "ref_velocities": output["ref_velocities"].bfloat16(),
    }
    exact = {name: value.to(F64) for name, value in half.items()}
    found, expected = (diffusion_loss(make_config(), one, data)[1]["actor/kl_loss"] for one in (half, exact))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("normalization", ["all", "kept"])
def test_any_cut_gives_the_same_sums(normalization):
    config = make_config(normalization=normalization)
    output, data = random_case(7, (9, 2), (3, 2))
    output["velocities"].requires_grad_()
    whole = accumulated(diffusion_loss_sums, config, output, data, [torch.arange(9)])
    assert {"actor/velocity_norm", "actor/ref_velocity_norm"} <= whole[2].keys()
    for cut in (torch.arange(9).split(1), torch.tensor([3, 8, 1, 0, 7, 2, 5, 4, 6]).split(4)):
        parts = accumulated(diffusion_loss_sums, config, output, data, cut)
        assert_close(parts[:2], whole[:2])
        assert parts[2] == pytest.approx(whole[2])
