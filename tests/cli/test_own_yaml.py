"""YAML files of a user's own: whatever is wrong with one is said in a line that names it."""

import re

import pytest

from flowgrpo_rc.cli.compose import ConfigError, compose

HEAD = "defaults: [tiny_qwen_image_ocr, _self_]\n"


def write(folder, content, name="mine"):
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / f"{name}.yaml").write_bytes(raw)
    return str(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ((HEAD + "trainer: {seed: 5}\n").encode("utf-16"), "mine: .*utf-8.* codec"),
        ("- a\n- b\n", "mine: .*must be a DictConfig, got ListConfig"),
        ("trainer:\n\tseed: 1\n", "mine.yaml is not YAML, line 2"),
        (HEAD + "trainer: {seed: 5, seed: 6}\n", "mine.yaml is not YAML, line 2: found duplicate key seed"),
        ("!!python/object:os.system {}\n", "mine.yaml is not YAML, line 1"),
        ("defaults: 5\n", "mine: .*defaults must be a list"),
        ("defaults: [nothere, _self_]\n", "mine: no file nothere.yaml; there are: .*tiny_qwen_image_ocr"),
        (HEAD + "trainer: {_target_: x, seed: 5}\n", "trainer._target_ has no meaning here"),
        (HEAD + "trainer: {defaults: [a]}\n", "trainer.defaults has no meaning here"),
        (HEAD + "hydra: {run: {dir: x}}\n", "mine.yaml: hydra has no meaning here"),
        (HEAD + "trainer: {1: 2}\n", "unknown configuration key trainer.1"),
        (HEAD + "trainer:\n", "trainer: got null, but it is a section; give its keys"),
        (HEAD + "actor_rollout_ref: {actor: {optim: {lr: .nan}}}\n", "optim.lr: got nan; give a number above 0"),
        (HEAD + "trainer:\n  seed: ???\n", r"trainer.seed: is \?\?\?, which stands for a value that must be given"),
        (HEAD + "trainer: {experiment_name: '${trainer.nope}'}\n", "trainer.experiment_name: .* cannot be resolved"),
        (HEAD + "sample: {num_steps: 10}\n", "write actor_rollout_ref.rollout.pipeline.num_inference_steps=10 instead"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line_that_names_it(content, says, tmp_path):
    with pytest.raises(ConfigError) as caught:
        compose("mine", config_dir=write(tmp_path, content))
    message = str(caught.value)
    assert re.search(says, message), message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["", " ", "../secrets"])
def test_names_that_are_none(name, tmp_path):
    with pytest.raises(ConfigError, match="--config-name: got .*; give a file's name"):
        compose(name, config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "seed"),
    [
        (b"\xef\xbb\xbf" + (HEAD + "trainer: {seed: 5}\n").encode(), 5),
        ("trainer: {seed: 5}\n", 5),
        ("", 42),
        ("# @package _global_\ntrainer: {seed: 5}\n", 5),
        (HEAD + "trainer: {experiment_name: '${trainer.project_name}_x', seed: 5, mixed_precision: no}\n", 5),
    ],
)
def test_files_that_are_fine(content, seed, tmp_path):
    config = compose("mine", config_dir=write(tmp_path, content))
    assert (config.trainer.seed, config.trainer.mixed_precision) == (seed, "no")


def test_settings_of_another_trainer_in_a_file_act(tmp_path):
    fsdp = "actor_rollout_ref: {actor: {fsdp_config: {model_dtype: bf16, param_offload: true}}}\n"
    folder = write(tmp_path, HEAD + fsdp)
    with pytest.warns(UserWarning, match=r"fsdp_config.model_dtype=bf16 -> actor_rollout_ref.model.dtype=bfloat16"):
        assert compose("mine", config_dir=folder).actor_rollout_ref.model.dtype == "bfloat16"
    with pytest.warns(UserWarning, match="on the command line wins over the file"):
        config = compose("mine", ["actor_rollout_ref.model.dtype=float32"], config_dir=folder)
    assert config.actor_rollout_ref.model.dtype == "float32"


def test_a_deletion_takes_back_what_a_file_says(tmp_path):
    folder = write(tmp_path, HEAD + "trainer: {seed: 5}\n")
    assert compose("mine", ["~trainer.seed"], config_dir=folder).trainer.seed == 42
    with pytest.raises(ConfigError, match="unknown configuration key trainer.sead"):
        compose("mine", ["~trainer.sead"], config_dir=folder)
