"""Configuration classes: types, ranges, rules between fields, and one error for everything."""

import dataclasses
import math
import subprocess
import sys
from typing import Annotated, Any

import numpy
import pytest

from flowgrpo_rc.actor import DiffusionLossConfig, OptimizerConfig
from flowgrpo_rc.checks import show
from flowgrpo_rc.models.config import CHECKPOINTING_FROM, ModelConfig
from flowgrpo_rc.rollout.config import RolloutAlgoConfig, RolloutConfig
from flowgrpo_rc.section import (
    INVALID,
    Check,
    PositiveFloat,
    PositiveInt,
    Problems,
    Section,
    convert,
    one_of,
)
from flowgrpo_rc.trainer.config import FlowGRPOConfig, TrainerConfig

Names = list[Annotated[str, one_of(("a", "b"))]]
NumberOrAuto = PositiveFloat | Annotated[str, Check(lambda word: word == "auto", "give a number or auto")]


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (float, 1, 1.0), (float, "1e-3", 1e-3), (float | None, None, None), (NumberOrAuto, 1, 1.0),
        (NumberOrAuto, "auto", "auto"), (int, "7", 7), (bool, "yes", True),
        (bool, 0, False), (str, 5, "5"), (list[float], [0, 1], [0.0, 1.0]), (list[int] | None, (0, 5), [0, 5]),
        (Names, ["a"], ["a"]), (Any, object, object), (int, numpy.int64(3), 3), (float, numpy.float32(0.5), 0.5),
    ],
)  # fmt: skip
def test_values_become_their_fields_type(kind, value, result):
    found = convert(kind, value)
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, "many", "got 'many'; it could not be converted to Integer; give a whole number"),
        (int, 8.5, "got 8.5; give a whole number"),
        (int, True, "got True; give a whole number"),
        (int | None, [1], "got [1]; give a whole number or null"),
        (PositiveInt | None, 0, "got 0; give a number above 0 or null"),
        (float, math.nan, "got nan; that is not finite; give a number"),
        (float | None, -math.inf, "got -inf; that is not finite; give a number or null"),
        (NumberOrAuto, {"a": 1}, "got {a: 1}; give a number"),
        (NumberOrAuto, "wide", "got 'wide'; give a number or auto"),
        (bool, 2, "got 2; give true or false"),
        (str, None, "got null; give text"),
        (list[int] | None, [0, None], "got [0, null]; give a list of whole numbers, e.g. [0,5] or null"),
        (list[float], "x", "got 'x'; give a list of numbers, e.g. [0.9,0.999]"),
        (Names, ["a", "c"], "got 'c'; choose one of a, b"),
        (Names, ["a", None], "got ['a', null]; give a list of names, e.g. [a,b]"),
    ],
)  # fmt: skip
def test_other_values_are_refused_with_a_remedy(kind, value, says):
    with pytest.raises(ValueError, match="^got") as caught:
        convert(kind, value)
    assert str(caught.value) == says


def test_a_long_value_is_shortened():
    assert show("x" * 200).endswith("... (202 characters)")
    assert len(show(list(range(10**6)))) < 100


@dataclasses.dataclass(kw_only=True, slots=True)
class Inner(Section):
    section = "outer.inner"
    low: PositiveInt = 1
    high: int = 2

    def problems(self):
        if self.high <= self.low:
            yield f"high: got {self.high}; give more than low={self.low}"


@dataclasses.dataclass(kw_only=True, slots=True)
class Outer(Section):
    section = "outer"
    name: str = "x"
    inner: Inner = dataclasses.field(default_factory=Inner)

    def problems(self):
        if len(self.name) > self.inner.high:
            yield f"name: got {self.name!r}; give at most {self.inner.high} letters"


def test_everything_that_is_wrong_comes_in_one_error():
    with pytest.raises(Problems) as caught:
        convert(Outer, {"name": None, "inner": {"low": 0, "high": "x"}})
    assert caught.value.found == [
        "name: got null; give text",
        "inner.low: got 0; give a number above 0",
        "inner.high: got 'x'; it could not be converted to Integer; give a whole number",
    ]
    with pytest.raises(ValueError, match="^outer.inner.high: got 1; give more than low=3$"):
        Inner(low=3, high=1)


