"""The lines that a run prints before it starts, and where no console is logged to."""

import signal
from pathlib import Path

import pytest
from tests_support import before_step, run_process

from flowgrpo_rc.actor import NonFiniteUpdateError
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.run_folder import RunFolderError
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
        (DEMO, [], "window 2 in [0, 4) of 6 steps"),
        (DEMO, ["rollout.tail.steps=0.5"], "of 6 steps, 4.67 forwards an image (1 before its window, 2 in it, 1.67 "),
        (
            DEMO,
            ["rollout.pipeline.guidance_interval=[0.2,0.8]", "rollout.pipeline.true_cfg_scale=4"],
            "Guidance: true_cfg_scale=4 at noise levels from 0.2 to 0.8, one forward",
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
    assert said.count("Kernels of the actor: attention by native (") == (logger == "[console]")
    rewards = [number(row["val/reward/mean"]) for row in folder.rows() if "val/reward/mean" in row]
    where, *_, end = said.splitlines()
    assert where == f"Run folder: {folder.root}"
    if logger == "[]":
        assert end == f"Ended at step 2 of 2; held-out reward {rewards[0]} -> {rewards[-1]}; {folder.lora}"
        assert len(said.splitlines()) == 2
    else:
        assert "Ended at" not in said
    # The next one goes beside it; to the same step there is nothing to go on with.
    FlowGRPOTrainer(config).fit()
    where, *_ = capsys.readouterr().out.splitlines()
    assert where == f"Run folder: {folder.root}-2 ({folder.root} holds another run)"


@pytest.mark.run
def test_a_run_beside_another_prints_the_line_that_continues_that(small_config, tmp_path, monkeypatch, capsys):
    """A run of two steps in a folder whose name a shell and Hydra would both take apart, continued to three."""
    monkeypatch.chdir(tmp_path)
    settings = ("trainer.logger=[]", "trainer.save_freq=1")
    first = FlowGRPOTrainer(small_config(*settings, 'trainer.default_local_dir="a, $b (1)"')).fit()
    FlowGRPOTrainer(
        small_config(*settings, "trainer.total_training_steps=3", 'trainer.default_local_dir="a, $b (1)"')
    ).fit()
    where = next(line for line in capsys.readouterr().out.splitlines() if "holds another run" in line)
    command = where.partition("this continues it: ")[2].removesuffix(")")
    # The shell itself takes the line apart.
    words = run_process("bash", "-c", command.replace("flowgrpo-rc", "printf '%s\\n'", 1)).stdout.splitlines()
    assert main(words) == 0
    said = capsys.readouterr()
    assert "given more than once" not in said.err
    assert said.out.startswith(f"Run folder: {first.root}\nEnded at step 3 of 3")
    assert [row["step"] for row in first.rows()] == [0, 1, 2, 3]


@pytest.mark.run
@pytest.mark.parametrize("logger", ["[]", "[tensorboard]", "[console]"])
def test_an_interrupted_run_prints_once_how_to_go_on(small_config, capsys, recwarn, logger):
    trainer = FlowGRPOTrainer(small_config(f"trainer.logger={logger}"))
    before_step(trainer, 0, lambda: signal.raise_signal(signal.SIGINT))
    root = trainer.fit().root
    out = capsys.readouterr().out.splitlines()
    line = f"Stopped after step 1 of 2; continue with trainer.resume_mode=auto trainer.default_local_dir={root}"
    assert out.count(line) == 1
    assert not any("Ended at" in one for one in out)
    assert not any("Stopped" in str(warning.message) for warning in recwarn)
    if logger != "[console]":
        assert out == [f"Run folder: {root}", line]


def not_finite():
    raise NonFiniteUpdateError("step 2: the loss is not finite", [])


def full_disk():
    raise RunFolderError("the disk is full. Kept: the rows before it")


@pytest.mark.run
@pytest.mark.parametrize(
    ("logger", "fault", "printed"),
    [
        ("[]", not_finite, True),
        ("[]", lambda: 1 / 0, True),
        ("[]", full_disk, False),  # the error itself names what remains
        ("[console]", not_finite, False),
    ],
)
def test_a_run_that_fails_prints_what_remains_and_leaves_its_error_to_the_command(
    small_config, capsys, logger, fault, printed
):
    trainer = FlowGRPOTrainer(small_config(f"trainer.logger={logger}", "trainer.save_freq=1"))
    before_step(trainer, 1, fault)
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        trainer.fit()
    said = capsys.readouterr()
    remains = trainer.checkpoints.root / "step_1"
    line = f"The run failed after step 1 of 2; {remains} remains; continue with trainer.resume_mode=auto"
    assert said.err.splitlines() == [line] * printed
    if logger == "[]":
        assert said.out == f"Run folder: {trainer.folder.root}\n"
