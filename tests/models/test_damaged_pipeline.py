"""A pipeline with missing, damaged or foreign parts is refused in one line that names the part and the file."""

import shutil
from pathlib import Path

import damage
import pytest
import torch

from flowgrpo_rc.models import UnsupportedModelError, load_model
from flowgrpo_rc.models.load import check_pipeline
from flowgrpo_rc.paths import resolve_asset

QWEN = Path(resolve_asset("asset:tiny_qwen_image"))
NETWORKS = ("transformer", "vae", "text_encoder")


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny Qwen-Image to damage."""
    return shutil.copytree(QWEN, tmp_path / "model")


@pytest.fixture
def sd3_folder(tiny_sd3_path, tmp_path):
    """A copy of the tiny Stable Diffusion 3 to damage."""
    return shutil.copytree(tiny_sd3_path, tmp_path / "sd3")


def refused(load, folder, *words):
    """``load(folder)`` raises one line with the field, the folder and all of ``words``."""
    with pytest.raises(UnsupportedModelError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert message.startswith(f"actor_rollout_ref.model.path: {folder}")
    assert "\n" not in message
    for word in words:
        assert word in message


# ---------------------------------------------------------------- weights


def drop(state):
    state.pop(sorted(state)[1])


def reshape(state):
    state[sorted(state)[0]] = torch.ones(3, 5)


def fill(value):
    return lambda state: state[sorted(state)[3]].view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(
    ("model", "part", "change", "says"),
    [
        *(("folder", part, drop, "1 missing (") for part in NETWORKS),
        *(("sd3_folder", part, drop, "1 missing (") for part in ("text_encoder_2", "text_encoder_3")),
        (
            "folder",
            "vae",
            lambda state: state.update({f"extra.{i}": torch.ones(1) for i in range(5)}),
            "5 unexpected (extra.0, extra.1, extra.2, ...)",
        ),
        *(("folder", part, reshape, "[3, 5] instead of [") for part in ("transformer", "text_encoder")),
        *(
            ("folder", part, fill(value), f"{part}: 1 of its weights hold values that are not finite (")
            for part, value in (("transformer", torch.nan), ("vae", torch.inf), ("text_encoder", torch.nan))
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_with_their_part(request, model, part, change, says):
    folder = request.getfixturevalue(model)
    damage.edit_weights(folder, part, change)
    refused(load_model, folder, part, says, "download it again")


def test_weights_too_large_for_the_precision_are_named(folder):
    large = {"decoder.conv_in.bias": torch.full((32,), 1e6)}
    damage.edit_weights(folder, "vae", lambda state: state.update(large))
    load_model(str(folder))
    refused(lambda path: load_model(path, dtype="float16"), folder, "vae: 1 of its", "not finite", "in float16")


def test_what_may_be_missing_or_surplus_is_not_refused(sd3_folder):
    """Position ids of older files. The tiny Qwen-Image lacks the output matrix that is tied to its input."""
    ids = {"text_model.embeddings.position_ids": torch.arange(16)[None]}
    damage.edit_weights(sd3_folder, "text_encoder", lambda state: state.update(ids))
    load_model(str(sd3_folder))


# ---------------------------------------------------------------- files of weights


@pytest.mark.parametrize("part", NETWORKS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.9999])
def test_weights_that_are_cut_off(folder, part, share):
    file = damage.weights_of(folder, part)
    damage.cut(file, share)
    refused(check_pipeline, folder, f"{part}/{file.name} is cut off: it has {file.stat().st_size:,} bytes")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>404 not found</html>", "is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
    ],
)
def test_files_without_weights(folder, content, says):
    damage.weights_of(folder, "vae").write_bytes(content)
    refused(check_pipeline, folder, "vae/diffusion_pytorch_model.safetensors", says)


def test_no_weights_and_a_link_to_nothing(folder):
    file = damage.weights_of(folder, "vae")
    file.unlink()
    refused(check_pipeline, folder, "vae holds no weights")
    file.symlink_to(folder / "gone")
    refused(check_pipeline, folder, f"vae/{file.name} is missing")


def test_shards_load_and_give_the_same_weights(folder):
    for part in NETWORKS:
        damage.shard(folder, part)
    there, here = (load_model(str(path)).pipe for path in (QWEN, folder))
    for part in NETWORKS:
        expected = getattr(there, part).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in getattr(here, part).state_dict().items())


SHARD_FAULTS = {
    "gone": (lambda index: next(index.parent.glob("*-00002-of-*")).unlink(), "-00002-of-00003.safetensors is missing"),
    "cut": (
        lambda index: damage.cut(next(index.parent.glob("*-00002-of-*"))),
        "-00002-of-00003.safetensors is cut off",
    ),
    "index half": (damage.cut, "index.json is not JSON"),
    "index empty": (lambda index: index.write_text("{}"), "has no weight_map"),
}


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_damaged_shards(folder, part, fault):
    change, says = SHARD_FAULTS[fault]
    change(damage.shard(folder, part))
    refused(check_pipeline, folder, f"{part}/", says)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_variant_alone_and_pickled_weights_load(folder, part):
    from safetensors.torch import load_file

    file = damage.weights_of(folder, part)
    variant = file.with_name(file.name.replace(".safetensors", ".fp16.safetensors"))
    file.rename(variant)
    load_model(str(folder))
    pickled = "pytorch_model.bin" if part == "text_encoder" else "diffusion_pytorch_model.bin"
    torch.save(load_file(variant), folder / part / pickled)
    variant.unlink()
    load_model(str(folder))
    damage.cut(folder / part / pickled)
    refused(load_model, folder, f"{part}/config.json and {pickled} do not give a")


# ---------------------------------------------------------------- configurations, index, schedule, vocabulary


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("transformer", {"num_layers": 3}, "32 unexpected"),
        ("transformer", {"num_layers": "four"}, "transformer/config.json cannot be read as a QwenImageTransformer2D"),
        ("transformer", {"axes_dims_rope": [8, 12, 14]}, "the transformer fails at its first image"),
    ],
)
def test_a_configuration_of_another_network(folder, part, change, says):
    damage.edit_json(folder / part / "config.json", lambda config: config.update(change))
    refused(load_model, folder, part, says)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model_index.json", b""),
        ("transformer/config.json", b'{"a": '),
        ("text_encoder/config.json", b"\xff\xfe"),
        ("scheduler/scheduler_config.json", b"[]"),
        ("tokenizer/tokenizer_config.json", b"3"),
    ],
)
def test_a_file_that_is_no_json_object(folder, name, content):
    (folder / name).write_bytes(content)
    refused(check_pipeline, folder, f"{name} ", "JSON")


@pytest.mark.parametrize(
    "name", ["vae/config.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"]
)
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    refused(check_pipeline, folder, f"{name} is missing")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"vae": [None, None]}, "model_index.json names no vae"),
        ({"vae": [1, 2]}, "vae is [1, 2]; it must be [library, class]"),
        ({"other": ["diffusers", "Other"]}, "it holds no other"),
        ({"text_encoder": ["transformers", "NoSuchModel"]}, "names transformers.NoSuchModel as its text_encoder"),
        ({"scheduler": ["diffusers", "DDIMScheduler"]}, "its scheduler is a DDIMScheduler; a policy is made of"),
        ({"tokenizer": ["transformers", "CLIPModel"]}, "tokenizer"),
        ({"_class_name": 3}, "_class_name is 3"),
        ({"_class_name": "StableDiffusion3Pipeline"}, "tokenizer_3, which a StableDiffusion3Pipeline needs"),
    ],
)
def test_an_index_that_names_other_parts(folder, entries, says):
    damage.edit_json(folder / "model_index.json", lambda index: index.update(entries))
    refused(load_model, folder, says)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"shift": float("nan")}, "the noise levels of scheduler_config.json do not fall from at most 1 to 0"),
        ({"shift": "three"}, "scheduler cannot be read as a FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_a_schedule_that_cannot_be_used(folder, config, says):
    damage.edit_json(folder / "scheduler" / "scheduler_config.json", lambda content: content.update(config))
    refused(load_model, folder, says)


@pytest.mark.parametrize(("model", "name"), [("folder", "tokenizer"), ("sd3_folder", "tokenizer_3")])
def test_a_tokenizer_without_its_vocabulary(request, model, name):
    folder = request.getfixturevalue(model)
    (folder / name / "tokenizer.json").unlink()
    refused(load_model, folder, f"({name} has a vocabulary of", "tokens and cannot tell texts apart")


def test_a_tokenizer_with_more_tokens_than_the_text_encoder_embeds(sd3_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sd3_folder / "tokenizer_3")
    known = len(tokenizer)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(sd3_folder / "tokenizer_3")
    refused(load_model, sd3_folder, f"tokenizer_3 has {known + 1} tokens, text_encoder_3 embeds {known}")


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_vae_with_a_scale_that_is_not_finite(sd3_folder, value):
    """An infinite one would silently make one image of all latents."""
    damage.edit_json(sd3_folder / "vae" / "config.json", lambda config: config.update(scaling_factor=float(value)))
    refused(check_pipeline, sd3_folder, f"vae/config.json: scaling_factor is {value}")


def test_a_text_encoder_of_another_width(sd3_folder):
    damage.edit_json(sd3_folder / "transformer" / "config.json", lambda c: c.update(pooled_projection_dim=48))
    refused(
        load_model, sd3_folder, "the text encoders give embeddings of width [48, 40], the transformer takes [48, 48]"
    )


def test_t5_is_left_out_only_where_the_index_says_so(sd3_folder):
    file = sd3_folder / "model_index.json"
    whole = file.read_text()
    damage.edit_json(file, lambda index: index.update(text_encoder_3=[None, None], tokenizer_3=[None, None]))
    assert load_model(str(sd3_folder)).pipe.text_encoder_3 is None
    file.write_text(whole)
    damage.edit_json(file, lambda index: index.pop("text_encoder_3") and index.pop("tokenizer_3") and None)
    refused(load_model, sd3_folder, "model_index.json names no text_encoder_3, tokenizer_3")


# ---------------------------------------------------------------- the run and the command


def test_a_run_is_refused_before_prompts_and_rewards_are_read(folder, small_config):
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    damage.cut(damage.weights_of(folder, "text_encoder"))
    config = small_config(f"actor_rollout_ref.model.path={folder}", "data.train_files=/no/such/file.txt")
    with pytest.raises(UnsupportedModelError, match="text_encoder/model.safetensors is cut off"):
        FlowGRPOTrainer(config)
