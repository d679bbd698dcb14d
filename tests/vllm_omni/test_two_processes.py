"""Several trainer processes, each with an engine of its own: together they are the run of one."""

import json
import os
import sys

import pytest

pytest.importorskip("vllm")

from tests_support import overrides_of, run_process
from tolerances import LOG_PROB, of_metric

from flowgrpo_rc.run_folder import TIMING_PREFIXES
from flowgrpo_rc.trainer import FlowGRPOTrainer

SETTINGS = (
    "trainer.resume_mode=disable",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "actor_rollout_ref.rollout.dtype=float32",
)

pytestmark = pytest.mark.process


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(TIMING_PREFIXES)} for x in lines]


def test_two_processes_with_an_engine_each_are_the_run_of_one(small_config, tmp_path):
    """Two gloo processes start two engines, push the adapter to both, prove both, and learn what one process learns."""
    single = rows_of(FlowGRPOTrainer(small_config(*SETTINGS, folder="one")).fit().root)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "flowgrpo_rc.cli.main", "demo"),
        *overrides_of(tmp_path / "two", *SETTINGS, "actor_rollout_ref.rollout.name=vllm_omni"),
    ]
    done = run_process(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    got = rows_of(tmp_path / "two")
    assert [row["step"] for row in got] == [row["step"] for row in single]
    for row, other in zip(got, single, strict=True):
        assert row["rollout_sync/engine_gap_abs_max"] <= LOG_PROB
        for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac"):
            bound = of_metric(name, other, dimensions=512, pixels=3072, steps=2)
            assert row[name] == pytest.approx(other[name], rel=0, abs=bound), name
