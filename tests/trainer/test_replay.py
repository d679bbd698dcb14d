"""Runs that learn from the buffer: resumed ones equal undisturbed ones, and what is damaged is left out and said."""

import shutil

import pytest
import torch
from tests_support import adapter_of, before_step, power_cut, rows_of, same

from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.run
REPLAY = ("algorithm.replay.batches=2", "trainer.total_training_steps=4")
KINDS = {
    "decoupled": (
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.replay.old_policy=current",
        "algorithm.replay.select=spread",
        "algorithm.replay.steps=1",
    ),
    "clean": (
        "algorithm.rollout_correction=null",
        "actor_rollout_ref.actor.diffusion_loss.loss_mode=diffusion_nft",
        "algorithm.old_policy_decay=0.5",
    ),
}


def closed(*trainers):
    for trainer in trainers:
        trainer.run.engine.close()
        trainer.folder.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_undisturbed_one(small_config, kind):
    """The checkpoint has the buffer; the run's own folder of it is gone with the power."""
    settings = (*REPLAY, *KINDS[kind])
    whole = FlowGRPOTrainer(small_config(*settings, folder="whole")).fit().root
    rows = rows_of(whole)[1:]
    # Two mini-batches a batch: each time as many from the buffer, which begins empty and has two batches.
    assert [row["replay/optimizer_steps"] for row in rows] == [0, 2, 2, 2]
    assert [row["replay/buffer"] for row in rows] == [0, 2, 4, 4]
    assert all(1 <= row["replay/age"] <= 2 for row in rows[1:])
    assert all(0 < row["replay/eff_sample_size"] <= 1 for row in rows[1:])
    assert not (whole / ".replay").exists()
    auto = (*settings, "trainer.resume_mode=auto", "trainer.save_freq=2")
    first = FlowGRPOTrainer(small_config(*auto, folder="parts"))
    before_step(first, 3, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    # As a power cut leaves it: files of later steps are in the way, and may be half of what they were.
    folder = first.folder.root / ".replay"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "step_1.0.0.pt").write_bytes(b"half")
    second = FlowGRPOTrainer(small_config(*auto, folder="parts"))
    assert second.step == 2
    resumed = second.fit().root
    assert rows_of(resumed) == rows_of(whole)
    assert same(adapter_of(resumed), adapter_of(whole))


REJECTING = (
    "algorithm.rollout_correction.bypass_mode=false",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9998_1.0002'",
)


