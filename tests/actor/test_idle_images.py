"""Images without a gradient: an update leaves them out, and learns and measures the same."""

from types import SimpleNamespace

import pytest
import torch
from test_rows import IMAGES, WINDOW, Rig, config, on_two_processes
from tolerances import GRADIENT
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.batch import Key, MiniBatch, correct_old_policy
from flowgrpo_rc.loss.sums import LossMetrics
from flowgrpo_rc.models.lora import adapter_parameters

DECOUPLED = {"bypass_mode": False, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9998_1.0003"}
"""Mean log ratios are 2.6e-4, -2.4e-4, 3.9e-4 and .4e-4, so that the second and the third image are rejected."""
TWO_ZEROS = [1.0, 0.0, 0.0, -0.5]


@pytest.fixture(scope="module")
def rig():
    torch.set_num_threads(1)
    return Rig()


def learn(rig, settings, advantages, *, all_rows=False, scored=False):
    """Metrics, gradients of the optimizer steps, added weights and rows of all forwards of an update.

    Args:
        all_rows: leave no image out.
        scored: the old policy is scored and corrected beforehand.
    """
    rows = []
    gradients = []
    forward = DiffusionActor._forward
    rig.reset(settings)
    batch = rig.batch.clone()
    batch[Key.ADVANTAGES] = torch.tensor(advantages)
    images = torch.tensor([2, 0, 3, 1])
    old = None
    if scored:
        old, _ = correct_old_policy(rig.actor.score(batch, rig.cond), batch, settings.rollout_correction)

    def counted(self, micro, **options):
        rows.append(len(micro.data[Key.TIMESTEPS]))
        return forward(self, micro, **options)

    def taken(optimizer, *_):
        gradients.append(torch.cat([p.grad.flatten() for p in adapter_parameters(rig.actor.transformer).values()]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionActor, "_forward", counted)
        if all_rows:
            patch.setattr(DiffusionActor, "_with_gradient", lambda self, update, mini: mini)
        hook = rig.actor.optimizer.register_step_pre_hook(taken)
        mini = MiniBatch(images, None if old is None else old.rows(images))
        metrics = rig.actor.update(batch, rig.cond, [mini]).metrics
        hook.remove()
    weights = torch.cat([p.detach().flatten() for p in adapter_parameters(rig.actor.transformer).values()])
    added = weights - torch.cat([value.flatten() for value in rig.start])
    return SimpleNamespace(metrics=metrics, gradients=gradients, added=added, rows=sum(rows))


def assert_learns_the_same(found, expected):
    assert len(found.gradients) == len(expected.gradients) > 0
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert (one - other).norm() <= GRADIENT * other.norm()


REINFORCE = {"loss_type": "reinforce"}
CASES = [(objective, mode) for objective in ("flow_grpo", "grpo_guard", "flow_dppo") for mode in ({}, DECOUPLED)]


@pytest.mark.parametrize(("objective", "correction"), [*CASES, ("flow_grpo", REINFORCE)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_advantages_of_zero(rig, objective, correction, epochs):
    settings = config(objective, correction=correction, ppo_epochs=epochs)
    found = learn(rig, settings, TWO_ZEROS)
    expected = learn(rig, settings, TWO_ZEROS, all_rows=True)
    assert_learns_the_same(found, expected)
    assert (found.rows, expected.rows) == (2 * WINDOW * epochs, IMAGES * WINDOW * epochs)
    assert found.metrics["actor/pg_loss"] == pytest.approx(expected.metrics["actor/pg_loss"], rel=1e-5, abs=1e-9)
    assert found.metrics["perf/left_out_fraction"] == 0.5
    assert expected.metrics["perf/left_out_fraction"] == 0


@pytest.mark.parametrize("normalization", ["all", "kept"])
def test_rejected_images_count_as_ever(rig, normalization):
    """Every metric is that of an update with all images, also with a KL."""
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "velocity"}
    settings = config(correction=DECOUPLED | {"rejection_normalization": normalization}, **kl)
    found, expected = (
        learn(rig, settings, [1.0, -1.0, 2.0, -0.5], scored=True, all_rows=whole) for whole in (False, True)
    )
    assert_learns_the_same(found, expected)
    assert (found.rows, expected.rows) == (2 * WINDOW, IMAGES * WINDOW)
    for name, value in expected.metrics.items():
        if name != "perf/left_out_fraction":
            assert found.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-7), name
    assert found.metrics["actor/kept_fraction"] == 0.5
    assert found.metrics["perf/left_out_fraction"] == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.5},
        {"correction": DECOUPLED | {"rejection_normalization": "kept"}},
        {"correction": DECOUPLED | {"rollout_is": "sequence", "rollout_is_batch_normalize": True}},
    ],
    ids=["KL", "kept", "normalised weights"],
)
def test_advantages_of_zero_that_matter(rig, settings):
    """A KL moves the image all the same; a mean over kept steps and normalised weights depend on it."""
    found = learn(rig, config(**settings), TWO_ZEROS)
    assert found.metrics["perf/left_out_fraction"] == 0
    assert found.rows >= IMAGES * WINDOW


