"""The KL to a reference: its two kinds on a model, the three references, and weights that come back."""

import math

import pytest
import torch
from test_rows import IMAGES, WINDOW, Rig, assert_same, config
from torch.testing import assert_close

from flowgrpo_rc.actor import actor as actor_module
from flowgrpo_rc.actor.rows import RecordedSteps
from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state, load_adapter_state
from flowgrpo_rc.sde import transition_kl

ROWS = torch.arange(IMAGES)


@pytest.fixture(scope="module")
def rig():
    torch.set_num_threads(1)
    return Rig()


def with_kl(reference="base", kind="velocity", rows=None, **settings):
    more = {"ema_decay": 0.5} if reference == "average" else {}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind, "kl_reference": reference}
    return config(rows=rows, **kl, **more, **settings)


def ready(rig, settings, other=None):
    """The actor as it was, with the reference of these settings: its own weights, or others."""
    rig.reset(settings)
    rig.actor.start = rig.actor.average = None
    rig.actor.load_average(None)
    rig.actor.load_start(other)
    if settings.kl_reference == "average" and other:
        rig.actor.average.shadow_params = [value.clone() for value in other.values()]


def update(rig, settings, other=None, size=IMAGES):
    """``Rig.update`` with the reference of these settings."""
    ready(rig, settings, other)
    return rig.update(settings, size=size)


def other_adapter(rig, *, b_is_zero=False):
    """A random adapter of the actor's shapes; ``b_is_zero``: a fresh one."""
    generator = torch.Generator().manual_seed(9)
    state = adapter_state(rig.actor.transformer)
    return {
        name: 0.05 * torch.randn(value.shape, generator=generator) * (0.0 if b_is_zero and ".lora_B." in name else 1.0)
        for name, value in state.items()
    }


def outputs(rig, settings, start=None):
    """The update's forward of all rows."""
    ready(rig, settings, start)
    (micro,) = RecordedSteps(rig.batch, rig.cond, torch.device("cpu")).cut(ROWS, IMAGES * WINDOW)
    return rig.actor._forward(micro, means=True, learns=True), micro.data


def test_the_gaussian_kl_is_the_velocity_kl_times_the_factor_of_the_step(rig):
    """The mean moves by ``(1 + g^2 (1-s) / 2s) dt`` per unit of velocity, and the KL divides by ``2 g^2 |dt|``, with
    ``g^2 = .49 s / (1-s)``, and ``1 - s'`` in its place at pure noise."""
    output, data = outputs(rig, with_kl(kind="gaussian"))
    found = transition_kl(output["transition_means"], output["ref_transition_means"], output["transition_stds"])
    squares = (output["velocities"] - output["ref_velocities"]).double().square().flatten(1).mean(1)
    factors = []
    for s, after in zip(data[Key.SIGMAS].tolist(), data[Key.NEXT_SIGMAS].tolist(), strict=True):
        g2 = 0.49 * s / (1 - (after if s == 1 else s))
        factors.append(((1 + g2 * (1 - s) / (2 * s)) * (after - s)) ** 2 / (2 * g2 * (s - after)))
    assert len(set(factors)) >= WINDOW
    assert_close(found.double(), squares * torch.tensor(factors, dtype=torch.float64), rtol=1e-3, atol=1e-12)
    metrics = {kind: update(rig, with_kl(kind=kind))[0]["actor/kl_loss"] for kind in ("gaussian", "velocity")}
    assert metrics["gaussian"] == pytest.approx(float(found.mean().detach()), rel=1e-5)
    assert metrics["velocity"] == pytest.approx(float(squares.mean().detach()), rel=1e-5)


@pytest.mark.parametrize("kind", ["gaussian", "velocity"])
def test_a_fresh_start_is_the_base_bit_for_bit(rig, kind):
    """Two optimizer steps, so that the actor has moved on the way."""
    base = update(rig, with_kl("base", kind), size=2)
    fresh = update(rig, with_kl("start", kind), other_adapter(rig, b_is_zero=True), size=2)
    assert base[0] == fresh[0]
    assert base[0]["actor/kl_loss"] > 1e-6
    assert torch.equal(base[1], fresh[1])


def test_the_reference_is_another_adapter_loaded_in_its_place(rig):
    """Forwards of an actor that has the other weights give the same velocities, bit for bit."""
    other = other_adapter(rig)
    output, _ = outputs(rig, with_kl("start"), other)
    assert not output["ref_velocities"].requires_grad
    load_adapter_state(rig.actor.transformer, other)
    rig.actor.config = config()
    (micro,) = RecordedSteps(rig.batch, rig.cond, torch.device("cpu")).cut(ROWS, IMAGES * WINDOW)
    with torch.no_grad():
        alone = rig.actor._forward(micro, means=False, learns=True)["velocities"]
    assert torch.equal(alone, output["ref_velocities"])
    assert not torch.equal(alone, output["velocities"])
    rms = [math.sqrt(output[name].detach().double().square().mean()) for name in ("velocities", "ref_velocities")]
    metrics = update(rig, with_kl("start"), other)[0]
    assert [metrics[f"actor/{name}"] for name in ("velocity_norm", "ref_velocity_norm")] == pytest.approx(rms)


