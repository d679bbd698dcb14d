"""Every model family on two processes, whole and sharded, against one process.

torchrun starts this file with a folder, in which ``NAME/model`` is a family's model.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests_support import overrides_of, rows_of, run_process
from tiny_families import TINY, run_overrides
from tolerances import of_metric

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.process
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ADAPTER = Path("lora", "pytorch_lora_weights.safetensors")
SHARD = "actor_rollout_ref.actor.fsdp_config.shard=true"


def main(folder):
    for name in TINY:
        own = folder / name
        for kind, more in (("whole", ()), ("sharded", (SHARD,))):
            overrides = overrides_of(own / kind, *run_overrides(name, str(own / "model"), own / "data"), *more)
            trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides))
            trainer.accelerator.end_training = lambda: None  # the process group is the next run's too
            trainer.fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for each family, with its model and the runs on two processes."""
    folder = tmp_path_factory.mktemp("families")
    for name, family in TINY.items():
        family.build().save_pretrained(folder / name / "model")
        run_overrides(name, str(folder / name / "model"), folder / name / "data")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_process(*TORCHRUN, __file__, folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", list(TINY))
def test_sharded_equals_whole_to_the_bit(runs, name):
    whole, sharded = runs / name / "whole", runs / name / "sharded"
    assert len(rows_of(whole)) >= 2
    assert rows_of(whole) == rows_of(sharded)
    for one, other in zip(load_file(whole / ADAPTER).values(), load_file(sharded / ADAPTER).values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", list(TINY))
def test_two_processes_equal_one(runs, name, small_config):
    own = runs / name
    trainer = FlowGRPOTrainer(small_config(*run_overrides(name, str(own / "model"), own / "data")))
    dimensions = torch.Size(trainer.run.model.latent_shape(32, 32)).numel()
    alone = rows_of(trainer.fit().root)
    together = rows_of(own / "whole")
    assert len(alone) == len(together)
    for a, b in zip(alone, together, strict=True):
        assert a.keys() == b.keys()
        for metric in a:
            bound = of_metric(metric, a, dimensions=dimensions, pixels=3072, steps=2)
            assert b[metric] == pytest.approx(a[metric], abs=bound), metric


if __name__ == "__main__":
    main(Path(sys.argv[1]))
