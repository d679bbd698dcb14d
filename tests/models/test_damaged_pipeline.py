"""A pipeline with missing, damaged or foreign parts is refused in one line that names the part and the file."""

import shutil
from pathlib import Path

import damage
import pytest
import torch

from flowgrpo_rc.models import UnsupportedModelError, load, load_model
from flowgrpo_rc.models.load import check_pipeline
from flowgrpo_rc.paths import resolve_asset

QWEN = Path(resolve_asset("asset:tiny_qwen_image"))
NETWORKS = ("transformer", "vae", "text_encoder")


INDEX = "model_index.json"


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


# ---------------------------------------------------------------- ways to damage a folder


def weights(part, change):
    return lambda folder: damage.edit_weights(folder, part, change)


def drop(part):
    return lambda folder: damage.drop_weight(folder, part)


def misshape(state):
    state[sorted(state)[0]] = torch.ones(3, 5)


def fill_one(value):
    return lambda state: state[sorted(state)[3]].view(-1)[-1:].fill_(float(value))


def entries(file, **changed):
    return lambda folder: damage.edit_json(folder / file, lambda content: content.update(changed))


def written(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def gone(file):
    return lambda folder: (folder / file).unlink()


def link_to_nothing(folder):
    damage.weights_of(folder, "vae").unlink()
    (folder / VAE).symlink_to(folder / "gone")


def sharded(part, change):
    return lambda folder: change(damage.shard(folder, part))


def second_shard(index):
    return next(index.parent.glob("*-00002-of-*"))


def one_token_more(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer_3")
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder / "tokenizer_3")


VAE = "vae/diffusion_pytorch_model.safetensors"
SCHEDULER = "scheduler/scheduler_config.json"
SHARD_FAULTS = (
    (lambda index: second_shard(index).unlink(), "-00002-of-00003.safetensors is missing"),
    (lambda index: damage.cut(second_shard(index)), "-00002-of-00003.safetensors is cut off"),
    (damage.cut, "index.json is not JSON"),
    (lambda index: index.write_text("{}"), "has no weight_map"),
)


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    "case",
    [
        (written(VAE, b"<html>404 not found</html>"), VAE, "is no safetensors file"),
        (written(VAE, b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), VAE, "is a Git LFS pointer"),
        (gone(VAE), "vae holds no weights"),
        (link_to_nothing, f"{VAE} is missing"),
        *(
            (sharded(part, change), f"{part}/", says)
            for part in ("transformer", "text_encoder")
            for change, says in SHARD_FAULTS
        ),
        *(
            (written(file, content), f"{file} ", "JSON")
            for file, content in (
                (INDEX, b""),
                ("transformer/config.json", b'{"a": '),
                ("text_encoder/config.json", b"\xff\xfe"),
                (SCHEDULER, b"[]"),
                ("tokenizer/tokenizer_config.json", b"3"),
            )
        ),
        *(
            (gone(file), f"{file} is missing")
            for file in ("vae/config.json", SCHEDULER, "tokenizer/tokenizer_config.json")
        ),
    ],
)
def test_files_are_checked_before_weights_are_read(folder, case):
    damaging, *words = case
    damaging(folder)
    refused(check_pipeline, folder, *words)


@pytest.mark.parametrize("part", NETWORKS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.9999])
def test_weights_that_are_cut_off(folder, part, share):
    file = damage.weights_of(folder, part)
    damage.cut(file, share)
    refused(check_pipeline, folder, f"{part}/{file.name} is cut off: it has {file.stat().st_size:,} bytes")


