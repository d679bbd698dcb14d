"""Objectives on clean images: a slow float64 loop over images, places and latent elements, cuts, ranks, identities."""

import math
import random

import pytest
import torch
from loss_cases import EXACT, F64, accumulated, assert_inputs_stay, on_two_ranks, tensor
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.loss import diffusion_loss, diffusion_loss_sums
from flowgrpo_rc.loss.objectives import OBJECTIVES as TABLE

OBJECTIVES = ("awm", "diffusion_nft", "dpo")
COEFFICIENT = 0.7
KLS = {
    None: ({}, {}),
    "ref_kl_coef": ({"ref_kl_coef": COEFFICIENT}, {}),
    "use_kl_loss": ({}, {"use_kl_loss": True, "kl_loss_type": "velocity", "kl_loss_coef": COEFFICIENT}),
}
"""Settings of the loss and of the actor for the velocity KL."""


def make_config(objective, *, kl=None, normalization="all", **loss):
    """Clip band [.9, 1.3], advantages up to 1.5."""
    of_loss, of_actor = KLS[kl]
    settings = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "adv_clip_max": 1.5, "dpo_beta": 3.0, **of_loss, **loss}
    return DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(loss_mode=objective, **settings),
        rollout_correction={"rejection_normalization": normalization},
        **of_actor,
    )


def random_case(seed, b=4, k=3, latent=(2, 3), spread=0.4):
    """``output, data``: velocities some tenths apart around a common one, and levels up to 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=F64)

    shape = (b, k)
    common = draw(*shape, *latent)
    output = {name: common + spread * draw(*shape, *latent) for name in ("velocities", "ref_velocities")}
    noise = draw(b // 2, k, *latent).repeat_interleave(2, 0)  # both images of a pair have the same
    sigmas = torch.rand(b // 2, k, generator=generator, dtype=F64).repeat_interleave(2, 0)
    data = {"noise": noise, "sigmas": 0.1 + 0.9 * sigmas, "clean_latents": draw(b, *latent), "advantages": 2 * draw(b)}
    return output, data | {"old_velocities": common + spread * draw(*shape, *latent)}


def with_correction(data, seed, kept=0.7):
    """The data with weights, and a mask that keeps the first pair at least."""
    generator = torch.Generator().manual_seed(seed)
    shape = data["sigmas"].shape
    keep = torch.rand(shape, generator=generator) < kept
    keep[:2, 0] = True
    weights = torch.randn(shape, generator=generator, dtype=F64).exp()
    return {**data, "rollout_is_weights": weights, "rollout_keep": keep}


def as_rows(output, data):
    """Every place of every image as a row of its own."""
    k = data["sigmas"].shape[1]
    data = {
        name: value.flatten(0, 1) if value.shape[:2] == data["sigmas"].shape else value.repeat_interleave(k, 0)
        for name, value in data.items()
    }
    return {name: value.flatten(0, 1) for name, value in output.items()}, data


def run(config, output, data):
    """``loss, gradient by the velocities, metrics``."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in output.items()}
    loss, metrics = diffusion_loss(config, leaves, data)
    loss.backward()
    assert [leaves[name].grad for name in leaves if name != "velocities"] == [None] * (len(leaves) - 1)
    return loss.detach(), leaves["velocities"].grad, metrics


# ---------------------------------------------------------------- the loop


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def loop_awm(options, a, v, old, ref, u, t):
    """AWM, equation by equation: log-prob, ratio, PPO's clip."""
    weight = {"none": 1.0, "t": t, "t2": t * t}[options.awm_weighting]
    now, before = (-weight * mean((x - y) ** 2 for x, y in zip(side, u, strict=True)) for side in (v, old))
    ratio = torch.exp(now - before)
    low, high = 1 - options.clip_ratio_low, 1 + options.clip_ratio_high
    clipped = ratio if low <= ratio <= high else (low if ratio < low else high)
    return max(-a * ratio, -a * clipped)


