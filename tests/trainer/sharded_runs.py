"""What ``test_sharding.py`` starts on two processes: runs with the transformer sharded and whole, side by side.

Run by torchrun with a folder: ``sharded_runs.py FOLDER``. Each run has its own folder in it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests_support import overrides_of, resident_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models.lora import base_parameters
from flowgrpo_rc.trainer import FlowGRPOTrainer

SHARD = "actor_rollout_ref.actor.fsdp_config.shard=true"
GATHER = "actor_rollout_ref.rollout.gather_weights=true"
UNEQUAL = ("actor_rollout_ref.rollout.probe.images=3", "data.val_max_samples=3", "trainer.resume_mode=disable")
"""Numbers that do not divide by two processes."""
FLOAT32 = ("actor_rollout_ref.rollout.dtype=float32",)
BFLOAT16 = (
    "actor_rollout_ref.model.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0",
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ema_decay=0.9",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
)
RESUMED = (
    "trainer.resume_mode=auto",
    *FLOAT32,
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
)


def trainer_of(folder, *overrides):
    """A trainer that leaves the process group to the next one."""
    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides_of(folder, *overrides)))
    trainer.accelerator.end_training = lambda: None
    return trainer


class Gathers(TorchDispatchMode):
    """Counts the collectives that gather, whatever function called them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def gathers(folder, *overrides):
    """Collectives that gather weights while one step's images are drawn, in forwards of one micro-batch."""
    trainer = trainer_of(folder, *UNEQUAL, *FLOAT32, *overrides)
    with Gathers() as seen:
        trainer._rollout(trainer.rollouts.next(trainer.step))
    trainer.folder.close()
    return seen.count


def main(folder):
    found = {"resident": {}}
    for name, settings, sharded in (("float32", FLOAT32, (SHARD, GATHER)), ("bfloat16", BFLOAT16, (SHARD,))):
        for kind, more in (("whole", ()), ("sharded", sharded)):
            trainer = trainer_of(folder / f"{name}_{kind}", *UNEQUAL, *settings, *more)
            base = base_parameters(trainer.run.model.transformer).values()
            found["resident"][f"{name}_{kind}"] = resident_bytes(base)
            trainer.fit()
    found["gathers"] = [gathers(folder / "counted", SHARD), gathers(folder / "counted", SHARD, GATHER)]
    trainer_of(folder / "throughout", *RESUMED, SHARD).fit()
    first = trainer_of(folder / "resumed", *RESUMED, SHARD)
    first._log(first.train_step())
    first.save()
    first.folder.close()
    (folder / f"found_{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