def test_a_mini_batch_without_any_advantage_takes_its_step(rig):
    """One image is computed, and moments and weight decay move the weights as ever."""
    settings = config()
    found = learn(rig, settings, [0.0] * IMAGES)
    expected = learn(rig, settings, [0.0] * IMAGES, all_rows=True)
    assert found.rows == WINDOW
    assert len(found.gradients) == 1
    assert not found.gradients[0].any()
    assert torch.equal(found.added, expected.added)
    assert found.metrics["perf/left_out_fraction"] == 0.75


def test_the_share_of_rejected_images_is_that_of_images_with_an_advantage(rig):
    """The second and the third image are rejected; without an advantage they count no more than kept ones do."""
    settings = config(correction=DECOUPLED)
    found = learn(rig, settings, [1.0, 0.0, 1.0, 0.0], scored=True)
    assert found.metrics["actor/kept_fraction"] == 0.5
    assert found.metrics["perf/left_out_fraction"] == 0.75
    assert found.rows == WINDOW


def test_a_step_is_taken_where_the_kept_images_have_no_advantage(rig):
    settings = config(correction=DECOUPLED)
    advantages = [0.0, 1.0, 1.0, 0.0]
    found, expected = (learn(rig, settings, advantages, scored=True, all_rows=whole) for whole in (False, True))
    assert len(found.gradients) == len(expected.gradients) == 1
    assert torch.equal(found.added, expected.added)


@pytest.mark.parametrize(("bypass", "scored"), [(False, True), (False, False), (True, False)])
def test_a_mini_batch_of_rejected_images_takes_no_step_though_some_are_idle(rig, bypass, scored):
    """Neither moments nor weight decay may move the weights where nothing is kept."""
    narrow = {"bypass_mode": bypass, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99999_1.00001"}
    for whole in (False, True):
        with pytest.warns(UserWarning, match="its optimizer step is skipped"):
            found = learn(rig, config(correction=narrow), TWO_ZEROS, scored=scored, all_rows=whole)
        assert found.gradients == []
        assert not found.added.any()
        assert found.metrics["actor/kept_fraction"] == 0


def test_left_out_elements_by_hand():
    """Four computed elements with ratios 1.2, .9, 1 and 1, then two rejected and three idle ones."""
    names = ("loss", "denominator", "kl_loss", "elements", "kept", "ppo_kl", "abs_log_ratio", "ratio")
    names = (*names, "clipped_high", "clipped_low", "inert")
    sums = torch.tensor([3.0, 4.0, 0.0, 4.0, 4.0, 0.4, 0.8, 4.1, 1.0, 1.0, 2.0], dtype=torch.float64)
    extremes = torch.tensor([-0.9, 1.2], dtype=torch.float64)
    computed = LossMetrics(names, sums, extremes)
    counted = computed.with_left_out(2, 3, counts_rejected=True).compute()
    assert counted["actor/pg_loss"] == pytest.approx(3 / 9)
    assert counted["actor/kept_fraction"] == pytest.approx(4 / 6)
    assert counted["actor/ratio_mean"] == pytest.approx(6.1 / 6)
    assert counted["actor/pg_clipfrac"] == pytest.approx(2 / 6)
    assert counted["perf/left_out_fraction"] == pytest.approx(5 / 9)
    kept = computed.with_left_out(2, 0, counts_rejected=False).compute()
    assert kept["actor/pg_loss"] == pytest.approx(3 / 4)
    above = LossMetrics(names, sums, torch.tensor([-1.1, 1.2], dtype=torch.float64))
    assert above.with_left_out(1, 0, counts_rejected=True).compute()["actor/ratio_min"] == 1.0
    assert above.with_left_out(0, 1, counts_rejected=True).compute()["actor/ratio_min"] == pytest.approx(1.1)


PAIR = [1.0, 0.0, 0.0, 0.0]


def gradient_of(rig, images):
    """Gradient of a mini-batch, its rows and the share that was left out."""
    rig.reset(config())
    batch = rig.batch.clone()
    batch[Key.ADVANTAGES] = torch.tensor(PAIR)
    rows = []
    forward = rig.actor._forward
    rig.actor._forward = lambda micro, **options: (
        rows.append(len(micro.data[Key.TIMESTEPS])) or forward(micro, **options)
    )
    metrics = rig.actor.update(batch, rig.cond, [MiniBatch(images)]).metrics
    flat = torch.cat([p.grad.flatten() for p in adapter_parameters(rig.actor.transformer).values()])
    return flat, sum(rows), metrics["perf/left_out_fraction"], metrics["actor/pg_loss"]


@pytest.mark.process
def test_processes_compute_equally_many_images(tmp_path):
    """The first has one image with a gradient, the second none."""
    found = on_two_processes(gradient_of, tmp_path)
    gradient, rows, share, loss = gradient_of(Rig(), torch.arange(IMAGES))
    assert (rows, share) == (WINDOW, 0.75)
    for own, rows, share, own_loss in found:
        assert (rows, share) == (WINDOW, 0.5)
        assert (own - gradient).norm() <= GRADIENT * gradient.norm()
        assert_close(own_loss, loss, atol=1e-9, rtol=1e-5)
