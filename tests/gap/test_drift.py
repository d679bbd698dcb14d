"""The drift: what an update learns from the gap alone, against closed forms and against sampled updates."""

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.gap.drift import DriftMeter, without_correction
from flowgrpo_rc.loss import diffusion_loss_sums
from flowgrpo_rc.sde import Transition, log_prob

IMAGES = 96
WINDOW = 2
DIMENSIONS = 24
PARAMETERS = 6


def mode_with(correction=None, **loss):
    """Bypass mode with these loss options and this correction."""
    return ModeInForce.configured(
        DiffusionActorConfig(
            diffusion_loss=DiffusionLossConfig(**loss),
            rollout_correction={"bypass_mode": True} | (correction or {}),
        )
    )


class LinearActor(DiffusionActor):
    """An actor whose transition means are linear in its parameters; the engine's are those at ``engine``.

    The meter calls nothing of an actor but ``gradients``, so that a model, an optimizer and an accelerator are spared.
    """

    def __init__(self, *, spread=0.2, engine=0.01, images=IMAGES):
        generator = torch.Generator().manual_seed(0)
        self.images = images
        common = torch.randn(1, WINDOW, DIMENSIONS, PARAMETERS, generator=generator)
        own = torch.randn(images, WINDOW, DIMENSIONS, PARAMETERS, generator=generator)
        self.design = common + spread * own
        self.parameters = torch.zeros(PARAMETERS, requires_grad=True)
        self.engine = engine * torch.randn(PARAMETERS, generator=generator)
        self.std = torch.full((images, WINDOW), 0.5)

    def batch(self, seed=1):
        generator = torch.Generator().manual_seed(seed)
        means = self.design @ self.engine
        noise = torch.randn(means.shape, generator=generator)
        latents = means + self.std[..., None] * noise
        sampled = log_prob(Transition(means.flatten(0, 1), self.std.flatten()), latents.flatten(0, 1), sde_type="sde")
        columns = {
            Key.NEXT_LATENTS: latents,
            Key.LATENTS: latents,
            Key.ROLLOUT_MEANS: means,
            Key.ROLLOUT_LOG_PROBS: sampled.view(self.images, WINDOW),
            Key.TIMESTEPS: torch.tensor([900.0, 600.0]).expand(self.images, WINDOW),
            Key.SIGMAS: torch.tensor([0.9, 0.6]).expand(self.images, WINDOW),
            Key.NEXT_SIGMAS: torch.tensor([0.6, 0.3]).expand(self.images, WINDOW),
            Key.PROMPT_INDEX: torch.arange(self.images),
        }
        return TensorDict({name: value.contiguous() for name, value in columns.items()}, batch_size=[self.images])

    def output(self, data):
        rows = data[Key.PROMPT_INDEX]
        means = self.design[rows] @ self.parameters
        latents = data[Key.NEXT_LATENTS].flatten(0, 1)
        step = Transition(means.flatten(0, 1), self.std[rows].flatten())
        log_probs = log_prob(step, latents, sde_type="sde").view(len(rows), WINDOW)
        return {"log_probs": log_probs, "transition_means": means, "transition_stds": self.std[rows]}

    def gradients(self, batch, conditioning, losses):
        output = self.output(batch)
        return [torch.autograd.grad(loss(output, batch), self.parameters, retain_graph=True)[0] for loss in losses]


def drift_gradient(mode, actor, batch, seed=0):
    """The expected drift of one image, as the meter sums it."""
    meter = DriftMeter(mode, "sde", seed)
    batch[Key.ADVANTAGES] = torch.ones(len(batch))
    loss = meter._drift_loss(actor.output(batch), batch)
    return torch.autograd.grad(loss, actor.parameters)[0] / len(batch)


def sampled_drift(mode, actor, draws=200):
    """The same from the configured loss itself, at samples of the engine under advantages of +1 and -1."""
    total = torch.zeros(PARAMETERS)
    for seed in range(draws):
        batch = actor.batch(seed + 10)
        for sign in (1.0, -1.0):
            batch[Key.ADVANTAGES] = torch.full((IMAGES,), sign)
            loss = diffusion_loss_sums(mode, actor.output(batch), batch).loss_sum
            total += torch.autograd.grad(loss, actor.parameters)[0] / (2 * draws * IMAGES * WINDOW)
    return total