def loop_nft(options, a, v, old, ref, u, t, x0, e):
    """DiffusionNFT on predicted clean images, ``x_t - t v``, with the advantage's mode."""
    most = options.adv_clip_max
    a = {
        "continuous": a,
        "positive_only": max(a, 0.0),
        "negative_only": min(a, 0.0),
        "one_only": 1.0 if a > 0 else 0.0,
        "binary": (a > 0) - (a < 0),
    }[options.adv_mode]
    r = min(max(0.5 + a / (2 * most), 0.0), 1.0)
    b = options.mix_beta
    losses = []
    for positive in (True, False):
        errors = []
        for vj, oj, cj, ej in zip(v, old, x0, e, strict=True):
            mixed = (1 - b) * oj + b * vj if positive else (1 + b) * oj - b * vj
            errors.append((1 - t) * cj + t * ej - t * mixed - cj)
        size = max(float(mean(abs(x.detach()) for x in errors)), options.adaptive_weight_min)
        losses.append(mean(x * x for x in errors) / size)
    return most * (r * losses[0] + (1 - r) * losses[1]) / b


def loop(config, output, data):
    """The loss from the papers' formulas, one image, place and latent element at a time."""
    options = config.diffusion_loss
    objective = options.loss_mode
    b, k = data["sigmas"].shape
    keep = data["rollout_keep"].tolist()
    if objective == "dpo":
        keep = [[keep[i][p] and keep[i ^ 1][p] for p in range(k)] for i in range(b)]

    def flat(value):
        return [list(row.flatten().unbind()) for row in value]

    velocities, references = ([flat(image) for image in output[n]] for n in ("velocities", "ref_velocities"))
    olds, noises = ([flat(image) for image in data[n]] for n in ("old_velocities", "noise"))
    clean = flat(data["clean_latents"])
    total, count = tensor(0.0)[0], 0
    for i in range(b):
        for p in range(k):
            count += keep[i][p] or config.rollout_correction.rejection_normalization == "all"
            if not keep[i][p]:
                continue
            t, a = float(data["sigmas"][i, p]), float(data["advantages"][i])
            v, ref = velocities[i][p], references[i][p]
            u = [e - x for e, x in zip(noises[i][p], clean[i], strict=True)]
            if objective == "dpo":
                loss = loop_dpo(options, i, p, data["advantages"].tolist(), velocities, references, noises, clean)
            else:
                a = min(max(a, -options.adv_clip_max), options.adv_clip_max)
                rest = (clean[i], noises[i][p]) if objective == "diffusion_nft" else ()
                form = loop_nft if objective == "diffusion_nft" else loop_awm
                loss = form(options, a, v, olds[i][p], ref, u, t, *rest)
            total = total + float(data["rollout_is_weights"][i, p]) * loss
            if options.ref_kl_coef or config.use_kl_loss:
                total = total + COEFFICIENT * mean((x - y) ** 2 for x, y in zip(v, ref, strict=True))
    return total / count


def loop_dpo(options, i, p, advantages, velocities, references, noises, clean):
    """Diffusion-DPO of the pair that image ``i`` belongs to, at place ``p``."""
    gained = []
    for image in (i & ~1, i | 1):
        u = [e - x for e, x in zip(noises[image][p], clean[image], strict=True)]
        gained.append(
            mean((x - y) ** 2 for x, y in zip(velocities[image][p], u, strict=True))
            - mean((x - y) ** 2 for x, y in zip(references[image][p], u, strict=True))
        )
    first, second = advantages[i & ~1], advantages[i | 1]
    if first == second:
        return tensor(math.log(2.0))[0]
    winner, loser = gained if first > second else gained[::-1]
    return torch.log(1 + torch.exp(options.dpo_beta / 2 * (winner - loser)))


def random_settings(dice):
    return {
        "awm_weighting": dice.choice(["none", "t", "t2"]),
        "clip_ratio_low": dice.choice([0.02, 0.3]),
        "clip_ratio_high": dice.choice([0.05, 0.5]),
        "mix_beta": dice.choice([0.1, 0.5, 1.0, 1.7]),
        "adaptive_weight_min": dice.choice([1e-5, 0.4]),
        "adv_mode": dice.choice(["continuous", "positive_only", "negative_only", "one_only", "binary"]),
        "adv_clip_max": dice.choice([0.7, 2.0, 5.0]),
        "dpo_beta": dice.choice([0.5, 3.0, 20.0]),
    }


