"""A mini-batch from the buffer: learning from it again at once is a second PPO epoch; its weights are the oracle's."""

import dataclasses

import pytest
import torch
from accelerate import PartialState
from test_noised_rows import CleanRig, clean_config
from test_rows import IMAGES, Rig, config
from tolerances import GRADIENT
from torch.testing import assert_close

from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.models.lora import adapter_parameters
from flowgrpo_rc.replay import ReplayBuffer, ReplayConfig
from flowgrpo_rc.trainer.replay import window_weights

SEQUENCE = {"bypass_mode": False, "rollout_is": "sequence", "rollout_is_threshold": 1.0003} | {
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.9998_1.0003",
}
"""Rejects two of the four images of ``Rig`` and truncates a weight."""
TEXTS = [""]


@pytest.fixture(scope="module")
def rigs():
    torch.set_num_threads(1)
    PartialState()
    return {"steps": Rig(), "clean": CleanRig()}


CASES = {
    "bypass": ("steps", config(loss={"clip_ratio": 1e-3})),
    "decoupled": ("steps", config(correction={"bypass_mode": False})),
    "corrected": ("steps", config(correction=SEQUENCE)),
    "means": ("steps", config("grpo_guard", correction={"bypass_mode": False})),
    "bypass means": ("steps", config("flow_dppo")),
    "awm": ("clean", clean_config("awm")),
    "velocities": ("clean", clean_config("diffusion_nft")),
    "pairs": ("clean", clean_config("dpo")),
}


def learned(rig):
    return torch.cat([p.detach().flatten().clone() for p in adapter_parameters(rig.actor.transformer).values()])


def kept_in_a_buffer(folder, rig, minis):
    buffer = ReplayBuffer(folder, ReplayConfig(batches=1, select="newest"), seed=0)
    buffer.add(rig.batch, minis, [0] * IMAGES, TEXTS * IMAGES, step=0, staleness=0)
    return buffer


def learn_from(buffer, rig, minis, old_of):
    """An update from each mini-batch of the buffer, which ``minis`` were put into, with ``old_of(replayed)`` for its
    old policy."""
    results = []
    for entry in buffer.choose(1, 9):
        replayed = buffer.read(entry, TEXTS)
        replayed.batch[Key.PROMPT_INDEX] = rig.batch[Key.PROMPT_INDEX][minis[entry.number].rows]
        mini = replayed.mini._replace(old=old_of(replayed))
        results.append((replayed, rig.actor.update(replayed.batch, rig.cond, [mini], epochs=1)))
    return results


def gradient_of(rig, update):
    """Gradient of the last optimizer step of ``update()``."""
    taken = []

    def take(*_):
        taken.append(torch.cat([p.grad.flatten() for p in adapter_parameters(rig.actor.transformer).values()]))

    hook = rig.actor.optimizer.register_step_pre_hook(take)
    update()
    hook.remove()
    return taken[-1]


MINIS = [MiniBatch(torch.tensor([2, 0])), MiniBatch(torch.tensor([3, 1]))]
TRUNCATED = config(correction={"bypass_mode": False, "rollout_is": "sequence", "rollout_is_threshold": 1.0003})


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_batch_is_a_second_epoch(rigs, tmp_path, case):
    """Bit for bit: the same rows, old policy, weights and rejection."""
    kind, settings = CASES[case]
    rig = rigs[kind]
    needs_old = not settings.rollout_correction.bypass_mode and settings.diffusion_loss.objective.needs_old
    settings = dataclasses.replace(settings, ppo_epochs=2)

    def minis():
        # Later mini-batches need their old policy before the first optimizer step.
        if not needs_old:
            return MINIS
        batch = rig.batch[MINIS[1].rows]
        old = rig.actor.score(batch, rig.cond)
        if kind == "steps":
            old, _ = correct_old_policy(old, batch, settings.rollout_correction)
        return [MINIS[0], MINIS[1]._replace(old=old)]

    rig.reset(settings)
    twice = rig.actor.update(rig.batch, rig.cond, minis())
    expected = learned(rig)

    rig.reset(settings)
    once = rig.actor.update(rig.batch, rig.cond, minis(), epochs=1, keep_old=True)
    after_one = learned(rig)
    buffer = kept_in_a_buffer(tmp_path, rig, once.mini_batches)
    bypasses = settings.rollout_correction.bypass_mode
    old_of = (lambda r: OldPolicy.of_rollout(r.batch)) if bypasses else (lambda r: r.mini.old)
    done = learn_from(buffer, rig, once.mini_batches, old_of)
    assert not torch.equal(after_one, expected)
    assert torch.equal(learned(rig), expected)
    assert once.optimizer_steps + sum(update.optimizer_steps for _, update in done) == twice.optimizer_steps