def mean_gap(actor):
    kl = (actor.design @ actor.engine).square().sum(-1) / (2 * 0.25)
    return float((2 * kl).sqrt().mean()) / DIMENSIONS


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        ({"clip_ratio": 0.8}, {}),
        ({"clip_ratio_low": 0.3, "clip_ratio_high": 1.2}, {}),
        ({"clip_ratio": 0.5}, {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "REJECT"}),
        ({"loss_mode": "grpo_guard", "clip_ratio": 0.4}, {}),
        ({"loss_mode": "flow_dppo", "kl_mask_threshold": 0.5}, {}),
    ],
    ids=["clip", "two sides", "rejection", "grpo_guard", "flow_dppo"],
)
def test_the_drift_is_what_sampled_updates_learn_whatever_is_rewarded(loss, correction):
    """Limits are given in units of the mean gap, or of the mean KL; samples are the slow reference."""
    actor = LinearActor()
    gap = mean_gap(actor)
    kl = DIMENSIONS * gap**2 / 2
    scale = {"clip_ratio": gap, "clip_ratio_low": gap, "clip_ratio_high": gap, "kl_mask_threshold": kl}
    loss = {name: value * scale[name] if name in scale else value for name, value in loss.items()}
    if "rollout_rs" in correction:
        correction = correction | {"rollout_rs_threshold": f"{math.exp(-gap)}_{math.exp(gap)}"}
    mode = mode_with(correction, **loss)
    expected = drift_gradient(mode, actor, actor.batch())
    sampled = sampled_drift(mode, actor)
    assert (expected - sampled).norm() < 0.1 * sampled.norm()
    # The loss falls toward the engine: the other way round would fail here.
    assert expected @ actor.engine < 0


def test_a_clip_band_is_a_penalty_on_the_gap():
    """``E[(|l| - c)+] / 2`` with ``l ~ N(-K, 2K)`` per dimension, in closed form; the band is narrow against 1."""
    actor = LinearActor()
    width = 0.7 * mean_gap(actor)
    means = actor.design.double() @ actor.parameters.double()
    kl = (means - (actor.design @ actor.engine).double()).square().sum(-1) / (2 * 0.25)
    c = width * DIMENSIONS
    std = (2 * kl).sqrt()
    normal = torch.distributions.Normal(0.0, 1.0)

    def excess(sign):
        """``E[(sign L - C)+]`` of ``L ~ N(-K, 2K)``."""
        mean = -sign * kl
        z = (mean - c) / std
        return (mean - c) * normal.cdf(z) + std * torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    penalty = (excess(1) + excess(-1)).sum() / DIMENSIONS / 2 / IMAGES / WINDOW
    (reference,) = torch.autograd.grad(penalty, actor.parameters)
    found = drift_gradient(mode_with(clip_ratio=width), actor, actor.batch())
    assert (found - reference).norm() < 0.05 * reference.norm()


def test_without_a_gap_there_is_no_drift():
    actor = LinearActor(engine=0.0)
    meter = DriftMeter(mode_with(clip_ratio=1e-4), "sde", 0)
    meter.add(actor, actor.batch(), None)
    found = meter.result(0.95)
    assert found.value == 0
    assert (found.interval.low, found.interval.high) == (0, 0)
    assert found.cosine == pytest.approx(1)


def test_where_everything_is_rejected_nothing_is_learned():
    actor = LinearActor()
    reject = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99999999_1.00000001"}
    meter = DriftMeter(mode_with(reject, clip_ratio=1e-4), "sde", 0)
    meter.add(actor, actor.batch(), None)
    found = meter.result(0.95)
    assert (found.value, found.interval.low, found.cosine) == (0, 0, 0)


def test_a_wider_band_has_less_drift_and_follows_the_reward_more():
    found = []
    for factor in (0.1, 0.5, 1, 2, 4):
        actor = LinearActor()
        meter = DriftMeter(mode_with(clip_ratio=factor * mean_gap(actor)), "sde", 0)
        meter.add(actor, actor.batch(), None)
        found.append(meter.result(0.95))
    values = [drift.value for drift in found]
    assert values == sorted(values, reverse=True)
    assert values[0] > 20 * values[-1]
    assert [drift.cosine for drift in found] == sorted(drift.cosine for drift in found)
    assert found[-1].cosine > 0.999
    assert found[0].cosine < 0.9


