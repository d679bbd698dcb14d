"""``kill -9`` at random moments, and in the middle of checkpoints, costs no more than time.

The tests start this file as a process.
"""

import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests_support import alive, descendants, overrides_of, same, untimed

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models import load_model
from flowgrpo_rc.models.lora import same_lora
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer import FlowGRPOTrainer, checkpoint
from flowgrpo_rc.trainer.writing import WRITER_FILE

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
    "algorithm.replay.batches=2",
)
"""More steps than twenty attempts can make before they are killed, each as short as can be."""
PLACES = ("adapter", "half an optimizer", "sync 1", "sync 2", "sync 4", "renamed", "latest written", "latest renamed")
"""Places within a checkpoint at which a run is killed: before each of its ordered steps, and between them."""


def hang(tell):
    os.write(tell, b"c")
    time.sleep(600)


def hang_in_checkpoint(place, tell):
    """Make the first checkpoint stop at ``place``."""
    calls = {"sync": 0}
    save, sync, replace = torch.save, checkpoint.sync_path, os.replace

    def half_saved(tensors, path, **settings):
        if not isinstance(path, str | Path):  # a tensor that is pickled, on its way to an engine
            save(tensors, path, **settings)
            return
        if place == "adapter":
            hang(tell)
        save(tensors, path, **settings)
        if place == "half an optimizer":
            os.truncate(path, os.path.getsize(path) // 2)
            hang(tell)

    def before_sync(path):
        calls["sync"] += 1
        if place == f"sync {calls['sync']}":
            hang(tell)
        sync(path)

    def around_replace(old, new):
        replace(old, new)
        if (place, os.path.basename(new)[:5]) in (("renamed", "step_"), ("latest renamed", "lates")):
            hang(tell)

    def before_pointer(path, content):
        if place == "latest written":
            path.with_name(path.name + ".writing").write_bytes(content)
            hang(tell)
        pointer(path, content)

    pointer = checkpoint.write_durably
    torch.save, checkpoint.sync_path = half_saved, before_sync
    checkpoint.write_durably, checkpoint.os.replace = before_pointer, around_replace


def run(overrides, place, tell):
    """One start of the command, in a fork."""
    if place is not None:
        hang_in_checkpoint(place, tell)
    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides))
    step = trainer.train_step

    def told():
        os.write(tell, b"s")
        return step()

    trainer.train_step = told
    trainer.fit()


def start(overrides, place):
    listen, tell = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(listen)
            run(overrides, place, tell)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(tell)
    return child, listen


def wait_for(listen, events, seconds):
    """Reads until one of ``events`` was told ``events[1]`` times, the run ended, or the time is over."""
    wanted, count = events
    until = time.monotonic() + seconds
    while count > 0 and (left := until - time.monotonic()) > 0:
        if not select.select([listen], [], [], left)[0]:
            return
        told = os.read(listen, 1)
        if not told:
            return
        count -= told == wanted


def still_there(pids):
    """Those that have not ended within half a minute of their run."""
    until = time.monotonic() + 30
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def main(kills, training, seed, *overrides):
    """Runs that are killed at random moments and started again, ``training`` of ``kills`` times while they train.

    Everything is imported once; each run is a fork of this process, so that a start costs a load of the tiny model
    alone. Prints one line a kill, which tells of processes that the killed run has left behind, and ends when a run has
    ended by itself.
    """
    torch.set_num_threads(1)
    load_model("asset:tiny_qwen_image")  # imports what a load needs, so that no fork has to
    chance = random.Random(int(seed))
    plans = [("checkpoint", place) for place in PLACES] + [("loading", None)] * 3
    plans = plans[: int(kills) - int(training)] + [("training", None)] * int(training)
    chance.shuffle(plans)
    for kind, place in plans:
        child, listen = start(overrides, place)
        if kind == "checkpoint":
            wait_for(listen, (b"c", 1), 120)
        elif kind == "loading":
            wait_for(listen, (b"s", 1), chance.uniform(0, 2))
        else:
            wait_for(listen, (b"s", chance.randint(1, 2)), 120)
            time.sleep(chance.uniform(0, 0.3))
        began = descendants(child)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(listen)
        left = still_there(began)
        became = f"ended {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else "killed"
        print("plan", kind, place, f"left {len(left)}", became, flush=True)
    child, listen = start(overrides, None)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def kill_again_and_again(kills, training, overrides, seed=1):
    """Start a run until it has been killed so often, each time whole with all that it has started, and then let it
    end."""
    command = [sys.executable, __file__, str(kills), str(training), str(seed), *overrides]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, timeout=900, capture_output=True, text=True, check=False, env=environment)
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


@pytest.mark.process
def test_kills_while_a_prompt_writer_learns_end_in_the_metrics_of_an_undisturbed_run(small_config, tmp_path):
    """Both adapters, and what was written for each batch."""
    writer = "algorithm.prompt_writer"
    written = (
        *[setting for setting in SMALLER if not setting.startswith(("trainer.total", "algorithm.replay"))],
        *("trainer.total_training_steps=6", "data.train_files=asset:tiny_requests/train.jsonl"),
        *("data.val_files=asset:tiny_requests/test.jsonl", "reward.custom_reward_function.path=null"),
        *("reward.functions.ocr=1", f"{writer}.path=asset:tiny_writer", f"{writer}.rewrites=2"),
        *(f"{writer}.max_new_tokens=40", f"{writer}.actor.optim.lr=3e-3"),
    )
    whole = FlowGRPOTrainer(small_config(*written, folder="whole")).fit()
    kill_again_and_again(3, 2, overrides_of(tmp_path / "killed", *written), seed=4)
    killed = RunFolder(tmp_path / "killed")
    assert untimed(killed.rows()) == untimed(whole.rows())
    assert same_lora(killed.lora, whole.lora)
    expected = load_file(whole.writer / WRITER_FILE)
    assert same(load_file(killed.writer / WRITER_FILE), expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