def spoiled(output, data):
    """NaN in everything that belongs to a rejected element."""
    keep = data["rollout_keep"]

    def spoil(value):
        return torch.where(keep[(...,) + (None,) * (value.dim() - 2)], value, math.nan)

    per_place = {name: spoil(data[name]) for name in ("noise", "sigmas", "old_velocities", "rollout_is_weights")}
    gone = ~keep.any(1)
    clean, advantages = data["clean_latents"].clone(), data["advantages"].clone()
    clean[gone] = advantages[gone] = math.nan
    output = {name: spoil(value) for name, value in output.items()}
    return output, {**data, **per_place, "clean_latents": clean, "advantages": advantages}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_values_and_gradients_are_those_of_a_loop(objective, seed):
    """Over random settings, shapes, masks, weights and KLs; NaN of what is rejected changes nothing."""
    dice = random.Random(f"{objective} {seed}")
    b, k = 2 * dice.randint(1, 3), 1 + seed % 4
    latent = tuple(dice.randint(1, 3) for _ in range(dice.randint(1, 3)))
    output, data = random_case(seed, b, k, latent)
    if seed == 5:
        data["advantages"][:2] = 1.0  # a tie
    data = with_correction(data, seed, kept=dice.choice([0.5, 1.0]))
    config = make_config(
        objective,
        kl=dice.choice(list(KLS)),
        normalization=dice.choice(["all", "kept"]),
        **random_settings(dice),
    )
    velocities = output["velocities"].clone().requires_grad_()
    expected = loop(config, {**output, "velocities": velocities}, data)
    expected.backward()
    for given in ((output, data), spoiled(output, data)):
        loss, gradient, metrics = run(config, *given)
        assert_close(loss, expected.detach())
        assert_close(gradient, velocities.grad)
        assert metrics["actor/loss"] == pytest.approx(float(loss))


def test_random_configurations_reach_what_they_are_to_test():
    """Clips on both sides, ties, advantages beyond the clamp, and either image of a pair as the winner."""
    metrics = [run(make_config("awm"), *random_case(seed))[2] for seed in range(8)]
    assert sum(one["actor/pg_clipfrac_higher"] for one in metrics) > 0.5
    assert sum(one["actor/pg_clipfrac_lower"] for one in metrics) > 0.5
    advantages = torch.stack([random_case(seed)[1]["advantages"] for seed in range(8)])
    assert {True, False} == set((advantages.abs() > 1.5).flatten().tolist())
    assert {True, False} == set((advantages[:, 0::2] > advantages[:, 1::2]).flatten().tolist())


# ---------------------------------------------------------------- cuts and ranks