@pytest.mark.parametrize(
    "case",
    [
        *((drop(part), f"{part}/", ".safetensors", "1 missing (", "download it again") for part in NETWORKS),
        (
            weights("vae", lambda state: state.update({f"extra.{i}": torch.ones(1) for i in range(5)})),
            "vae/",
            "5 unexpected (extra.0, extra.1, extra.2, ...)",
        ),
        *(
            (weights(part, misshape), f"{part}/", "1 of another shape (", "[3, 5] instead of [")
            for part in ("transformer", "text_encoder")
        ),
        *(
            (weights(part, fill_one(value)), f"({part}: 1 of its weights hold values that are not finite (")
            for part, value in (("transformer", "nan"), ("vae", "inf"), ("text_encoder", "nan"))
        ),
        (entries("transformer/config.json", num_layers=3), "transformer", "32 unexpected"),
        (entries("transformer/config.json", num_layers="four"), "config.json cannot be read as a QwenImageTransformer"),
        (entries("transformer/config.json", axes_dims_rope=[8, 12, 14]), "the transformer fails at its first image"),
        (entries(INDEX, vae=[None, None]), "model_index.json names no vae"),
        (entries(INDEX, vae=[1, 2]), "vae is [1, 2]; it must be [library, class]"),
        (entries(INDEX, other=["diffusers", "Other"]), "it holds no other"),
        (entries(INDEX, text_encoder=["transformers", "NoSuchModel"]), "names transformers.NoSuchModel as its text_en"),
        (
            entries(INDEX, scheduler=["diffusers", "DDIMScheduler"]),
            "its scheduler is a DDIMScheduler; a policy is made",
        ),
        (entries(INDEX, tokenizer=["transformers", "CLIPModel"]), "tokenizer"),
        (entries(INDEX, _class_name=3), "_class_name is 3"),
        (entries(INDEX, _class_name="StableDiffusion3Pipeline"), "tokenizer_3, which a StableDiffusion3Pipeline needs"),
        (entries(SCHEDULER, shift=float("nan")), f"the noise levels of {SCHEDULER[10:]} do not fall from at most 1 to"),
        (entries(SCHEDULER, shift="three"), "scheduler cannot be read as a FlowMatchEulerDiscreteScheduler"),
        (gone("tokenizer/tokenizer.json"), "tokenizer has a vocabulary of 7 tokens and cannot tell", "vocab.json"),
    ],
)
def test_the_rest_is_found_when_it_is_loaded(folder, case):
    damaging, *words = case
    damaging(folder)
    refused(load_model, folder, *words)


@pytest.mark.parametrize(
    "case",
    [
        *((drop(part), f"{part}/", "1 missing (") for part in ("text_encoder_2", "text_encoder_3")),
        (gone("tokenizer_3/tokenizer.json"), "(tokenizer_3 has a vocabulary of"),
        (one_token_more, "tokenizer_3 has 99 tokens, text_encoder_3 embeds 98"),
        # An infinite one would silently make one image of all latents.
        (entries("vae/config.json", scaling_factor=float("inf")), "vae/config.json: scaling_factor is inf"),
        (entries("vae/config.json", scaling_factor=float("nan")), "vae/config.json: scaling_factor is nan"),
        (
            entries("transformer/config.json", pooled_projection_dim=48),
            "the text encoders give embeddings of width [48, 40], the transformer takes [48, 48]",
        ),
    ],
)
def test_every_text_encoder_and_scale_of_sd3_is_tried(sd3_folder, case):
    damaging, *words = case
    damaging(sd3_folder)
    refused(load_model, sd3_folder, *words)


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


def test_shards_load_and_give_the_same_weights(folder):
    for part in NETWORKS:
        damage.shard(folder, part)
    there, here = (load_model(str(path)).pipe for path in (QWEN, folder))
    for part in NETWORKS:
        expected = getattr(there, part).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in getattr(here, part).state_dict().items())


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


def test_t5_is_left_out_only_where_the_index_says_so(sd3_folder):
    file = sd3_folder / "model_index.json"
    whole = file.read_text()
    damage.edit_json(file, lambda index: index.update(text_encoder_3=[None, None], tokenizer_3=[None, None]))
    assert load_model(str(sd3_folder)).pipe.text_encoder_3 is None
    file.write_text(whole)
    damage.edit_json(file, lambda index: index.pop("text_encoder_3") and index.pop("tokenizer_3") and None)
    refused(load_model, sd3_folder, "model_index.json names no text_encoder_3, tokenizer_3")


def test_a_run_is_refused_before_prompts_and_rewards_are_read(folder, small_config):
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    damage.cut(damage.weights_of(folder, "text_encoder"))
    config = small_config(f"actor_rollout_ref.model.path={folder}", "data.train_files=/no/such/file.txt")
    with pytest.raises(UnsupportedModelError, match="text_encoder/model.safetensors is cut off"):
        FlowGRPOTrainer(config)


@pytest.mark.parametrize("damaging", [drop("transformer"), weights("vae", misshape), drop("text_encoder")])
def test_weights_that_go_straight_to_a_device_are_named_too(folder, monkeypatch, damaging):
    read = load._load_weights
    to_a_device = {"device_map": {"": "cpu"}}
    monkeypatch.setattr(load, "_load_weights", lambda *given: read(*given[:-1], to_a_device))
    load_model(str(folder))
    damaging(folder)
    refused(load_model, folder, "config.json are not of one", "1 ")
