"""The frozen base divided over two gloo processes learns what the whole one learns, also after resumes and crashes.

torchrun starts this file with the folder of the runs.
"""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from tests_support import (
    TORCHRUN,
    adapter_of,
    assert_close_rows,
    overrides_of,
    resident_bytes,
    rows_of,
    run_process,
    same,
    trainer_of,
)
from tolerances import adam
from torch.utils._python_dispatch import TorchDispatchMode

from flowgrpo_rc.models.config import FSDP_FIELD
from flowgrpo_rc.models.lora import base_parameters
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.process
MORTAL = """
import os, pathlib, signal

def compute_score(images, prompts, metadata):
    mark = pathlib.Path(__file__).with_name("killed")
    if os.environ.get("RANK") == "1" and not mark.exists() and list(pathlib.Path(RUN).glob("checkpoints/step_3")):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return images.reshape(len(images), -1).mean(1) / 255
"""
"""A reward that kills process 1 once, in the first step after the third."""
SHARD = "actor_rollout_ref.actor.fsdp_config.shard=true"
GATHER = "actor_rollout_ref.rollout.gather_weights=true"
UNEQUAL = ("actor_rollout_ref.rollout.probe.images=3", "data.val_max_samples=3", "trainer.resume_mode=disable")
"""Numbers that do not divide by two processes."""
FLOAT32 = ("actor_rollout_ref.rollout.dtype=float32",)
TO_THE_BASE = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=velocity")
BFLOAT16 = (
    "actor_rollout_ref.model.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0",
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_reference=average",
    "actor_rollout_ref.actor.ema_decay=0.9",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
)
CLEAN = (
    *FLOAT32,
    *TO_THE_BASE,
    "actor_rollout_ref.actor.diffusion_loss.loss_mode=awm",
    "algorithm.rollout_correction={bypass_mode: false, rollout_is: sequence}",
    "actor_rollout_ref.rollout.adapter_lag=1",
)
RESUMED = (
    "trainer.resume_mode=auto",
    *FLOAT32,
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
)


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
    for name, settings, sharded in (
        ("float32", (*FLOAT32, *TO_THE_BASE), (SHARD, GATHER)),
        ("bfloat16", BFLOAT16, (SHARD,)),
        ("clean", CLEAN, (SHARD,)),
    ):
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs that ``main`` makes."""
    folder = tmp_path_factory.mktemp("sharded")
    done = run_process(*TORCHRUN, __file__, folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "clean"])
def test_every_metric_equals_that_of_the_whole_model(runs, kind):
    """Probe and validation included, whose images do not divide by the processes; float32 gathers once a rollout."""
    whole, sharded = runs / f"{kind}_whole", runs / f"{kind}_sharded"
    assert len(rows_of(whole)) == 3
    assert rows_of(whole) == rows_of(sharded)
    assert same(adapter_of(whole), adapter_of(sharded))
    resident = [json.loads((runs / f"found_{rank}.json").read_text())["resident"] for rank in range(2)]
    assert sum(one[sharded.name] for one in resident) == resident[0][whole.name]
    assert resident[0][sharded.name] == pytest.approx(resident[0][whole.name] / 2, rel=0.02)


def test_weights_are_gathered_once_a_rollout_where_there_is_room(runs):
    """4 steps in one micro-batch, each a forward of 4 blocks and of the root with the rest."""
    for rank in range(2):
        assert json.loads((runs / f"found_{rank}.json").read_text())["gathers"] == [4 * 5, 5]


def test_another_number_of_processes_and_a_killed_one_change_nothing(runs, small_config, tmp_path):
    """A step sharded over 2 processes, one of a single process, two of 2 again, where process 1 is killed on the way
    and the launcher starts both anew: as 2 processes throughout."""
    resumed = runs / "resumed"
    trainer = FlowGRPOTrainer(small_config(*RESUMED, f"trainer.default_local_dir={resumed}"))
    assert trainer.step == 1
    trainer._log(trainer.train_step())
    trainer.save()
    trainer.folder.close()
    reward = tmp_path / "reward.py"
    reward.write_text(MORTAL.replace("RUN", repr(str(resumed))))
    settings = (*RESUMED, SHARD, f"reward.custom_reward_function.path={reward}")
    command = [*TORCHRUN, "--max-restarts", "1", "-m", "flowgrpo_rc.cli.main", "demo"]
    # A store of the launcher's would still hold the addresses of the processes that were there before.
    fresh_store = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = run_process(*command, *overrides_of(resumed, *settings), env=fresh_store, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    throughout, found = rows_of(runs / "throughout"), rows_of(resumed)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    # One process has other forwards than two, so that what is nothing but rounding is another number.
    assert_close_rows(found, throughout)
    ours, theirs = adapter_of(resumed), adapter_of(runs / "throughout")
    # ``lora_B`` begins at zero, so that it is the update.
    update = math.sqrt(sum(float(theirs[name].norm()) ** 2 for name in theirs if "lora_B" in name))
    apart = math.sqrt(sum(float((ours[name] - theirs[name]).norm()) ** 2 for name in theirs))
    assert update > 1e-3
    assert apart < adam() * update


ROUNDED = ("actor_rollout_ref.model.dtype=bfloat16", "actor_rollout_ref.model.quantization=nf4")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((SHARD,), r"rollout.dtype: got bfloat16; with .*shard=true .*set it to float32, as the actor has it"),
        ((SHARD, "actor_rollout_ref.rollout.quantization=fp8"), "rollout.quantization: got fp8; with"),
        (
            (SHARD, "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.model.attn_backend=_native_math"),
            "rollout_attn_backend: got None; with .*set it to _native_math, as the actor has it",
        ),
        (
            (SHARD, "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.merge_adapter=true"),
            "rollout.merge_adapter: got true; with .*shard=true .* set it to false",
        ),
        (
            (SHARD, "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.torch_compile=true"),
            "rollout.torch_compile: got true; with .*shard=true",
        ),
        (
            (*ROUNDED, "actor_rollout_ref.rollout.merge_adapter=true"),
            "rollout.merge_adapter: got true; with model.quantization=nf4",
        ),
        ((SHARD, "actor_rollout_ref.model.torch_compile=true"), "model.torch_compile: got true with a sharded"),
        (("actor_rollout_ref.rollout.gather_weights=true",), "gather_weights: got true, but no weights are given up"),
        ((f"{FSDP_FIELD}.fsdp_size=0",), "fsdp_config.fsdp_size: got 0"),
        ((SHARD, *ROUNDED), "model.quantization: got nf4 with a sharded transformer, whose slices are not rounded"),
        (
            (*ROUNDED, "actor_rollout_ref.rollout.dtype=float32"),
            "rollout.dtype: got float32; with model.quantization=nf4 .* set it to bfloat16, as the actor has it",
        ),
        (
            (*ROUNDED, "actor_rollout_ref.rollout.quantization=fp8", "actor_rollout_ref.rollout.placement=process"),
            "rollout.quantization: got fp8; with model.quantization=nf4 .* set it to null",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(small_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        small_config(*overrides)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