def test_the_average_is_the_one_before_the_optimizer_step(rig, monkeypatch):
    """At the first step it equals the actor, so that there is no KL; at the second it is that of the first step's
    weights, which the actor has too; at the third it is behind. Later epochs follow the same rule."""
    seen = []
    forward = rig.actor._forward

    def noting(micro, **options):
        output = forward(micro, **options)
        average = rig.actor.averaged_state()
        seen.append((micro, output["ref_velocities"], {name: value.clone() for name, value in average.items()}))
        return output

    monkeypatch.setattr(rig.actor, "_forward", noting)
    metrics, _, gradients = update(rig, with_kl("average", ppo_epochs=2), size=2)
    monkeypatch.undo()
    assert len(seen) == len(gradients) == 4
    assert metrics["actor/kl_loss"] > 0
    rig.actor.config = config()
    for step, (micro, found, average) in enumerate(seen):
        load_adapter_state(rig.actor.transformer, average)
        with torch.no_grad():
            assert torch.equal(rig.actor._forward(micro, means=False, learns=True)["velocities"], found), step
    first, second, third, _ = (average for _, _, average in seen)
    start = dict(zip(first, rig.start, strict=True))
    assert all(torch.equal(first[name], start[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in second)


@pytest.mark.parametrize("reference", ["base", "start", "average"])
@pytest.mark.parametrize("objective", ["flow_grpo", "grpo_guard"])
def test_an_update_does_not_depend_on_the_cut(rig, objective, reference):
    expected = update(rig, with_kl(reference, objective=objective), other_adapter(rig), size=2)
    assert expected[0]["actor/kl_loss"] > 1e-6
    assert_same(update(rig, with_kl(reference, rows=2, objective=objective), other_adapter(rig), size=2), expected)


def test_checkpointing_recomputes_the_actor_and_not_the_reference(rig):
    """Activations are computed again in the backward pass, when the adapter has its own weights again."""
    start = other_adapter(rig)
    expected = update(rig, with_kl("start"), start)
    rig.actor.transformer.enable_gradient_checkpointing()
    try:
        assert_same(update(rig, with_kl("start"), start), expected)
    finally:
        rig.actor.transformer.disable_gradient_checkpointing()


@pytest.mark.parametrize("reference", ["base", "start", "average"])
def test_an_error_in_the_reference_leaves_the_actor_as_it_was(rig, reference, monkeypatch):
    ready(rig, with_kl(reference), other_adapter(rig))
    before = [(p.data_ptr(), p.detach().clone()) for p in rig.actor._parameters]

    def failing(*_, **__):
        raise MemoryError

    monkeypatch.setattr(rig.actor._model, "velocity", failing)
    with pytest.raises(MemoryError):
        rig.actor.update(rig.batch, rig.cond, [MiniBatch(ROWS)])
    monkeypatch.undo()
    assert [p.data_ptr() for p in rig.actor._parameters] == [place for place, _ in before]
    assert all(torch.equal(p, value) for p, (_, value) in zip(rig.actor._parameters, before, strict=True))
    output, _ = outputs(rig, config())
    assert not torch.equal(output["velocities"], outputs(rig, with_kl("base"))[0]["ref_velocities"])


def test_a_start_of_another_adapter_is_refused(rig):
    state = other_adapter(rig)
    state.pop(next(iter(state)))
    with pytest.raises(AdapterMismatchError, match="1 of .* weights missing"):
        ready(rig, with_kl("start"), state)


def test_nothing_is_held_or_run_without_a_use(rig, monkeypatch):
    """No start without its KL, and one forward a micro-batch."""
    calls = []
    velocity = rig.actor._model.velocity
    monkeypatch.setattr(rig.actor._model, "velocity", lambda *a, **k: calls.append(0) or velocity(*a, **k))
    for settings, forwards in ((config(), 1), (with_kl("base"), 2), (with_kl("average"), 2)):
        calls.clear()
        metrics = update(rig, settings)[0]
        assert len(calls) == forwards
        assert ("actor/ref_velocity_norm" in metrics) is (forwards == 2)
        assert metrics["actor/velocity_norm"] > 0.1
    ready(rig, with_kl("base"))
    assert rig.actor.start is None
    assert actor_module.DiffusionActor.averaged_state(rig.actor) is None