@pytest.mark.parametrize("normalization", ["all", "kept"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_any_cut_gives_the_same_sums(objective, normalization):
    """Of rows, or for ``dpo`` of whole pairs."""
    config = make_config(objective, kl="ref_kl_coef", normalization=normalization)
    output, data = random_case(1, b=6, k=3)
    data = with_correction(data, 1)
    expected = run(config, output, data)
    if objective == "dpo":
        cuts = torch.arange(6).split(2), [torch.tensor([4, 5]), torch.tensor([2, 3, 0, 1])]
    else:
        output, data = as_rows(output, data)
        cuts = torch.arange(18).split(1), torch.randperm(18, generator=torch.Generator().manual_seed(0)).split(4)
    output["velocities"].requires_grad_()
    for cut in cuts:
        loss, gradients, metrics = accumulated(diffusion_loss_sums, config, output, data, cut)
        assert_close(loss, expected[0])
        assert_close(gradients["velocities"], expected[1].reshape(output["velocities"].shape))
        assert metrics == pytest.approx({name: expected[2][name] for name in metrics})


RANK_CASES = [(objective, normalization) for objective in OBJECTIVES for normalization in ("all", "kept")]


def rank_batch(objective, normalization):
    """Six images, of which rank 0 holds two and rank 1 four."""
    output, data = random_case(2, b=6)
    data = with_correction(data, 2)
    config = make_config(objective, kl="use_kl_loss", normalization=normalization)
    return config, output["velocities"], {**data, "ref_velocities": output["ref_velocities"]}


def loss_of_velocities(config, output, data, dp_group=None):
    """``diffusion_loss`` as ``on_two_ranks`` calls it: the one input with a gradient is named ``log_probs``."""
    velocities = {"velocities": output["log_probs"], "ref_velocities": data["ref_velocities"]}
    return diffusion_loss(config, velocities, data, dp_group)


@pytest.mark.process
def test_averaging_over_ranks_gives_the_gradient_of_the_joined_batch(tmp_path):
    ranks = on_two_ranks(tmp_path, loss_of_velocities, RANK_CASES, rank_batch, first=2)
    for case, *results in zip(RANK_CASES, *ranks, strict=True):
        config, velocities, data = rank_batch(*case)
        reference = {"ref_velocities": data.pop("ref_velocities")}
        expected = run(config, {"velocities": velocities, **reference}, data)
        for result in results:
            assert_close(result[:2], expected[:2], msg=lambda m, c=case: f"{c}: {m}")
            assert result[3] == pytest.approx(expected[2])


# ---------------------------------------------------------------- identities


def weighted_regression(output, data, weight):
    """Gradient of ``mean(weight * mean((v - u)^2))`` over all places."""
    velocities = output["velocities"].clone().requires_grad_()
    target = data["noise"] - data["clean_latents"].unsqueeze(1)
    (weight * (velocities - target).square().flatten(2).mean(2)).mean().backward()
    return velocities.grad


@pytest.mark.parametrize(("weighting", "power"), [("none", 0), ("t", 1), ("t2", 2)])
def test_awm_of_equal_policies_is_the_advantage_weighted_regression(weighting, power):
    """The ratio is 1, the loss minus the mean advantage, and the gradient that of ``A w(t) mean((v - u)^2)``."""
    output, data = random_case(3)
    data["old_velocities"] = output["velocities"]
    loss, gradient, metrics = run(make_config("awm", awm_weighting=weighting), output, data)
    advantages = data["advantages"].clamp(-1.5, 1.5)
    assert_close(loss, -advantages.mean())
    assert (metrics["actor/ratio_min"], metrics["actor/ratio_max"]) == (1.0, 1.0)
    assert metrics["actor/log_ratio_abs_mean"] == metrics["actor/pg_clipfrac"] == 0.0
    assert_close(gradient, weighted_regression(output, data, advantages[:, None] * data["sigmas"] ** power))


@pytest.mark.parametrize("mode", ["continuous", "positive_only", "negative_only", "one_only", "binary"])
@pytest.mark.parametrize("b", [0.1, 0.5, 1.0, 2.0])
def test_nft_at_the_old_policy_is_a_weighted_regression_for_any_mix(b, mode):
    """At ``v = v_old`` both errors are ``t (u - v)`` and ``dL+/dv = b g = -dL-/dv``, with ``g`` the gradient of
    ``mean(t^2 (u - v)^2)`` over the mean size. So ``a (r b g - (1-r) b g) / b = a (2r - 1) g``: the mode's advantage
    times ``g``."""
    output, data = random_case(4)
    data["old_velocities"] = output["velocities"]
    config = make_config("diffusion_nft", mix_beta=b, adv_mode=mode, adaptive_weight_min=0.8)
    target = data["noise"] - data["clean_latents"].unsqueeze(1)
    error = data["sigmas"][..., None, None] * (target - output["velocities"])
    size = error.abs().flatten(2).mean(2)
    assert {True, False} == set((size < 0.8).flatten().tolist())
    a = data["advantages"].clamp(-1.5, 1.5).tolist()
    advantage = {
        "continuous": a,
        "positive_only": [max(x, 0) for x in a],
        "negative_only": [min(x, 0) for x in a],
        "one_only": [float(x > 0) for x in a],
        "binary": [math.copysign(1, x) for x in a],
    }[mode]
    weight = tensor(*advantage)[:, None] * data["sigmas"].square() / size.clamp(min=0.8)
    assert_close(run(config, output, data)[1], weighted_regression(output, data, weight))


def test_nft_of_the_best_reward_without_a_mix_does_not_read_the_old_policy():
    """With ``b = 1`` and ``r = 1`` the loss is ``a L+`` at ``v+ = v``."""
    output, data = random_case(5)
    data["advantages"] = torch.full_like(data["advantages"], 1.5)
    config = make_config("diffusion_nft", mix_beta=1.0)
    expected = run(config, output, data)
    other = run(config, output, {**data, "old_velocities": 3 * data["old_velocities"] + 1})
    assert_close(other[:2], expected[:2])
    target = data["noise"] - data["clean_latents"].unsqueeze(1)
    error = (data["sigmas"][..., None, None] * (target - output["velocities"])).flatten(2)
    assert_close(expected[0], 1.5 * (error.square().mean(2) / error.abs().mean(2)).mean())


def test_dpo_at_the_reference_is_log_2_with_a_gradient_unless_it_is_a_tie():
    """There ``d/dv = beta/4 * (+-) d mean((v - u)^2)/dv``: half the slope of the sigmoid at 0, for winner and loser."""
    output, data = random_case(6)
    data["advantages"] = tensor(3.0, 2.5, -1.0, -1.0)  # beyond adv_clip_max=1.5, which does not make a tie
    output["ref_velocities"] = output["velocities"]
    loss, gradient, _ = run(make_config("dpo", dpo_beta=8.0), output, data)
    assert_close(loss, tensor(math.log(2.0))[0])
    # Each place of a pair counts twice, once for each image.
    signs = tensor(1.0, -1.0, 0.0, 0.0)[:, None].expand(4, 3)
    assert_close(gradient, weighted_regression(output, data, 2 * 8.0 / 4 * signs))


def test_dpo_rejects_whole_pairs():
    """One place of one image takes its partner out of the loss, the count and the KL."""
    output, data = random_case(7)
    keep = torch.ones(4, 3, dtype=torch.bool)
    keep[1, 2] = False
    config = make_config("dpo", kl="ref_kl_coef", normalization="kept")
    _, gradient, metrics = run(config, output, {**data, "rollout_keep": keep})
    assert metrics["actor/kept_fraction"] == pytest.approx(10 / 12)
    assert gradient.flatten(2).ne(0).all(2).tolist() == [[True, True, False]] * 2 + [[True] * 3] * 2
    both = keep.clone()
    both[0, 2] = False
    assert_close(run(config, output, {**data, "rollout_keep": both})[1], gradient, **EXACT)


@pytest.mark.parametrize("bypass", [False, True])
def test_awm_takes_log_probs_in_place_of_old_velocities(bypass):
    """In bypass mode they are those of the adapter that drew."""
    output, data = random_case(8)
    expected = run(make_config("awm", awm_weighting="t"), output, data)
    error = data.pop("old_velocities") - (data["noise"] - data["clean_latents"].unsqueeze(1))
    old = -data["sigmas"] * error.square().flatten(2).mean(2)
    config = make_config("awm", awm_weighting="t")
    config.rollout_correction.bypass_mode = bypass
    loss, gradient, metrics = run(config, output, {**data, "rollout_log_probs" if bypass else "old_log_probs": old})
    assert_close((loss, gradient), expected[:2])
    assert metrics["actor/ppo_kl"] == pytest.approx(expected[2]["actor/ppo_kl"])


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_inputs_stay_and_half_precision_is_computed_in_float32(objective):
    """A difference of noise and clean latents in bfloat16 would be off by a part in 256."""
    output, data = random_case(9)
    config = make_config(objective)
    assert_inputs_stay(lambda given: run(config, output, given), data)
    half = [{name: value.detach().bfloat16() for name, value in one.items()} for one in (output, data)]
    exact = [{name: value.to(F64) for name, value in one.items()} for one in half]
    assert float(run(config, *half)[0]) == pytest.approx(float(run(config, *exact)[0]), rel=1e-5)


@pytest.mark.filterwarnings("ignore:rollout correction rejected every element")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_if_all_is_rejected_loss_and_gradient_are_0_and_a_kept_nan_is_an_error(objective):
    output, data = random_case(10)
    config = make_config(objective, normalization="kept")
    none = torch.zeros(4, 3, dtype=torch.bool)
    loss, gradient, _ = run(config, *spoiled(output, {**data, "rollout_keep": none, "rollout_is_weights": none * 1.0}))
    assert loss == 0
    assert gradient.eq(0).all()
    output["velocities"][1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"actor/loss is nan; NaN or .* 3 of 72 in model_output\['velocities'\]$"):
        run(config, output, data)


LACKING = [
    ("awm", None, "clean_latents", "data (loss_mode=awm)"),
    ("awm", None, "noise", "data (loss_mode=awm)"),
    ("dpo", None, "sigmas", "data (loss_mode=dpo)"),
    ("awm", None, "advantages", "data"),
    ("diffusion_nft", None, "velocities", "model_output (loss_mode=diffusion_nft)"),
    ("diffusion_nft", None, "old_velocities", "data (loss_mode=diffusion_nft)"),
    ("awm", None, "old_velocities", "data (loss_mode=awm without old_log_probs)"),
    ("dpo", None, "ref_velocities", "model_output (loss_mode=dpo)"),
    ("awm", "ref_kl_coef", "ref_velocities", "model_output (kl_loss_type=velocity)"),
    ("diffusion_nft", "use_kl_loss", "ref_velocities", "model_output (kl_loss_type=velocity)"),
]


@pytest.mark.parametrize(("objective", "kl", "name", "where"), LACKING)
def test_what_is_missing_is_named(objective, kl, name, where):
    output, data = random_case(11)
    (output if name in output else data).pop(name)
    with pytest.raises(ValueError, match="lacks") as caught:
        diffusion_loss(make_config(objective, kl=kl), output, data)
    assert str(caught.value).startswith(f"{where} lacks {name!r}; it holds: ")
    assert "\n" not in str(caught.value)


SHAPES = [
    ("awm", "noise", (4, 2, 2, 3), "(4, 2, 2, 3); expected (4, 3, 2, 3)"),
    ("awm", "clean_latents", (4, 2, 2), "(4, 2, 2); expected (4, 2, 3)"),
    ("awm", "clean_latents", (1, 2, 3), "(1, 2, 3); expected (4, 2, 3)"),
    ("awm", "clean_latents", (4, 1, 1), "(4, 1, 1); expected (4, 2, 3)"),
    ("awm", "clean_latents", (4, 3, 2, 3), "(4, 3, 2, 3); expected (4, 2, 3)"),
    ("awm", "sigmas", (4,), None),
    ("awm", "sigmas", (4, 1), None),
    ("awm", "velocities", (4, 3, 2, 1), "(4, 3, 2, 1); expected (4, 3, 2, 3)"),
    ("awm", "old_velocities", (4, 3, 6), "(4, 3, 6); expected (4, 3, 2, 3)"),
    ("diffusion_nft", "old_velocities", (4, 1, 2, 3), "(4, 1, 2, 3); expected (4, 3, 2, 3)"),
    ("dpo", "ref_velocities", (4, 2, 3), "(4, 2, 3); expected (4, 3, 2, 3)"),
    ("dpo", "advantages", (3,), "(3,); expected (4,) or (4, 3)"),
    ("awm", "old_log_probs", (4,), "(4,) but log_probs has (4, 3)"),
    ("awm", "rollout_keep", (4,), "(4,) but log_probs has (4, 3)"),
]


@pytest.mark.parametrize(("objective", "name", "shape", "told"), SHAPES)
def test_a_shape_that_does_not_fit_is_named(objective, name, shape, told):
    output, data = random_case(12)
    (output if name in output else data)[name] = torch.ones(shape, dtype=F64)
    # With other levels the noise or the clean latents do not fit.
    expected = f"{name} has shape {told}" if told else "has shape"
    with pytest.raises(ValueError, match="has shape") as caught:
        diffusion_loss(make_config(objective), output, data)
    assert str(caught.value).startswith(expected) or told is None
    assert "\n" not in str(caught.value)


def test_an_odd_number_of_images_has_no_pairs():
    output, data = random_case(13)
    output, data = ({name: value[:3] for name, value in one.items()} for one in (output, data))
    with pytest.raises(ValueError, match=r"^sigmas has shape \(3, 3\), but loss_mode=dpo compares .* an even number$"):
        diffusion_loss(make_config("dpo"), output, data)


@pytest.mark.parametrize("objective", ["diffusion_nft", "dpo"])
def test_reinforce_is_refused_where_it_would_replace_the_objective(objective):
    with pytest.raises(ValueError, match=f"loss_mode: got {objective} with loss_type=reinforce"):
        DiffusionActorConfig(
            diffusion_loss=DiffusionLossConfig(loss_mode=objective),
            rollout_correction={"bypass_mode": True, "loss_type": "reinforce"},
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_which_gradients_an_advantage_of_zero_removes(objective):
    """The update leaves such images out where the table says so."""
    output, data = random_case(3)
    data["advantages"][:2] = tensor(0.0, 1.0)  # a pair whose advantages are equal has no gradient
    _, gradient, _ = run(make_config(objective), output, data)
    assert bool((gradient[0] == 0).all()) == TABLE[objective].scales_with_advantage
    assert gradient[1].any()
