"""Several trainer processes, each with an engine of its own: together they are the run of one."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from rounding import ADAM, GRADIENT, LOG_RATIO, reward
from tests_support import overrides_of

from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.run_folder import TIMING_PREFIXES

SETTINGS = (
    "trainer.resume_mode=disable",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "actor_rollout_ref.rollout.dtype=float32",
)

PIXELS = 3 * 32 * 32


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(TIMING_PREFIXES)} for x in lines]


@pytest.mark.slow
def test_two_processes_with_an_engine_each_are_the_run_of_one(small_config, tmp_path):
    """Two gloo processes start two engines, push the adapter to both, prove both, and learn what one process learns."""
    expected = rows_of(FlowGRPOTrainer(small_config(*SETTINGS, folder="one")).fit().root)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "flowgrpo_rc.cli.main", "demo"),
        *overrides_of(tmp_path / "two", *SETTINGS, "actor_rollout_ref.rollout.name=vllm_omni"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, timeout=500, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    got = rows_of(tmp_path / "two")
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    for row, other in zip(got, expected, strict=True):
        assert row["rollout_sync/engine_gap_abs_max"] < LOG_RATIO
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=reward(PIXELS), rel=0)
        learned = GRADIENT + reward(PIXELS) / other["reward/group_std_mean"]  # an advantage is a reward over that
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac"):
            assert row[name] == pytest.approx(other[name], rel=ADAM + learned, abs=LOG_RATIO), name
