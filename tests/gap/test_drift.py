"""The drift: what an update learns from the gap alone, against closed forms and against sampled updates."""

import math

import pytest
import torch
from tensordict import TensorDict

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.gap.research.drift import SKETCH, DriftMeter, count_sketch, without_correction
from flowgrpo_rc.loss import diffusion_loss_sums
from flowgrpo_rc.sde import Transition, log_prob

IMAGES = 96
WINDOW = 2
DIMENSIONS = 24
PARAMETERS = 6
STD = 0.5
SCHEDULE = (900.0, 600.0, 300.0)


def mode_with(correction=None, **loss):
    """Bypass mode with these loss options and this correction."""
    return ModeInForce.configured(
        DiffusionActorConfig(
            diffusion_loss=DiffusionLossConfig(**loss), rollout_correction={"bypass_mode": True} | (correction or {})
        )
    )


class LinearActor(DiffusionActor):
    """An actor whose transition means are linear in its parameters; the engine's are those at ``engine``.

    The meter calls nothing of an actor but ``gradients``, so that a model, an optimizer and an accelerator are spared.
    Windows of images begin at ``places`` of the schedule, one after the other.
    """

    def __init__(self, *, spread=0.2, engine=0.01, images=IMAGES, sde_type="sde", window=WINDOW, places=(0,)):
        generator = torch.Generator().manual_seed(0)
        self.images = images
        self.sde_type = sde_type
        first = torch.tensor(places).repeat(images)[:images, None]
        self.columns = first + torch.arange(window)
        steps = int(self.columns.max()) + 1
        common = torch.randn(1, steps, DIMENSIONS, PARAMETERS, generator=generator)
        own = torch.randn(images, steps, DIMENSIONS, PARAMETERS, generator=generator)
        self.design = common + spread * own
        self.parameters = torch.zeros(PARAMETERS, requires_grad=True)
        self.engine = engine * torch.randn(PARAMETERS, generator=generator)

    def batch(self, seed=1):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.arange(self.images)
        means = self.design[rows[:, None], self.columns] @ self.engine
        timesteps = torch.tensor(SCHEDULE)[self.columns]
        columns = {
            Key.NEXT_LATENTS: means + STD * torch.randn(means.shape, generator=generator),
            Key.ROLLOUT_MEANS: means,
            Key.TIMESTEPS: timesteps,
            Key.SIGMAS: timesteps / 1000,
            Key.NEXT_SIGMAS: (timesteps - 300) / 1000,
            Key.PROMPT_INDEX: rows,
        }
        batch = TensorDict({name: value.contiguous() for name, value in columns.items()}, batch_size=[self.images])
        batch[Key.ROLLOUT_LOG_PROBS] = self.log_probs(means, batch)
        return batch

    def log_probs(self, means, data):
        latents = data[Key.NEXT_LATENTS].flatten(0, 1)
        step = Transition(means.flatten(0, 1), torch.full_like(latents[:, 0], STD))
        return log_prob(step, latents, sde_type=self.sde_type).view(means.shape[:2])

    def output(self, data):
        steps = (data[Key.TIMESTEPS][..., None] == torch.tensor(SCHEDULE)).byte().argmax(-1)
        means = self.design[data[Key.PROMPT_INDEX][:, None], steps] @ self.parameters
        stds = torch.full(means.shape[:2], STD)
        return {"log_probs": self.log_probs(means, data), "transition_means": means, "transition_stds": stds}

    @torch.no_grad()
    def rescore(self, batch, conditioning=None):
        return self.output(batch)

    def gradients(self, batch, conditioning, losses):
        output = self.output(batch)
        return [torch.autograd.grad(loss(output, batch), self.parameters, retain_graph=True)[0] for loss in losses]


def add(meter, actor, batch):
    """The probe's work on a batch."""
    meter.add(actor, batch, actor.rescore(batch), None)


def drift_gradient(mode, actor, batch, seed=0):
    """The expected drift of one image, as the meter sums it."""
    meter = DriftMeter(mode, actor.sde_type, seed)
    batch[Key.ADVANTAGES] = torch.ones(len(batch))
    loss = meter._drift_loss(actor.output(batch), batch)
    return torch.autograd.grad(loss, actor.parameters)[0] / len(batch)


def sampled_drift(mode, actor, draws=200, shared=()):
    """The same from the configured loss itself, at samples of the engine under advantages of +1 and -1.

    ``shared`` are columns that every batch has besides its samples.
    """
    total = torch.zeros(PARAMETERS)
    for seed in range(draws):
        batch = actor.batch(seed + 10)
        batch.update(dict(shared))
        for sign in (1.0, -1.0):
            batch[Key.ADVANTAGES] = torch.full((IMAGES,), sign)
            loss = diffusion_loss_sums(mode, actor.output(batch), batch).loss_sum
            total += torch.autograd.grad(loss, actor.parameters)[0] / (2 * draws * actor.columns.numel())
    return total