def test_images_that_are_rejected_are_not_kept(rigs):
    """Of no mini-batch: the update itself corrects the first one. Their steps are counted."""
    rig = rigs["steps"]
    rig.reset(config(correction=SEQUENCE))
    batch = rig.batch[MINIS[1].rows]
    old, _ = correct_old_policy(rig.actor.score(batch, rig.cond), batch, rig.actor.config.rollout_correction)
    minis = rig.actor.update(rig.batch, rig.cond, [MINIS[0], MINIS[1]._replace(old=old)], keep_old=True).mini_batches
    window = rig.batch[Key.TIMESTEPS].shape[1]
    assert all(bool(mini.old.keep.all()) for mini in minis)
    assert [len(mini.rows) + mini.rejected // window for mini in minis] == [2, 2]
    assert sum(mini.rejected for mini in minis) == 2 * window


@pytest.fixture
def stale(rigs, tmp_path):
    """A rig after an update, the buffer with its batch, and the weights, current over rollout, by hand in float64."""
    rig = rigs["steps"]
    rig.reset(TRUNCATED)
    minis = [MiniBatch(torch.arange(IMAGES))]
    first = rig.actor.update(rig.batch, rig.cond, minis, keep_old=True)
    present = rig.actor.score(rig.batch, rig.cond).log_probs
    # Far more than float32 rounds.
    assert ((present - first.log_probs[0]).abs() > 1e-5).any()
    exact = (present.double() - rig.batch[Key.ROLLOUT_LOG_PROBS].double()).sum(1).exp()
    assert 0 < int((exact > 1.0003).sum()) < IMAGES
    return rig, kept_in_a_buffer(tmp_path, rig, first.mini_batches), minis, present, exact


def test_weights_of_a_stale_batch_are_the_oracles(stale):
    """With the current policy as the old one: of whole windows, truncated."""
    rig, buffer, minis, _, exact = stale
    ((replayed, update),) = learn_from(buffer, rig, minis, lambda replayed: None)
    applied = update.mini_batches[0].old.weights
    assert_close(applied.double(), exact.clamp(max=1.0003)[:, None].expand_as(applied), rtol=1e-6, atol=1e-6)
    measured = window_weights(update.log_probs[0], replayed.batch[Key.ROLLOUT_LOG_PROBS])
    assert_close(measured, exact, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_stale_batch_has_those_weights(stale):
    """Against an update that is given the old policy and its weights by hand."""
    rig, buffer, minis, present, exact = stale
    moved = [value.detach().clone() for value in adapter_parameters(rig.actor.transformer).values()]
    keep = torch.ones_like(present, dtype=torch.bool)

    def by_hand(weights):
        for parameter, value in zip(adapter_parameters(rig.actor.transformer).values(), moved, strict=True):
            parameter.data = value.clone()
        old = OldPolicy(log_probs=present, weights=weights, keep=keep)
        return gradient_of(rig, lambda: rig.actor.update(rig.batch, rig.cond, [minis[0]._replace(old=old)]))

    found = gradient_of(rig, lambda: learn_from(buffer, rig, minis, lambda replayed: None))
    expected = by_hand(exact.clamp(max=1.0003).float()[:, None].expand_as(present).contiguous())
    assert (found - expected).norm() <= GRADIENT * expected.norm()
    # Weights differ from 1 by some 1e-4.
    assert (by_hand(keep.float()) - expected).norm() > 10 * (found - expected).norm()
