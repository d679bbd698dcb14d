"""The lines that a run prints before it starts, and where no console is logged to."""

import signal
from pathlib import Path

import pytest
from tests_support import before_step

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.logging import announcement

CORRECTION = "algorithm.rollout_correction"
DEMO = "tiny_qwen_image_ocr"
GUIDED = "rollout.pipeline.true_cfg_scale=4"


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("flowgrpo_trainer", [], "decoupled mode (pi_old recomputed): no importance weights, no rejection: the gap"),
        (
            "flowgrpo_trainer",
            [f"{CORRECTION}.preset=decoupled_token_is"],
            "weights each element's ratio pi_old/pi_rollout, at most 2",
        ),
        ("flowgrpo_trainer", [f"{CORRECTION}.preset=geo_rs"], "is outside [0.999, 1.001] (seq_mean_k1); rows with one"),
        (
            "flowgrpo_trainer",
            [f"{CORRECTION}.bypass_mode=true"],
            "the PPO ratio pi_theta/pi_rollout is the importance weight itself",
        ),
        ("flowgrpo_trainer", [], "; guard: warn"),
        (DEMO, [], "bypass mode (pi_old = pi_rollout, ppo_clip)"),
        (DEMO, [], "rollout_is=sequence is measured, not applied"),
        (DEMO, [], "outside [0.5, 2] (seq_mean_k1)"),
        (DEMO, ["rollout.pipeline.true_cfg_scale=1"], "Guidance: none"),
        (DEMO, [GUIDED], "true_cfg_scale=4, one forward for both halves; the update's gradient goes through both"),
        (DEMO, [GUIDED, "model.batch_guidance=false"], "true_cfg_scale=4, a forward for each half; the update's gra"),
        (
            DEMO,
            [GUIDED, "actor.detach_unconditional=true"],
            "gradient leaves the unconditional half out (detach_unconditional)",
        ),
        # At most a mini-batch: the demo's has 48 images of 2 steps.
        (DEMO, ["actor.ppo_micro_batch_size_per_gpu=999"], "micro-batches of 48 images x 2 SDE steps"),
        (DEMO, ["actor.ppo_micro_batch_rows=3"], "micro-batches of 3 rows (SDE steps of images)"),
    ],
)
def test_the_first_lines_tell_what_the_configuration_amounts_to(name, overrides, line):
    full = [one if one.startswith("algorithm") else f"actor_rollout_ref.{one}" for one in overrides]
    config = compose(name, full)
    lines = announcement(config, config.rollout_correction, Path("outputs"), 1)
    assert sum(line in text for text in lines) == 1
    assert not any("\n" in text for text in lines)


@pytest.mark.run
@pytest.mark.parametrize("logger", ["[]", "[console]"])
def test_a_run_says_where_it_is_and_what_ended_it(logger, small_config, capsys):
    config = small_config(f"trainer.logger={logger}", "trainer.test_freq=2")
    folder = FlowGRPOTrainer(config).fit()
    said = capsys.readouterr().out
    assert said.count("Run folder: ") == 1
    rewards = [number(row["val/reward/mean"]) for row in folder.rows() if "val/reward/mean" in row]
    where, *_, end = said.splitlines()
    assert where == f"Run folder: {folder.root}"
    if logger == "[]":
        assert end == f"Ended at step 2 of 2; held-out reward {rewards[0]} -> {rewards[-1]}; {folder.lora}"
        assert len(said.splitlines()) == 2
    else:
        assert "Ended at" not in said
    # The next one goes beside it, and says how to go on with the first.
    FlowGRPOTrainer(config).fit()
    where, *_ = capsys.readouterr().out.splitlines()
    assert where.startswith(
        f"Run folder: {folder.root}-2 ({folder.root} holds another run; to continue that one, repeat"
    )
    assert "trainer.resume_mode=auto" in where


@pytest.mark.run
def test_an_interrupted_run_without_a_console_says_how_to_go_on(small_config, capsys):
    trainer = FlowGRPOTrainer(small_config("trainer.logger=[]", "trainer.total_training_steps=4"))
    before_step(trainer, 2, lambda: signal.raise_signal(signal.SIGINT))
    says = rf"Stopped after step 3 of 4; continue with trainer.resume_mode=auto .*={trainer.folder.root}"
    with pytest.warns(UserWarning, match=says):
        trainer.fit()
    where, end = capsys.readouterr().out.splitlines()
    assert where == f"Run folder: {trainer.folder.root}"
    (row,) = [row for row in trainer.folder.rows() if "val/reward/mean" in row]
    assert end == f"Ended at step 3 of 4; held-out reward {number(row['val/reward/mean'])}; {trainer.folder.lora}"