@pytest.mark.parametrize("inner", [{"high": "x"}, {"high": 0}, {"high": INVALID}])
def test_rules_between_fields_wait_until_the_fields_are_right(inner):
    with pytest.raises(Problems) as caught:
        convert(Outer, {"name": "much too long", "inner": inner})
    assert not any(message.startswith("name") for message in caught.value.found)


def test_a_mapping_of_other_keys_and_another_object_are_refused():
    for value, says in (({"hihg": 1}, "has no key hihg; nearest: high; its keys are low, high"), (5, "got 5; give a")):
        with pytest.raises(Problems, match=f"inner: {says}"):
            convert(Outer, {"inner": value})


def test_check_repeats_the_checks_after_a_change():
    outer = Outer()
    outer.inner.low = -1
    with pytest.raises(Problems, match=r"^here\.inner\.low: got -1"):
        outer.check("here")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TrainerConfig(default_local_dir=" "), "trainer.default_local_dir: got ' '; give a path"),
        (lambda: ModelConfig(lora_rank=0), "lora_rank: got 0; a LoRA is what is trained, never all weights: .*rank=64"),
        (lambda: ModelConfig(lora_dtype="float16"), "model.lora_dtype: got 'float16'; choose one of float32, bfloat16"),
        (lambda: ModelConfig(quantization="nf4"), "quantization: got nf4 with dtype=float32; .* set dtype=bfloat16"),
        (
            lambda: ModelConfig(quantization="int8", dtype="bfloat16", torch_compile=True),
            "model.torch_compile: got true with quantization=int8, whose layers are not compiled",
        ),
        (lambda: OptimizerConfig(name="adam8"), "optim.name: got 'adam8'; choose one of adamw, adamw_8bit"),
        (lambda: OptimizerConfig(lr_warmup_steps_ratio=1.5), "lr_warmup_steps_ratio: got 1.5; give a share of the run"),
        (lambda: OptimizerConfig(lr_warmup_steps_ratio=0.1), "lr_warmup_steps_ratio: got 0.1, but lr_scheduler_type="),
        (lambda: RolloutAlgoConfig(sde_window_seed=-1), "sde_window_seed: got -1; give 0 or more or null"),
        (lambda: DiffusionLossConfig(auto_clip_max=math.inf), "auto_clip_max: got inf"),
        (lambda: DiffusionLossConfig(auto_clip_max=1e-5), "auto_clip_max: got 1e-05; give at least auto_clip_min"),
    ],
)  # fmt: skip
def test_classes_refuse_by_field_value_and_remedy(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_mappings_become_sections():
    assert convert(RolloutConfig, {"val_kwargs": {"pipeline": {"height": 64}}}).validation_pipeline.height == 64
    assert convert(FlowGRPOConfig, {"trainer": {"seed": "3"}}).rollout_seed == 3


def test_large_transformers_recompute_their_activations():
    assert ModelConfig().checkpoints_gradients(CHECKPOINTING_FROM + 1)
    assert not ModelConfig().checkpoints_gradients(CHECKPOINTING_FROM)
    assert not ModelConfig(enable_gradient_checkpointing=False).checkpoints_gradients(CHECKPOINTING_FROM + 1)
    assert ModelConfig(enable_gradient_checkpointing=True).checkpoints_gradients(1)


WRONG_TYPES = """
import dataclasses
from pathlib import Path

from flowgrpo_rc.actor.config import DiffusionActorConfig
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rewards.config import CustomRewardConfig, OCRConfig, RewardConfig
from flowgrpo_rc.data.config import DataConfig
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
assert ModelConfig(path=Path("a") / "b").path == "a/b"
assert DataConfig(train_files=[Path("a")]).train_files == [Path("a")]
assert type(TrainerConfig(mixed_precision="bf16", total_epochs="3").total_epochs) is int
"""


@pytest.mark.process
def test_every_field_takes_or_refuses_any_value_by_name():
    """In a process of its own: the tests' type checks hold arguments to the letter of the annotation."""
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
