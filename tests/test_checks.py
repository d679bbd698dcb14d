"""Values and the types that fields want: what is converted, what is refused, and what the message says."""

import math
import subprocess
import sys
from typing import Any

import pytest

from flowgrpo_rc.actor import DiffusionLossConfig, OptimizerConfig
from flowgrpo_rc.checks import LARGEST_INTEGER, fit, show
from flowgrpo_rc.models.config import CHECKPOINTING_FROM, ModelConfig
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutAlgoConfig
from flowgrpo_rc.trainer.config import TrainerConfig


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (float, 1, 1.0), (float, "1e-3", 1e-3), (float | None, None, None), (float | str, 1, 1.0),
        (float | str, "auto", "auto"), (int, "7", 7), (int, LARGEST_INTEGER, LARGEST_INTEGER), (bool, "yes", True),
        (bool, 0, False), (str, 5, "5"), (list[float], [0, 1], [0.0, 1.0]), (list[int] | None, (0, 5), [0, 5]),
        (list[str], ["a"], ["a"]), (dict[str, float], {"ocr": 1}, {"ocr": 1.0}), (Any, object, object),
    ],
)  # fmt: skip
def test_what_fits(kind, value, result):
    found = fit("a.b", kind, value)
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, "many", "a.b: got 'many'; it could not be converted to Integer; give a whole number"),
        (int, 2**63, "a.b: got 9223372036854775808; that is beyond 2**63 - 1, which is the largest integer that torch "
                     "and numpy take; give a whole number"),
        pytest.param(int, 10**6000, "a.b: got an integer of 19932 bits; that is beyond 2**63 - 1, which is the largest "
                                    "integer that torch and numpy take; give a whole number", id="6000 digits"),
        (int, 8.5, "a.b: got 8.5; give a whole number"),
        (int, True, "a.b: got True; give a whole number"),
        (int | None, [1], "a.b: got [1]; give a whole number or null"),
        (float, True, "a.b: got True; give a number"),
        (float, math.nan, "a.b: got nan; that is not finite; give a number"),
        (float | None, -math.inf, "a.b: got -inf; that is not finite; give a number or null"),
        (float, 10**400, "a.b: got an integer of 1329 bits; give a number"),
        (float | str, {"a": 1}, "a.b: got {a: 1}; give a number or text"),
        (bool, "maybe", "a.b: got 'maybe'; give true or false"),
        (bool, 2, "a.b: got 2; give true or false"),
        (str, None, "a.b: got null; give text"),
        (list[int] | None, [0, None], "a.b: got [0, null]; give a list of whole numbers, e.g. [0,5] or null"),
        (list[float], "x", "a.b: got 'x'; give a list of numbers, e.g. [0.9,0.999]"),
        (dict[str, float], {"x": "big"}, "a.b: got {x: 'big'}; give a mapping of names to numbers, e.g. {ocr: 1.0}"),
    ],
)  # fmt: skip
def test_what_does_not_fit(kind, value, says):
    with pytest.raises(ValueError, match=r"a\.b") as caught:
        fit("a.b", kind, value)
    assert str(caught.value) == says


def test_a_long_value_is_shortened():
    assert show("x" * 200).endswith("... (202 characters)")
    assert len(show(list(range(10**6)))) < 100


INTEGERS = """
from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig, OptimizerConfig
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutAlgoConfig

loss = DiffusionLossConfig(clip_ratio=1, adv_clip_max=5, kl_mask_threshold=1)
made = [loss.clip_ratio, loss.adv_clip_max, loss.kl_mask_threshold, RolloutAlgoConfig(noise_level=1).noise_level]
made += [PipelineConfig(true_cfg_scale=4).true_cfg_scale, DiffusionActorConfig(grad_clip=1).grad_clip]
made += OptimizerConfig(betas=[0, 0.9]).betas
assert [(type(value), value) for value in made] == [(float, float(v)) for v in (1, 5, 1, 1, 4, 1, 0, 0.9)], made
"""


