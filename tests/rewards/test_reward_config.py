"""The reward section: defaults, Hydra composition, and every refusal with its message."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flowgrpo_rc.cli.compose import compose as compose_run
from flowgrpo_rc.rewards import CustomRewardConfig, OCRConfig, RewardConfig


def compose(*overrides: str) -> RewardConfig:
    """As the command line does it."""
    return compose_run("flowgrpo_trainer", overrides).reward


def test_default_is_ocr_alone() -> None:
    assert compose().weights() == {"ocr": 1.0}
    assert compose() == RewardConfig()


def test_overrides_mix_and_weight_zero_turns_off() -> None:
    config = compose("reward.functions.ocr=0", "reward.functions.jpeg_compressibility=2")
    assert config.weights() == {"jpeg_compressibility": 2.0}


def test_custom_function_joins_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def bright(images, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    config = compose(
        f"reward.custom_reward_function.path={path}",
        "reward.custom_reward_function.name=bright",
        "reward.custom_reward_function.weight=-0.5",
    )
    assert config.weights() == {"bright": -0.5}
    config.validate()


def test_unknown_reward_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'oxr' is not a known reward; known are jpeg_compressibility, ocr"):
        RewardConfig(functions={"oxr": 1.0})


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_non_finite_weight(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"reward\.functions\.ocr: got {weight}; .*finite"):
        RewardConfig(functions={"ocr": weight})
    with pytest.raises(ValueError, match=rf"custom_reward_function\.weight: got {weight}"):
        CustomRewardConfig(weight=weight)


@pytest.mark.parametrize("functions", [{"ocr": 0.0}, {"ocr": 0.0, "jpeg_compressibility": 0.0}])
def test_all_weights_zero(functions: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"every weight is 0.*reward\.functions\.ocr=1"):
        RewardConfig(functions=functions)


def test_custom_path_must_exist() -> None:
    with pytest.raises(ValueError, match=r"path: '/nowhere/mine\.py' is not a file; .*'compute_score'"):
        CustomRewardConfig(path="/nowhere/mine.py")


def test_custom_name_may_not_shadow_a_builtin(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def ocr(images, prompts, metadata): ...\n")
    with pytest.raises(ValueError, match=r"name: 'ocr' is the name of a built-in reward; rename"):
        RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path), name="ocr"))


def test_validate_loads_the_custom_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def other(images, prompts, metadata): ...\n")
    config = RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path)))
    with pytest.raises(ValueError, match=r"defines no 'compute_score'; it defines other"):
        config.validate()


def test_validate_repeats_the_checks_after_mutation() -> None:
    config = RewardConfig()
    config.ocr.mode = "fast"
    with pytest.raises(ValueError, match=r"reward\.ocr\.mode: got 'fast'; choose one of recognition, full"):
        config.validate()


@pytest.mark.parametrize("shape", [[48, 64], [3, 32, 64], [1, 48, 64], [3, 48, 4]])
def test_bad_recogniser_shape(shape: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rec_image_shape: got \[.*\[3, 48, width\]"):
        OCRConfig(rec_image_shape=shape)


def test_negative_threads() -> None:
    with pytest.raises(ValueError, match=r"num_threads: got -1; give 0"):
        OCRConfig(num_threads=-1)