@pytest.mark.parametrize("settings", [(), REJECTING, KINDS["clean"]], ids=["bypass", "decoupled", "clean"])
def test_learning_from_a_batch_again_at_once_is_a_second_epoch(small_config, settings):
    """Bit for bit, by the trainer's own way through the buffer."""
    alike = (*settings, "trainer.val_before_train=false", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
    twice = FlowGRPOTrainer(small_config(*alike, "actor_rollout_ref.actor.ppo_epochs=2", folder="twice"))
    twice.train_step()
    again = FlowGRPOTrainer(small_config(*alike, *REPLAY, "algorithm.replay.select=newest", folder="again"))
    again.train_step()
    after_one = adapter_state(again.run.actor.transformer)
    found = again.replay.learn(1, again.mode)
    assert found["replay/optimizer_steps"] == 2
    learned = adapter_state(again.run.actor.transformer)
    assert same(learned, adapter_state(twice.run.actor.transformer))
    assert not same(learned, after_one)
    closed(twice, again)


WEIGHTS = (
    "algorithm.rollout_correction.bypass_mode=false",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_is_threshold=1.0001",
)


def learned_from(trainer):
    """Every update of ``trainer`` from now on, as ``(batch, mini_batches, result)``."""
    taken = []
    update = trainer.run.actor.update

    def keeping(batch, cond, minis, *args, **kwargs):
        result = update(batch, cond, minis, *args, **kwargs)
        taken.append((batch, minis, result))
        return result

    trainer.run.actor.update = keeping
    return taken


@pytest.mark.parametrize("old_policy", ["kept", "current"])
def test_weights_of_a_stale_batch_are_of_the_old_policy(small_config, old_policy):
    """With ``current`` those of the actor as it is now, by the trainer's own way through the buffer."""
    settings = (*REPLAY, *WEIGHTS, f"algorithm.replay.old_policy={old_policy}", "algorithm.replay.batches=1")
    trainer = FlowGRPOTrainer(small_config(*settings, "actor_rollout_ref.actor.optim.lr=1e-3"))
    trainer.train_step()
    taken = learned_from(trainer)
    metrics = trainer.replay.learn(1, trainer.mode)
    assert len(taken) == 2
    means, sizes = [], []
    for batch, (mini,), result in taken:
        rollout = batch["rollout_log_probs"].double()
        exact = (result.log_probs[0].double() - rollout).sum(1).exp()
        # Far more than float32 rounds.
        assert (exact - 1).abs().max() > 1e-4
        means.append(float(exact.mean()))
        sizes.append(float(exact.mean() ** 2 / exact.square().mean()))
        of = mini.old.log_probs.double() if old_policy == "kept" else result.log_probs[0].double()
        applied = result.mini_batches[0].old.weights.double()
        expected = (of - rollout).sum(1).exp().clamp(max=1.0001)[:, None].expand_as(applied)
        torch.testing.assert_close(applied, expected, rtol=0, atol=1e-6)
    assert metrics["replay/weight_mean"] == pytest.approx(sum(means) / 2, abs=1e-7)
    assert metrics["replay/age_1/eff_sample_size"] == pytest.approx(sum(sizes) / 2, abs=1e-7)
    closed(trainer)


def test_a_lag_counts_in_the_staleness(small_config):
    """Images are one batch stale when they are new: with a limit of two, those of the last batch alone are left."""
    settings = (*REPLAY, "actor_rollout_ref.rollout.adapter_lag=1", "algorithm.replay.max_staleness=2")
    rows = rows_of(FlowGRPOTrainer(small_config(*settings, "algorithm.replay.share=0.75")).fit().root)[1:]
    # The first batch has no older adapter, so that the third takes it too.
    assert [row["replay/optimizer_steps"] for row in rows] == [0, 2, 4, 2]
    assert [row.get("replay/age") for row in rows] == [None, 1, 1.5, 1]


def test_a_fallback_leaves_out_what_has_no_old_policy(small_config):
    settings = (*REPLAY, "algorithm.rollout_correction.rollout_is=sequence")
    trainer = FlowGRPOTrainer(small_config(*settings, "algorithm.rollout_correction.rollout_rs=null"))
    assert trainer.mode.bypasses
    trainer.train_step()
    said = []
    trainer.replay.buffer.say = said.append
    assert trainer.replay.learn(1, trainer.mode)["replay/optimizer_steps"] == 2
    assert trainer.replay.learn(1, trainer.mode.decoupled())["replay/optimizer_steps"] == 0
    assert len(said) == 1
    assert "2 mini-batch(es) of bypass mode are left out" in said[0]
    closed(trainer)


def test_nothing_that_limits_stale_images_is_warned_of(small_config):
    settings = (
        *REPLAY,
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_is=null",
        "algorithm.rollout_correction.rollout_rs=null",
        "algorithm.replay.old_policy=current",
    )
    with pytest.warns(UserWarning, match="nothing limits what is learned from stale images"):
        closed(FlowGRPOTrainer(small_config(*settings)))


CLEAN_LAG = (*REPLAY, "algorithm.rollout_correction=null", "actor_rollout_ref.rollout.adapter_lag=1")


@pytest.mark.parametrize(
    ("loss_mode", "corrects", "has_weights"),
    [
        ("awm", False, [False, True, False, False]),
        ("awm", True, [False, True, True, True]),
        ("dpo", True, [False] + 3 * [True]),
    ],
)
def test_weights_of_clean_images_are_of_the_policy_that_drew(small_config, loss_mode, corrects, has_weights):
    """Only the first batch was drawn by the adapter that learned from it; others are scored if corrected."""
    settings = (
        *CLEAN_LAG,
        f"actor_rollout_ref.actor.diffusion_loss.loss_mode={loss_mode}",
        "algorithm.replay.batches=1",
    )
    if corrects:
        settings += ("algorithm.rollout_correction.rollout_is=sequence",)
    rows = rows_of(FlowGRPOTrainer(small_config(*settings)).fit().root)[1:]
    assert [row["replay/optimizer_steps"] for row in rows] == [0, 2, 2, 2]
    assert ["replay/weight_mean" in row for row in rows] == has_weights


def test_a_damaged_file_costs_its_mini_batch_and_a_line(small_config, capsys):
    auto = (*REPLAY, "algorithm.replay.select=newest", "trainer.resume_mode=auto", "trainer.save_freq=2")
    trainer = FlowGRPOTrainer(small_config(*auto))
    before_step(trainer, 2, power_cut)
    with pytest.raises(ConnectionError):
        trainer.fit()
    held = trainer.folder.checkpoints / "step_2" / "replay"
    # Of bypass mode; decoupled mode, after a fallback, has to correct the rollout's log-probs.
    assert torch.load(held / "step_1.0.0.pt", weights_only=True)["old"] == {}
    for file in held.iterdir():
        # A new file: the buffer's own is the same on the disk.
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[:-1])
    capsys.readouterr()
    rows = rows_of(FlowGRPOTrainer(small_config(*auto)).fit().root)
    assert [row["replay/optimizer_steps"] for row in rows[1:]] == [0, 2, 0, 2]
    out, err = capsys.readouterr()
    said = " ".join((out + err).split())
    assert said.count("is left out") == 2
    assert "replay: the mini-batch 0 of step" in said


def test_a_buffer_of_no_batches_is_the_run_without_one(small_config, finished_run):
    settings = ("algorithm.replay.batches=0", "algorithm.replay.share=0.9")
    saves = ("trainer.save_freq=1", "trainer.test_freq=1")
    folder = FlowGRPOTrainer(small_config(*settings, *saves)).fit()
    assert rows_of(folder.root) == rows_of(finished_run.root)
    assert not [key for key in rows_of(folder.root)[-1] if key.startswith("replay")]
    assert not (folder.checkpoints / "step_2" / "replay").exists()
