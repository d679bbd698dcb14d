"""``kill -9`` at random moments, and in the middle of checkpoints, costs no more than time."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests_support import overrides_of, untimed

from flowgrpo_rc.models.lora import same_lora
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer import FlowGRPOTrainer

KILLS = 20
TRAINING = 9
"""So many of them while a run trains, the others in a checkpoint or while it loads."""
SMALLER = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=30",
    "trainer.resume_mode=auto",
    "trainer.save_freq=1",
    "trainer.test_freq=10",
    "trainer.max_actor_ckpt_to_keep=3",
)
"""More steps than twenty attempts can make before they are killed, each as short as can be."""


def kill_again_and_again(kills, training, overrides, seed=1):
    """Start a run until it has been killed so often, each time whole with all that it has started, and then let it
    end."""
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, str(script), str(kills), str(training), str(seed), *overrides]
    done = subprocess.run(command, timeout=900, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("plan ")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [line.split()[-3:] for line in told] == [["left", "0", "killed"]] * kills, told


@pytest.mark.process
def test_twenty_kills_end_in_the_metrics_of_an_undisturbed_run(small_config, tmp_path):
    """About a minute on two quiet cores: twenty starts with a load each. Rows, adapter and grids are the same, the
    rows that a resume made again lie aside, and no half-written file is left."""
    whole = FlowGRPOTrainer(small_config(*SMALLER, folder="whole")).fit()
    kill_again_and_again(KILLS, TRAINING, overrides_of(tmp_path / "killed", *SMALLER))
    killed = RunFolder(tmp_path / "killed")
    assert untimed(killed.rows()) == untimed(whole.rows())
    assert same_lora(killed.lora, whole.lora)
    for step, grid in whole.grids().items():
        assert killed.grids()[step].read_bytes() == grid.read_bytes()
    assert (killed.checkpoints / "latest").read_text() == "step_30"
    assert [
        path.name for path in killed.root.rglob("*") if path.name.endswith((".writing", ".removing", ".lock"))
    ] == []
    aside = [row["step"] for path in killed.root.glob("metrics.*.jsonl") for row in RunFolder(path.parent).rows()]
    assert aside, "no kill came between a row and its checkpoint"


@pytest.mark.process
def test_kills_while_a_process_draws_ahead_end_in_the_metrics_of_an_undisturbed_run(small_config, tmp_path):
    """Five starts with an engine's process each, two batches in flight: what was lost is drawn again with the adapters
    of its time, and no engine outlives its trainer."""
    rollout = "actor_rollout_ref.rollout"
    few = ("trainer.total_training_steps=8", "trainer.test_freq=4")
    whole = FlowGRPOTrainer(small_config(*SMALLER, *few, f"{rollout}.adapter_lag=2", folder="whole")).fit()
    ahead = (f"{rollout}.ahead=2", f"{rollout}.placement=process")
    kill_again_and_again(4, 3, overrides_of(tmp_path / "killed", *SMALLER, *few, *ahead), seed=3)
    killed = RunFolder(tmp_path / "killed")
    assert untimed(killed.rows()) == untimed(whole.rows())
    assert same_lora(killed.lora, whole.lora)
