"""The reward section: defaults, Hydra composition, and every refusal with its message."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowgrpo_rc.cli.compose import compose as compose_run
from flowgrpo_rc.cli.compose import to_yaml
from flowgrpo_rc.rewards import CustomRewardConfig, RewardConfig, RewardMix, build_observers, build_reward


def compose(*overrides: str) -> RewardConfig:
    """As the command line does it."""
    return compose_run("flowgrpo_trainer", overrides).reward


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("name", "ocr", "name: 'ocr' is the name of a built-in reward; rename"),
        *(
            ("name", name, rf"name: got '{name}', but the run logs reward/{name}.*rename your function")
            for name in ("mean", "zero_std_fraction")
        ),
        *(
            ("name", name, "name: got .*which becomes the metric reward/.*letters a to z")
            for name in ("a/b", "a b", "größe", "1st")
        ),
        *(
            ("path", path, r"custom_reward_function\.path: .* is not a file")
            for path in ("/nowhere/mine.py", "/", "pkg://verl_omni.utils")
        ),
    ],
)
def test_names_and_paths_of_a_function_that_cannot_be(mine: str, key: str, value: str, told: str) -> None:
    """A name is one that every tracker stores, and no other metric's or reward's."""
    section = {"path": mine.partition("=")[2], "name": "compute_score"}
    with pytest.raises(ValueError, match=told):
        RewardConfig(custom_reward_function=CustomRewardConfig(**section | {key: value}))


def test_a_reward_of_the_mix_may_not_have_the_name_of_a_metric() -> None:
    with pytest.raises(ValueError, match="functions: got 'mean', but the run logs reward/mean"):
        RewardMix({"mean": lambda images, prompts, metadata: [0.0]}, {"mean": 1.0})


# ---------------------------------------------------------------------- which rewards count


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The override that names a function `compute_score` of the user's own."""
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(images, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    return f"reward.custom_reward_function.path={path}"


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ([], {"ocr": 1.0}),
        (["reward.functions=null"], {"ocr": 1.0}),
        (["reward.functions.ocr='1.5'"], {"ocr": 1.5}),
        (["reward.functions.jpeg_compressibility=0"], {"ocr": 1.0}),
        (["reward.functions={ocr: 2, jpeg_compressibility: 0.5}"], {"ocr": 2.0, "jpeg_compressibility": 0.5}),
        (["MINE"], {"compute_score": 1.0}),
        (["MINE", "reward.functions.ocr=1"], {"ocr": 1.0, "compute_score": 1.0}),
        (["MINE", "reward.functions.jpeg_compressibility=3"], {"jpeg_compressibility": 3.0, "compute_score": 1.0}),
        (["MINE", "reward.custom_reward_function.weight=0"], {"ocr": 1.0}),
    ],
)
def test_a_reward_of_ones_own_counts_alone_unless_others_are_named(
    mine: str, overrides: list[str], weights: dict[str, float]
) -> None:
    assert compose(*(mine if o == "MINE" else o for o in overrides)).weights() == weights


def test_a_yaml_file_of_ones_own_names_rewards_too(tmp_path: Path, mine: str) -> None:
    (tmp_path / "own.yaml").write_text(
        "defaults: [flowgrpo_trainer, _self_]\nreward:\n  functions: {ocr: 0.5}\n"
        "  custom_reward_function: {reward_kwargs: {scale: 2}}\n"
    )
    reward = compose_run("own", [mine], str(tmp_path)).reward
    assert reward.weights() == {"ocr": 0.5, "compute_score": 1.0}
    assert reward.custom_reward_function.reward_kwargs == {"scale": 2}