def test_its_unit_is_the_gradient_of_one_step():
    """Twice the images, or a batch twice as large, give the same value; so does the sum of two batches."""
    actor = LinearActor()
    mode = mode_with(clip_ratio=0.5 * mean_gap(actor))
    one = DriftMeter(mode, "sde", 0)
    one.add(actor, actor.batch(1), None)
    two = DriftMeter(mode, "sde", 0)
    for seed in (1, 2, 3, 4):
        two.add(actor, actor.batch(seed), None)
    assert two.images == 4 * IMAGES
    assert two.result(0.95).value == pytest.approx(one.result(0.95).value, rel=0.35)  # the unit is of random signs
    batch = actor.batch()
    exact = drift_gradient(mode, actor, batch).norm()
    batch[Key.ADVANTAGES] = torch.ones(IMAGES)
    squares = []
    for row in range(IMAGES):
        output = actor.output(batch[row : row + 1])
        old = {Key.OLD_LOG_PROBS: output["log_probs"].detach(), Key.ADVANTAGES: torch.ones(1)}
        loss = diffusion_loss_sums(without_correction(mode), output, old).loss_sum / WINDOW
        squares.append(float(torch.autograd.grad(loss, actor.parameters)[0].square().sum()))
    unit = math.sqrt(WINDOW * sum(squares) / IMAGES)
    assert two.result(0.95).value == pytest.approx(float(exact) / unit, rel=0.15)


def test_the_interval_holds_the_drift_of_many_images():
    """Images differ in where the gap pushes them; the truth is the drift of forty times as many."""
    trials = 40
    images = 48
    actor = LinearActor(spread=1.0, images=trials * images)
    mode = mode_with(clip_ratio=0.5 * mean_gap(actor))
    batch = actor.batch()
    truth = float(drift_gradient(mode, actor, batch).norm())
    whole = DriftMeter(mode, "sde", 0)
    for trial in range(trials):
        whole.add(actor, batch[trial * images : (trial + 1) * images], None)
    unit = math.sqrt(WINDOW * sum(group.square for group in whole._groups.values()) / whole.images)
    held = 0
    for trial in range(trials):
        meter = DriftMeter(mode, "sde", trial)
        meter.add(actor, batch[trial * images : (trial + 1) * images], None)
        found = meter.result(0.95)
        held += found.interval.low <= truth / unit <= found.interval.high
    assert held >= 35


def test_a_mode_without_the_correction_is_one_without_a_gap():
    mode = mode_with({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"}, clip_ratio="auto")
    free = without_correction(mode)
    assert not free.bypasses
    assert not free.rollout_correction.plan().can_reject
    assert free.rollout_correction.plan().importance is None
    assert free.diffusion_loss == replace(mode.diffusion_loss, clip_ratio=mode.diffusion_loss.auto_clip_min)


def test_a_batch_may_have_fewer_images_than_groups():
    actor = LinearActor()
    batch = actor.batch()
    meter = DriftMeter(mode_with(clip_ratio=0.5 * mean_gap(actor)), "sde", 0)
    meter.add(actor, batch[:2], None)
    assert meter.result(0.95).interval.high == math.inf
    for rows in (slice(2, 18), slice(18, 22)):
        meter.add(actor, batch[rows], None)
    assert meter.images == 22
    assert 0 < meter.result(0.95).interval.high < math.inf


def test_images_of_one_prompt_are_one_group():
    """Copies of an image say nothing of what images have in common."""
    actor = LinearActor(spread=3.0)
    batch = actor.batch()[torch.arange(4).repeat(6)]
    meter = DriftMeter(mode_with(clip_ratio=0.5 * mean_gap(actor)), "sde", 0)
    meter.add(actor, batch, None)
    assert len(meter.group_sums()) == 4


def test_without_any_gradient_a_drift_is_no_number_that_passes():
    meter = DriftMeter(mode_with(clip_ratio=1e-4), "sde", 0)
    actor = LinearActor()
    meter.add(actor, actor.batch(), None)
    for group in meter._groups.values():
        group.square = 0.0
    assert meter.result(0.95).value == math.inf
