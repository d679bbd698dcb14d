"""Every kind of blocks on two processes, whole and sharded, against one process.

torchrun starts this file with a folder, in which ``NAME/model`` is a family's model.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from tests_support import TORCHRUN, adapter_of, assert_close_rows, rows_of, run_process, same, trainer_of
from tiny_families import TINY, VARIANTS, run_overrides

from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.process
NAMES = [name for name in TINY if name not in VARIANTS]
SHARD = "actor_rollout_ref.actor.fsdp_config.shard=true"


def main(folder):
    for name in NAMES:
        own = folder / name
        for kind, more in (("whole", ()), ("sharded", (SHARD,))):
            trainer_of(own / kind, *run_overrides(name, str(own / "model"), own / "data"), *more).fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for each family, with its model and the runs on two processes."""
    folder = tmp_path_factory.mktemp("families")
    for name in NAMES:
        TINY[name].build().save_pretrained(folder / name / "model")
        run_overrides(name, str(folder / name / "model"), folder / name / "data")
    done = run_process(*TORCHRUN, __file__, folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_sharded_equals_whole_to_the_bit(runs, name):
    whole, sharded = runs / name / "whole", runs / name / "sharded"
    assert len(rows_of(whole)) >= 2
    assert rows_of(whole) == rows_of(sharded)
    assert same(adapter_of(whole), adapter_of(sharded))


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(runs, name, small_config):
    own = runs / name
    trainer = FlowGRPOTrainer(small_config(*run_overrides(name, str(own / "model"), own / "data")))
    dimensions = torch.Size(trainer.run.model.latent_shape(32, 32)).numel()
    assert_close_rows(rows_of(own / "whole"), rows_of(trainer.fit().root), dimensions)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