def test_integers_are_fine_where_floats_are_wanted():
    """In a process of its own: the tests' type checks hold arguments to the letter of the annotation."""
    done = subprocess.run([sys.executable, "-c", INTEGERS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TrainerConfig(seed=2**70), "trainer.seed: got 1180591620717411303424; that is beyond"),
        (lambda: TrainerConfig(default_local_dir=" "), "trainer.default_local_dir: got ' '; give a path"),
        (lambda: TrainerConfig(default_local_dir="a\0b"), "default_local_dir: got 'a.x00b'; a path cannot hold"),
        (lambda: TrainerConfig(resume_from_path="a\0b"), "resume_from_path: got 'a.x00b'; a path cannot hold"),
        (lambda: ModelConfig(path="a\0b"), "model.path: got 'a.x00b'; a path cannot hold"),
        (lambda: ModelConfig(lora_rank=0), "lora_rank: got 0; a LoRA is what is trained, never all weights: .*rank=64"),
        (lambda: ModelConfig(lora_dtype="float16"), "model.lora_dtype: got 'float16'; choose one of float32, bfloat16"),
        (lambda: PipelineConfig(guidance_scale=math.nan), "pipeline.guidance_scale: got nan"),
        (lambda: OptimizerConfig(lr_warmup_steps_ratio=1.5), "lr_warmup_steps_ratio: got 1.5; give a share of the run"),
        (lambda: OptimizerConfig(lr_warmup_steps_ratio=0.1), "lr_warmup_steps_ratio: got 0.1, but lr_scheduler_type="),
        (lambda: RolloutAlgoConfig(sde_window_seed=-1), "sde_window_seed: got -1; give 0 or more or null"),
        (lambda: DiffusionLossConfig(auto_clip_max=math.inf), "auto_clip_max: got inf"),
    ],
)  # fmt: skip
def test_what_classes_refuse(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_large_transformers_recompute_their_activations():
    assert ModelConfig().checkpoints_gradients(CHECKPOINTING_FROM + 1)
    assert not ModelConfig().checkpoints_gradients(CHECKPOINTING_FROM)
    assert not ModelConfig(enable_gradient_checkpointing=False).checkpoints_gradients(CHECKPOINTING_FROM + 1)
    assert ModelConfig(enable_gradient_checkpointing=True).checkpoints_gradients(1)


WRONG_TYPES = """
import dataclasses
from pathlib import Path

import numpy

from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.data.config import DataConfig
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rewards.config import CustomRewardConfig, OCRConfig, RewardConfig
from flowgrpo_rc.rollout.config import RolloutConfig, ValConfig
from flowgrpo_rc.trainer.config import ActorRolloutRefConfig, FlowGRPOConfig, TrainerConfig

odd = ["many", b"x", object(), {"no": 1}, [1], (1, 2), 1.5, float("nan"), 2**70, True, "", "nan"]
classes = [DataConfig, OCRConfig, CustomRewardConfig, RewardConfig, RolloutConfig, ValConfig, DiffusionActorConfig,
           ActorRolloutRefConfig, FlowGRPOConfig, TrainerConfig, ModelConfig]
for cls in classes:
    for field in dataclasses.fields(cls):
        for value in odd:
            try:
                cls(**{field.name: value})
            except ValueError as error:
                assert field.name in str(error), (cls, field.name, value, error)
                assert "\\n" not in str(error), (cls, field.name, value, error)
for cls, field in [(DataConfig, "train_batch_size"), (DataConfig, "seed"), (OCRConfig, "num_threads")]:
    for value in ("many", 1.5, True, float("nan"), 2**70):
        try:
            cls(**{field: value})
        except ValueError:
            continue
        raise AssertionError((cls, field, value))

assert RolloutConfig(val_kwargs={"pipeline": {"height": 64}}).validation_pipeline.height == 64
assert FlowGRPOConfig(trainer={"seed": 3}).rollout_seed == 3
assert RewardConfig(ocr={"mode": "full"}).ocr.mode == "full"
assert ModelConfig(path=Path("a") / "b").path == "a/b"
assert DataConfig(train_files=[Path("a")]).train_files == [Path("a")]
assert RolloutConfig(n=numpy.int64(3)).n == 3
assert DiffusionLossConfig(clip_ratio=numpy.float32(0.5)).clip_ratio == 0.5
assert type(TrainerConfig(seed=numpy.uint8(3)).seed) is int
"""


def test_what_an_engineer_hands_to_the_classes_is_taken_or_refused_by_name():
    """Values of every kind in every field; numbers of numpy's, paths and mappings are taken."""
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
