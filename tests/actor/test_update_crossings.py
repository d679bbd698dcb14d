"""Places at which an update waits for an accelerator: the whole list, with file and count."""

from types import SimpleNamespace

import pytest
import torch
from crossings import DEVICE, Crossings, put_on_device
from test_rows import IMAGES, LEVELS, MODES, Rig, config

from flowgrpo_rc.batch import Key, MiniBatch, correct_old_policy
from flowgrpo_rc.models.lora import adapter_parameters

pytestmark = pytest.mark.slow

ONE_WAIT = {("actor/actor.py", "to host"): 1}
"""Of an optimizer step: log-probs, metrics and the gradient's norm together."""


@pytest.fixture(scope="module")
def rig():
    torch.set_num_threads(1)
    rig = Rig(texts=('the text "12"', "x"), cfg=4.0)
    assert len({*rig.cond.prompts.lengths}) > 1
    actor = rig.actor
    put_on_device(actor.transformer)
    actor._parameters = list(adapter_parameters(actor.transformer).values())
    actor.optimizer = torch.optim.AdamW(actor._parameters, lr=1e-3)
    actor.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(actor.optimizer, lambda _: 1.0)
    real = actor._accelerator
    actor._accelerator = SimpleNamespace(device=DEVICE, autocast=real.autocast, backward=real.backward, num_processes=1)
    return rig


def update(rig, settings, mini_batches=None):
    """An update of the actor as it was: its result, its waits, and those of each optimizer step before its
    micro-batches are done."""
    actor = rig.actor
    for parameter, value in zip(actor._parameters, rig.start, strict=True):
        parameter.values.copy_(value)
    actor.config = settings
    actor.load_average(None)
    inside = []
    backward = actor._backward

    def counting(*arguments):
        before = crossings.found.copy()
        done = backward(*arguments)
        inside.append(crossings.found - before)
        return done

    with pytest.MonkeyPatch.context() as patch, Crossings() as crossings:
        patch.setattr(torch, "inference_mode", torch.no_grad)  # a tensor that only says where it lies takes no part
        patch.setattr(actor, "_backward", counting)
        result = actor.update(rig.batch, rig.cond, mini_batches or [MiniBatch(torch.arange(IMAGES))])
    return result, crossings.found, inside


CASES = {
    "bypass": config(ppo_micro_batch_size_per_gpu=1, correction=MODES["bypass"] | LEVELS["sequence"]),
    "reinforce, with the window cut": config(rows=2, correction=MODES["reinforce"] | LEVELS["token"]),
    "bounds by image": config(ppo_micro_batch_size_per_gpu=1, correction=MODES["bypass"] | LEVELS["auto"]),
    "bands by step": config(ppo_micro_batch_size_per_gpu=2, loss={"clip_ratio": "auto"}),
    "decoupled": config(ppo_micro_batch_size_per_gpu=1, correction=MODES["decoupled"] | LEVELS["token"]),
    "KL and average": config(rows=1, use_kl_loss=True, kl_loss_coef=0.1, ema_decay=0.9),
    "KL to the average": config(
        rows=4, use_kl_loss=True, kl_loss_type="velocity", kl_reference="average", ema_decay=0.9
    ),
    "means": config("grpo_guard", ppo_micro_batch_size_per_gpu=1, correction=MODES["decoupled"] | LEVELS["sequence"]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_step_waits_for_its_device_once(rig, case):
    """And not between its micro-batches."""
    update(rig, CASES[case])
    result, found, inside = update(rig, CASES[case])
    assert result.optimizer_steps == 1
    assert found == ONE_WAIT
    assert inside == [{}]


def test_the_waits_of_an_update_are_those_of_its_optimizer_steps(rig):
    """Two epochs of two mini-batches; the first one's means, which the second epoch compares with, are queued to the
    host, and no wait of their own."""
    correction = MODES["decoupled"] | {"rollout_is": "token"}
    settings = config("grpo_guard", ppo_micro_batch_size_per_gpu=1, ppo_epochs=2, correction=correction)
    first, second = torch.arange(IMAGES).split(2)
    rig.actor.config = settings
    with Crossings() as scoring:
        old = rig.actor.score(rig.batch[second], rig.cond)
    assert scoring.found == ONE_WAIT
    assert old.means.shape == rig.batch[Key.LATENTS][second].shape
    numbers = {Key.ROLLOUT_LOG_PROBS: rig.batch[Key.ROLLOUT_LOG_PROBS][second]}
    old, _ = correct_old_policy(old, numbers, rig.actor.config.rollout_correction)
    result, found, inside = update(rig, settings, [MiniBatch(first), MiniBatch(second, old)])
    assert result.optimizer_steps == 4
    assert found == {("actor/actor.py", "to host"): 4}
    assert inside == [{}] * 4


def test_a_window_that_is_cut_and_decided_about_whole_costs_a_second_wait(rig):
    """That of the scoring pass, which comes before all micro-batches of the optimizer step."""
    settings = config(rows=2, correction=MODES["reinforce"] | LEVELS["sequence"])
    update(rig, settings)
    result, found, inside = update(rig, settings)
    assert result.optimizer_steps == 1
    assert found == {("actor/actor.py", "to host"): 2}
    assert inside == [{("actor/actor.py", "to host"): 1}]


def test_a_first_update_brings_nothing_more_to_the_device_than_later_ones(rig):
    _, found, _ = update(rig, CASES["bypass"])
    assert found == ONE_WAIT
