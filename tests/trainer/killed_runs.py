"""A child of ``test_kills``: runs that are killed at random moments and started again, until so many were.

Everything is imported once; each run is a fork of this process, so that a start costs a load of the tiny model alone.
Usage: ``killed_runs.py KILLS TRAINING SEED OVERRIDES...``, where TRAINING of the kills come while a run trains; prints
one line a kill, which tells of processes that the killed run has left behind, and ends when a run has ended by itself.
"""

import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests_support import alive, descendants

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models import load_model
from flowgrpo_rc.trainer import FlowGRPOTrainer, checkpoint

PLACES = ("adapter", "half an optimizer", "sync 1", "sync 2", "sync 4", "renamed", "latest written", "latest renamed")
"""Where in a checkpoint a run is killed: before each of the things that must happen in their order, and between."""


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


def main():
    kills, training, seed = map(int, sys.argv[1:4])
    overrides = sys.argv[4:]
    torch.set_num_threads(1)
    load_model("asset:tiny_qwen_image")  # imports what a load needs, so that no fork has to
    chance = random.Random(seed)
    plans = [("checkpoint", place) for place in PLACES] + [("loading", None)] * 3
    plans = plans[: kills - training] + [("training", None)] * training
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


if __name__ == "__main__":
    main()