def test_what_a_resolved_configuration_prints_can_be_built_on(tmp_path: Path, mine: str) -> None:
    """The default is not written into it as if somebody had named it."""
    printed = to_yaml(compose_run("flowgrpo_trainer"))
    (tmp_path / "printed.yaml").write_text(f"defaults: [flowgrpo_trainer, _self_]\n{printed}")
    composed = compose_run("printed", [mine], str(tmp_path)).reward
    assert composed.weights() == {"compute_score": 1.0}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "reward.functions.x=big",
            r"reward\.functions: 'x' is not a known reward; known are .*jpeg_compressibility, .*ocr",
        ),
        ("reward.functions.mean=1", r"'mean' is not a known reward"),
        ("reward.functions.ocr=big", r"reward\.functions\.ocr: got 'big'; a weight must be a finite number"),
        ("reward.functions.ocr=true", r"reward\.functions\.ocr: got True; a weight must be a finite number"),
        ("reward.functions.ocr=nan", r"reward\.functions\.ocr: got nan; a weight must be a finite number"),
        ("reward.functions.ocr={a: 1}", r"reward\.functions\.ocr: got \{'a': 1\}; a weight must be"),
        ("reward.functions=big", r"reward\.functions: got 'big'; give weights by name"),
        ("reward.custom_reward_function.weight=big", r"reward\.custom_reward_function\.weight: .*'big'"),
        ("reward.functions={ocr: 0}", r"every weight is 0.*reward\.functions\.ocr=1"),
        ("reward.ocr.rec_image_shape=[48,64]", r"rec_image_shape: got \[48, 64\]; give \[3, 48, width\]"),
        ("reward.timeout_s=0", r"reward\.timeout_s: got 0\.0; give a number above 0 or null"),
        ("reward.timeout_s=soon", r"reward\.timeout_s: .*'soon'"),
        ("reward.pickscore.device=gpu", r"reward\.pickscore\.device: got 'gpu'; give auto, cpu, cuda or cuda:N"),
        ("reward.clipscore.dtype=int8", r"reward\.clipscore\.dtype: got 'int8'; choose one of float32"),
        ("reward.aesthetic.micro_batch_size=0", r"reward\.aesthetic\.micro_batch_size: got 0; give a number above 0"),
        ("reward.hpsv2.version=1", r"reward\.hpsv2\.version: got '1'; choose one of 2.0, 2.1"),
        ("reward.dino_similarity.model_path=' '", r"reward\.dino_similarity\.model_path: got ' '; give a path"),
    ],
)
def test_what_is_no_weight_says_so(override: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        compose(override)
    assert "unknown configuration key" not in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- several functions, and scorers that look


def scorer(folder: Path) -> Path:
    path = folder / "mine.py"
    path.write_text(
        "def length(images, prompts, metadata, scale=1):\n    return [scale * len(p) for p in prompts]\n"
        "def compute_score(images, prompts, metadata):\n    return [0.5] * len(prompts)\n"
    )
    return path


def test_several_functions_of_one_s_own_with_weights_and_arguments(tmp_path: Path) -> None:
    path = scorer(tmp_path)
    config = compose(
        f"+reward.reward_functions.long.path={path}",
        "+reward.reward_functions.long.name=length",
        "+reward.reward_functions.long.weight=0.5",
        "+reward.reward_functions.long.scale=3",
        "+reward.reward_functions.long.required=true",
        f"+reward.reward_functions.half.path={path}",
        "reward.reward_functions.off={path: " + str(path) + ", weight: 0}",
        "reward.functions.jpeg_compressibility=2",
    )
    assert config.weights() == {"jpeg_compressibility": 2.0, "long": 0.5, "half": 1.0}
    assert config.in_words() == f"2 x jpeg_compressibility + 0.5 x long ({path}) + 1 x half ({path})"
    mix = build_reward(config)
    result = mix(np.zeros((2, 8, 8, 3), np.uint8), ["a", "bbb"])
    assert result.parts["long"].tolist() == [3, 9]
    assert result.parts["half"].tolist() == [0.5, 0.5]
    np.testing.assert_allclose(result.total, 2 * result.parts["jpeg_compressibility"] + [2.0, 5.0], rtol=1e-6)


def test_scorers_that_look_are_made_apart(tmp_path: Path) -> None:
    path = scorer(tmp_path)
    looking = {"jpeg_compressibility": True, "mine": {"path": str(path), "name": "length", "scale": 2}, "ocr": False}
    config = RewardConfig(reward_functions={"half": {"path": str(path)}}, val_functions=looking)
    assert list(config.weights()) == ["half"]
    assert config.in_words() == f"1 x half ({path}); in validation jpeg_compressibility, mine only look"
    observers = build_observers(config)
    assert observers is not None
    result = observers(np.zeros((2, 8, 8, 3), np.uint8), ["a", "bbb"])
    assert list(result.parts) == ["jpeg_compressibility", "mine"]
    assert result.parts["mine"].tolist() == [2, 6]
    assert result.total.tolist() == [0, 0]
    assert build_observers(RewardConfig()) is None


@pytest.mark.parametrize(
    ("section", "entries", "says"),
    [
        ("reward_functions", 5, r"reward\.reward_functions: got 5; give functions by name"),
        ("reward_functions", {"a": "mine.py"}, r"reward_functions\.a: got 'mine\.py'; give its keys"),
        ("reward_functions", {"a": {"path": "/no.py"}}, r"reward_functions\.a\.path: '/no\.py' is not a file"),
        ("reward_functions", {"a": {"path": "HERE", "weight": "big"}}, r"reward_functions\.a\.weight: got 'big'"),
        ("reward_functions", {"mean": {"path": "HERE"}}, r"reward_functions\.mean: got 'mean', but the run logs"),
        ("reward_functions", {"ocr": {"path": "HERE"}}, r"reward_functions\.ocr: another reward is called 'ocr' too"),
        ("val_functions", {"ocr": True}, r"val_functions\.ocr: 'ocr' is a reward of the training"),
        ("val_functions", {"beauty": True}, r"val_functions: 'beauty' is not a known reward; known are jpeg_"),
        ("val_functions", {"a": 0.5}, r"val_functions\.a: got 0\.5; give true, or \{path, name\}"),
        ("val_functions", {"a": {"path": "/no.py"}}, r"val_functions\.a\.path: '/no\.py' is not a file"),
        ("normalization", "batch", r"reward\.normalization: got 'batch'; choose one of group or null"),
    ],
)
def test_what_several_functions_refuse(tmp_path: Path, section: str, entries: object, says: str) -> None:
    here = str(scorer(tmp_path))
    if isinstance(entries, dict):
        entries = {
            name: {k: here if v == "HERE" else v for k, v in entry.items()} if isinstance(entry, dict) else entry
            for name, entry in entries.items()
        }
    with pytest.raises(ValueError, match=says):
        RewardConfig(functions={"ocr": 1.0}, **{section: entries})


@pytest.mark.parametrize(("section", "load"), [("reward_functions", build_reward), ("val_functions", build_observers)])
def test_what_is_wrong_with_a_function_names_its_field(tmp_path: Path, section: str, load: Any) -> None:
    for wrong, says in (
        ({"name": "length", "temperature": 1}, r"mine\.temperature: reward function 'length'.* has no"),
        ({"name": "absent"}, r"mine\.name: .* defines no 'absent'"),
    ):
        entry = {"path": str(scorer(tmp_path)), **wrong}
        config = RewardConfig(functions={"jpeg_compressibility": 1.0}, **{section: {"mine": entry}})
        with pytest.raises(ValueError, match=rf"reward\.{section}\.{says}"):
            load(config)