def mean_gap(actor):
    """Root of twice the mean divergence, as a log ratio of this kind of step has it."""
    kl = (actor.design @ actor.engine).square().sum(-1) / (2 * STD**2)
    unit = 2 * STD**2 if actor.sde_type == "cps" else 1.0
    return float((2 * kl).sqrt().mean()) / DIMENSIONS * unit


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_is_that_under_calibrated_limits():
    """Each image has a rejection bound of its own, and each step a clip band."""
    actor = LinearActor()
    gap = mean_gap(actor)
    mode = mode_with({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto"}, clip_ratio="auto")
    widths = gap * torch.linspace(0.3, 1.2, 2 * IMAGES).view(2, IMAGES).T.contiguous()
    limits = {Key.ROLLOUT_RS_BOUNDS: gap * torch.linspace(0.4, 2.0, IMAGES), Key.CLIP_WIDTHS: widths}
    batch = actor.batch()
    batch.update(limits)
    meter = DriftMeter(mode, "sde", 0)
    add(meter, actor, batch)
    expected = torch.stack(meter.group_sums()).sum(0) / IMAGES
    sampled = sampled_drift(mode, actor, draws=100, shared=limits.items())
    assert (expected - sampled).norm() < 0.1 * sampled.norm()
    for name, values in limits.items():
        batch[name] = 10 * values  # which is to say that either limit acted
        wider = DriftMeter(mode, "sde", 0)
        add(wider, actor, batch)
        batch[name] = values
        assert (torch.stack(wider.group_sums()).sum(0) / IMAGES - sampled).norm() > 0.2 * sampled.norm()


def test_timesteps_are_told_apart():
    """Each has the drift that images have whose window is that one step, in the unit of them all."""
    actor = LinearActor(places=(0, 1))
    mode = mode_with(clip_ratio=0.5 * mean_gap(actor))
    meter = DriftMeter(mode, "sde", 0)
    batch = actor.batch()
    add(meter, actor, batch[:40])
    add(meter, actor, batch[40:])
    found = meter.result(0.95)
    unit = math.sqrt(WINDOW * sum(group.square for group in meter._groups.values()) / meter.images)
    assert [one.timestep for one in found.timesteps] == list(SCHEDULE)
    weighted = 0.0
    for one in found.timesteps:
        rows, steps = (batch[Key.TIMESTEPS] == one.timestep).nonzero(as_tuple=True)
        columns = {name: v[rows, steps][:, None] if v.dim() > 1 else v[rows] for name, v in batch.items()}
        alone = TensorDict(columns, batch_size=[len(rows)])
        norm = float(drift_gradient(mode, actor, alone).norm())
        assert one.value == pytest.approx(norm / unit, rel=0.05)
        assert one.interval.low < one.value < one.interval.high
        weighted += one.value * len(rows) / batch[Key.TIMESTEPS].numel()
    # The three have different directions, so that their sum is shorter.
    assert 0.9 * weighted < found.value < 0.99 * weighted


def test_a_sketch_keeps_scalar_products():
    generator = torch.Generator().manual_seed(0)
    size = 3 * SKETCH + 5
    sketch = count_sketch
    common = torch.randn(size, generator=generator)
    one, other = (common + torch.randn(size, generator=generator) for _ in range(2))
    allowed = 4 * float(one.norm() * other.norm()) / math.sqrt(SKETCH)
    product = float(one.double() @ other.double())
    sketched = sketch(one)
    assert len(sketched) == SKETCH
    assert float(sketched @ sketch(other)) == pytest.approx(product, abs=allowed)
    assert product > 20 * allowed
    assert torch.equal(sketch(one[:SKETCH]), one[:SKETCH])


def test_a_clip_band_is_a_penalty_on_the_gap():
    """``E[(|l| - c)+] / 2`` with ``l ~ N(-K, 2K)`` per dimension, in closed form; the band is narrow against 1."""
    actor = LinearActor()
    width = 0.7 * mean_gap(actor)
    means = actor.design.double() @ actor.parameters.double()
    kl = (means - (actor.design @ actor.engine).double()).square().sum(-1) / (2 * STD**2)
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


@pytest.mark.parametrize(("gap", "band", "cosine"), [(0.0, "0.5_2.0", 1.0), (0.01, "0.99999999_1.00000001", 0.0)])
def test_without_a_gap_or_where_everything_is_rejected_there_is_no_drift(gap, band, cosine):
    actor = LinearActor(engine=gap)
    meter = DriftMeter(
        mode_with({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": band}, clip_ratio=1e-4), "sde", 0
    )
    add(meter, actor, actor.batch())
    found = meter.result(0.95)
    assert (found.value, found.interval.low) == (0, 0)
    assert found.cosine == pytest.approx(cosine)


@pytest.mark.slow
def test_its_unit_is_the_gradient_of_one_step():
    """Twice the images, or a batch twice as large, give the same value; so does the sum of two batches."""
    actor = LinearActor()
    mode = mode_with(clip_ratio=0.5 * mean_gap(actor))
    one = DriftMeter(mode, "sde", 0)
    add(one, actor, actor.batch(1))
    two = DriftMeter(mode, "sde", 0)
    for seed in (1, 2, 3, 4):
        add(two, actor, actor.batch(seed))
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


@pytest.mark.slow
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
        add(whole, actor, batch[trial * images : (trial + 1) * images])
    unit = math.sqrt(WINDOW * sum(group.square for group in whole._groups.values()) / whole.images)
    held = 0
    for trial in range(trials):
        meter = DriftMeter(mode, "sde", trial)
        add(meter, actor, batch[trial * images : (trial + 1) * images])
        found = meter.result(0.95)
        held += found.interval.low <= truth / unit <= found.interval.high
    assert held >= 35
