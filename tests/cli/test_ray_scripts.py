"""The scripts with engines on Ray: the full-size one configures what it says, and the tiny one trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests_support import run_process

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.rollout.build import check_placement
from flowgrpo_rc.rollout.config import Share

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "flowgrpo_trainer"


def arguments_of(script, tmp_path, **environment):
    """What the script hands to its launcher."""
    said = tmp_path / "arguments"
    launcher = tmp_path / "torchrun"
    launcher.write_text(f"#!/bin/sh\nfor given; do printf '%s\\0' \"$given\"; done > '{said}'\n")
    launcher.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(EXAMPLES / script)], env=os.environ | path | environment, check=True)
    return said.read_text().removesuffix("\0").split("\0")


def test_the_full_size_script_puts_its_engines_on_the_cluster(tmp_path):
    choices = {"ENGINE": "diffusers", "NUM_GPUS": "4", "ENGINES": "2", "ADDRESS": "node0:6379", "MODEL": "folder"}
    given = arguments_of("run_qwen_image_ray.sh", tmp_path, **choices)
    assert given[:3] == ["--standalone", "--nproc_per_node", "4"]
    overrides = given[given.index("train") + 1 :]
    names = [override.split("=")[0] for override in overrides]
    assert len(set(names)) == len(names)
    rollout = compose("flowgrpo_trainer", overrides).actor_rollout_ref.rollout
    assert (rollout.placement, rollout.engines, rollout.ahead) == ("ray", 2, 1)
    assert (rollout.ray.address, rollout.ray.num_gpus) == ("node0:6379", 1.0)
    check_placement(rollout, Share(3, 4))


@pytest.mark.slow
def test_the_tiny_script_trains_with_two_engines_on_ray(tmp_path, ray_environment):
    small = ("trainer.total_training_steps=2", "data.val_max_samples=2", "trainer.logger=[console]")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = ray_environment | {"OUTPUTS": str(tmp_path), "PATH": path}
    done = run_process("bash", EXAMPLES / "run_tiny_qwen_image_ray.sh", *small, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = (tmp_path / "flowgrpo_rc" / "tiny_qwen_image_ray" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if "reward/mean" in row]
    assert [row["rollout/adapter_lag"] for row in steps] == [0.0, 1.0]
    assert all(row["actor/grad_norm"] > 0 for row in steps)
