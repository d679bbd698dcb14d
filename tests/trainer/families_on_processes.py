"""What ``test_families_on_processes.py`` starts on two processes: a run of every tiny family, whole and sharded.

Run by torchrun with a folder: ``families_on_processes.py FOLDER``. A family's model is in ``FOLDER/NAME/model``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests_support import overrides_of
from tiny_families import TINY, run_overrides

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer import FlowGRPOTrainer

SHARD = "actor_rollout_ref.actor.fsdp_config.shard=true"


def main(folder):
    for name in TINY:
        own = folder / name
        for kind, more in (("whole", ()), ("sharded", (SHARD,))):
            overrides = overrides_of(own / kind, *run_overrides(name, str(own / "model"), own / "data"), *more)
            trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides))
            trainer.accelerator.end_training = lambda: None  # the process group is the next run's too
            trainer.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
