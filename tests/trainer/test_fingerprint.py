"""A checkpoint is continued only with the very parts that it was written with."""

import json
import shutil
import warnings
from pathlib import Path

import damage
import pytest
from safetensors import safe_open

from flowgrpo_rc.models import PipelineLoader, load_model
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.trainer.checkpoint import CheckpointError, check_fingerprint, fingerprint

HERE = Path("step_2")


def saved(print_):
    """As a checkpoint's JSON gives it back."""
    return json.loads(json.dumps(print_))


@pytest.fixture
def config(small_config):
    return small_config()


def test_the_same_model_agrees_in_every_precision(config, tiny_model):
    own = fingerprint(config, tiny_model)
    for dtype in ("float32", "bfloat16"):
        check_fingerprint(fingerprint(config, load_model("asset:tiny_qwen_image", dtype=dtype)), saved(own), HERE)
    assert {"text_encoder", "vae", "transformer", "tokenizer", "scheduler shift", "vae latents_mean"} <= own[
        "parts"
    ].keys()


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_every_single_weight_counts(config, tiny_model, part):
    own = saved(fingerprint(config, tiny_model))
    network = getattr(tiny_model.pipe, part)
    for parameter in list(network.parameters())[::9]:
        kept = parameter.detach().clone()
        parameter.data.mul_(1.5).add_(0.1)
        with pytest.raises(CheckpointError, match=rf"step_2 is a checkpoint of another model: \w+ ({part}|weights) is"):
            check_fingerprint(fingerprint(config, tiny_model), own, HERE)
        parameter.data.copy_(kept)
    check_fingerprint(fingerprint(config, tiny_model), own, HERE)


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("scheduler/scheduler_config.json", {"shift": 3.0}, "scheduler shift is 1.0 there and 3.0 here"),
        ("vae/config.json", {"latents_std": [1.0] * 8}, "vae latents_std is"),
        ("tokenizer/tokenizer.json", None, "tokenizer is"),
    ],
)
def test_schedule_scales_and_vocabulary_count(config, tiny_model, tmp_path, file, change, says):
    folder = shutil.copytree(resolve_asset("asset:tiny_qwen_image"), tmp_path / "model")
    content = json.loads((folder / file).read_text())
    if change is None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    else:
        content.update(change)
    (folder / file).write_text(json.dumps(content))
    other = fingerprint(config, load_model(str(folder)))
    with pytest.raises(CheckpointError, match=f"another model: parts {says}.*resume_mode=disable"):
        check_fingerprint(other, saved(fingerprint(config, tiny_model)), HERE)


def test_weights_of_a_text_encoder_count(config, tiny_model, tmp_path):
    """A run may never load it, so its files are asked."""
    own = saved(fingerprint(config, tiny_model))
    whole = Path(resolve_asset("asset:tiny_qwen_image"))
    folder = shutil.copytree(whole, tmp_path / "model")
    with safe_open(damage.weights_of(whole, "text_encoder"), "pt") as file:
        names = list(file.keys())
    for name in (names[0], names[-1]):
        damage.edit_weights(folder, "text_encoder", lambda state, name=name: state[name].mul_(1.5).add_(0.1))
        with pytest.raises(CheckpointError, match="parts text_encoder is"):
            check_fingerprint(fingerprint(config, PipelineLoader(str(folder)).load()), own, HERE)
        shutil.copy(damage.weights_of(whole, "text_encoder"), damage.weights_of(folder, "text_encoder"))
    damage.shard(folder, "text_encoder")
    check_fingerprint(fingerprint(config, PipelineLoader(str(folder)).load()), own, HERE)


def test_a_checkpoint_that_records_no_parts_is_taken_up_with_a_warning(config, tiny_model):
    own = fingerprint(config, tiny_model)
    older = saved(own)
    del older["parts"]
    with pytest.warns(UserWarning, match="step_2 was written before .* that these are the same is not checked"):
        check_fingerprint(own, older, HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fingerprint(own, saved(own), HERE)
    other = own | {"lora": own["lora"] | {"rank": 64}}
    with pytest.raises(CheckpointError, match="lora rank"):
        check_fingerprint(other, older, HERE)
