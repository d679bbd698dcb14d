"""A pipeline with missing, damaged or foreign parts is refused in one line that names the part and the file."""

import json
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
    return message


# ---------------------------------------------------------------- weights that do not match their configuration


@pytest.mark.parametrize("part", NETWORKS)
def test_a_missing_weight_is_named(folder, part):
    file = damage.weights_of(folder, part)
    damage.drop_weight(folder, part)
    refused(load_model, folder, f"{part}/{file.name}", "1 missing (", "download it again")


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"])
def test_a_missing_weight_is_named_in_every_part_of_sd3(sd3_folder, part):
    damage.drop_weight(sd3_folder, part)
    refused(load_model, sd3_folder, f"{part}/", "1 missing (")


@pytest.mark.parametrize("part", NETWORKS)
def test_surplus_weights_are_counted_and_the_first_named(folder, part):
    damage.edit_weights(folder, part, lambda state: state.update({f"extra.{i}": torch.ones(1) for i in range(5)}))
    refused(load_model, folder, f"{part}/", "5 unexpected (extra.0, extra.1, extra.2, ...)")


@pytest.mark.parametrize("part", NETWORKS)
def test_a_weight_of_another_shape_is_named_with_both(folder, part):
    def change(state):
        state[sorted(state)[0]] = torch.ones(3, 5)

    damage.edit_weights(folder, part, change)
    refused(load_model, folder, f"{part}/", "1 of another shape (", "[3, 5] instead of [")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", NETWORKS)
def test_a_weight_that_is_not_finite_is_named(folder, part, value):
    damage.edit_weights(folder, part, lambda state: state[sorted(state)[3]].view(-1)[-1:].fill_(value))
    refused(load_model, folder, f"({part}: 1 of its weights hold values that are not finite (")


def test_weights_too_large_for_the_precision_are_named(folder):
    large = {"decoder.conv_in.bias": torch.full((32,), 1e6)}
    damage.edit_weights(folder, "vae", lambda state: state.update(large))
    load_model(str(folder))
    refused(lambda path: load_model(path, dtype="float16"), folder, "vae: 1 of its", "not finite", "in float16")


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("transformer", {"num_layers": 3}, "32 unexpected"),
        ("transformer", {"num_layers": 5}, "32 missing"),
        ("transformer", {"num_layers": "four"}, "transformer/config.json and"),
        ("text_encoder", {"model_type": "clip_text_model"}, "is that of a clip_text_model"),
        ("vae", {"_class_name": "AutoencoderKL"}, "is that of a AutoencoderKL, but model_index.json names"),
        ("vae", {"z_dim": 4}, "four times the vae's z_dim must agree"),
    ],
)
def test_a_configuration_of_another_network(folder, part, change, says):
    damage.edit_json(folder / part / "config.json", lambda config: config.update(change))
    refused(load_model, folder, f"{part}/config.json" if "config.json" in says else part, says)


def test_an_empty_configuration_draws_no_large_network_at_random(folder):
    """Its defaults are those of a model of 70 billion parameters."""
    (folder / "text_encoder" / "config.json").write_text("{}")
    refused(load_model, folder, "text_encoder/config.json describes a network of", "its files hold 94,752")


def test_what_may_be_missing_or_surplus_is_not_refused(sd3_folder, folder):
    """Position ids of older files; the output matrix of a language model that is tied to its input."""
    from safetensors import safe_open

    ids = {"text_model.embeddings.position_ids": torch.arange(16)[None]}
    damage.edit_weights(sd3_folder, "text_encoder", lambda state: state.update(ids))
    load_model(str(sd3_folder))
    with safe_open(damage.weights_of(folder, "text_encoder"), "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    load_model(str(folder))


# ---------------------------------------------------------------- files of weights


@pytest.mark.parametrize("part", NETWORKS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.5, 0.9999])
def test_weights_that_are_cut_off(folder, part, share):
    file = damage.weights_of(folder, part)
    damage.cut(file, share)
    refused(check_pipeline, folder, f"{part}/{file.name} is cut off: it has {file.stat().st_size:,} bytes")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>404 not found</html>", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        ((4).to_bytes(8, "little") + b"{ab}", "has a header that cannot be read"),
        ((9).to_bytes(8, "little") + b'{"a": []}', "has a header that cannot be read"),
        ((2).to_bytes(8, "little") + b"{}0", "is longer than its header says"),
    ],
)
def test_what_is_no_file_of_weights(folder, content, says):
    damage.weights_of(folder, "vae").write_bytes(content)
    refused(check_pipeline, folder, f"vae/diffusion_pytorch_model.safetensors {says}")


def test_no_weights_and_a_link_to_nothing(folder):
    file = damage.weights_of(folder, "vae")
    file.unlink()
    refused(check_pipeline, folder, "vae holds no weights")
    file.symlink_to(folder / "gone")
    refused(check_pipeline, folder, f"vae/{file.name} is a link to a file that is not there")


def test_shards_load_and_give_the_same_weights(folder):
    for part in NETWORKS:
        damage.shard(folder, part)
    there, here = (load_model(str(path)).pipe for path in (QWEN, folder))
    for part in NETWORKS:
        expected = getattr(there, part).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in getattr(here, part).state_dict().items())


def _drop_from_index(index):
    damage.edit_json(index, lambda content: content["weight_map"].pop(sorted(content["weight_map"])[0]) and None)


def _add_to_index(index):
    first = next(iter(json.loads(index.read_text())["weight_map"].values()))
    damage.edit_json(index, lambda content: content["weight_map"].update(foreign=first))


SHARD_FAULTS = {
    "gone": (lambda index: next(index.parent.glob("*-00002-of-*")).unlink(), "-00002-of-00003.safetensors is missing"),
    "cut": (
        lambda index: damage.cut(next(index.parent.glob("*-00002-of-*"))),
        "-00002-of-00003.safetensors is cut off",
    ),
    "index half": (damage.cut, "index.json is not JSON"),
    "index empty": (lambda index: index.write_text("{}"), "has no weight_map"),
    "index a list": (lambda index: index.write_text("[]"), "holds a JSON list"),
    "index of numbers": (lambda index: index.write_text('{"weight_map": {"a": 1}}'), "has no weight_map"),
    "index elsewhere": (
        lambda index: index.write_text('{"weight_map": {"a": "../a.safetensors"}}'),
        "not a file beside",
    ),
    "index lacks one": (_drop_from_index, "disagree: 1 not in the index ("),
    "index has more": (_add_to_index, "disagree: 1 missing in the file (foreign)"),
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
    refused(check_pipeline, folder, f"{part}/{pickled} is cut off")


# ---------------------------------------------------------------- configurations, index, schedule, vocabulary

BROKEN_JSON = {
    "empty": b"",
    "half": b'{"a": ',
    "not UTF-8": b"\xff\xfe",
    "deeply nested": b"[" * 100_000,
    "an integer of 5,000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "a list": b"[]",
    "a number": b"3",
}


@pytest.mark.parametrize("content", BROKEN_JSON)
@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "transformer/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/tokenizer.json",
    ],
)
def test_a_file_that_is_no_json_object(folder, name, content):
    (folder / name).write_bytes(BROKEN_JSON[content])
    refused(check_pipeline, folder, f"{name} ", "JSON")


@pytest.mark.parametrize(
    "name",
    [
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    refused(check_pipeline, folder, f"{name} is missing")


def test_an_index_that_is_a_folder(folder):
    (folder / "model_index.json").unlink()
    (folder / "model_index.json").mkdir()
    refused(check_pipeline, folder, "model_index.json cannot be read: Is a directory")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"vae": None}, "model_index.json names no vae"),
        ({"vae": [None, None]}, "model_index.json names no vae"),
        ({"vae": 3}, "model_index.json names no vae"),
        ({"vae": [1, 2]}, "vae is [1, 2]; it must be [library, class]"),
        ({"vae": ["diffusers"]}, "it must be [library, class]"),
        ({"other": ["diffusers", "Other"]}, "it holds no other"),
        ({"text_encoder": ["transformers", "NoSuchModel"]}, "names transformers.NoSuchModel as its text_encoder"),
        ({"text_encoder": ["somewhere", "Model"]}, "takes its text_encoder from 'somewhere'"),
        ({"scheduler": ["diffusers", "DDIMScheduler"]}, "names DDIMScheduler"),
        ({"tokenizer": ["transformers", "CLIPTokenizer"]}, "tokenizer"),
        ({"tokenizer": ["transformers", "CLIPModel"]}, "tokenizer"),
        ({"_class_name": 3}, "_class_name is 3"),
        ({"_class_name": ["QwenImagePipeline"]}, "_class_name is ['QwenImagePipeline']"),
        ({"_class_name": "StableDiffusion3Pipeline"}, "StableDiffusion3Pipeline takes CLIPTextModelWithProjection"),
    ],
)
def test_an_index_that_names_other_parts(folder, entries, says):
    if entries.get("text_encoder", [""])[0] == "somewhere":
        (folder / "text_encoder" / "diffusion_pytorch_model.bin").write_bytes(b"x")
    damage.edit_json(folder / "model_index.json", lambda index: index.update(entries))
    refused(load_model, folder, says)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ("DDIMScheduler", "model_index.json names DDIMScheduler as its scheduler"),
        ("FlowMatchHeunDiscreteScheduler", "takes FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_a_scheduler_of_another_kind(folder, scheduler, says):
    damage.edit_json(folder / "model_index.json", lambda index: index.update(scheduler=["diffusers", scheduler]))
    damage.edit_json(
        folder / "scheduler" / "scheduler_config.json", lambda config: config.update(_class_name=scheduler)
    )
    refused(load_model, folder, says)


@pytest.mark.parametrize("config", [{"shift": 0}, {"shift": -1}, {"shift": float("nan")}, {"invert_sigmas": True}])
def test_a_schedule_that_does_not_fall_to_zero(folder, config):
    damage.edit_json(folder / "scheduler" / "scheduler_config.json", lambda content: content.update(config))
    refused(load_model, folder, "scheduler_config.json do not fall from at most 1 to 0")


@pytest.mark.parametrize("config", [{"shift": "three"}, {"shift": None}, {"num_train_timesteps": 0}])
def test_a_schedule_that_cannot_be_made(folder, config):
    damage.edit_json(folder / "scheduler" / "scheduler_config.json", lambda content: content.update(config))
    refused(load_model, folder, "scheduler cannot be read as a FlowMatchEulerDiscreteScheduler")


def test_a_tokenizer_without_its_vocabulary(folder):
    file = folder / "tokenizer" / "tokenizer.json"
    damage.edit_json(file, lambda content: content["model"].update(vocab={}, merges=[]))
    refused(load_model, folder, "tokenizer has a vocabulary of 7 tokens and cannot tell texts apart", "tokenizer.json")
    file.unlink()
    refused(load_model, folder, "tokenizer has a vocabulary of 7 tokens and cannot tell texts apart", "vocab.json")


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2", "tokenizer_3"])
def test_every_tokenizer_of_sd3_is_asked(sd3_folder, part):
    (sd3_folder / part / "tokenizer.json").unlink()
    refused(load_model, sd3_folder, f"({part} has a vocabulary of")


def test_a_tokenizer_of_another_model(sd3_folder):
    shutil.rmtree(sd3_folder / "tokenizer_3")
    shutil.copytree(QWEN / "tokenizer", sd3_folder / "tokenizer_3")
    damage.edit_json(
        sd3_folder / "model_index.json", lambda i: i.update(tokenizer_3=["transformers", "Qwen2Tokenizer"])
    )
    refused(load_model, sd3_folder, "tokenizer_3 has tokens up to 379, its text encoder only 98")


def test_a_clip_tokenizer_that_has_lost_its_length(sd3_folder):
    file = sd3_folder / "tokenizer" / "tokenizer_config.json"
    damage.edit_json(file, lambda content: content.pop("model_max_length") and None)
    refused(load_model, sd3_folder, "the tokenizer's model_max_length and text_encoder's positions must agree")


# ---------------------------------------------------------------- parts that were not made for each other


def test_a_text_encoder_of_another_width(sd3_folder):
    shutil.rmtree(sd3_folder / "text_encoder")
    shutil.copytree(sd3_folder / "text_encoder_2", sd3_folder / "text_encoder")
    refused(load_model, sd3_folder, "pooled_projection_dim and both CLIPs' must agree and are 40 and 48")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("latents_std", [0.0] + [1.0] * 7, "latents_std holds what is not a finite number"),
        ("latents_mean", [float("nan")] * 8, "latents_mean holds what is not a finite number"),
        ("latents_mean", [0.0] * 7, "must agree and are 8 and 7"),
    ],
)
def test_a_vae_that_scales_latents_by_nothing(folder, name, value, says):
    damage.edit_json(folder / "vae" / "config.json", lambda config: config.update({name: value}))
    refused(load_model, folder, says)


@pytest.mark.parametrize(("name", "value"), [("scaling_factor", 0), ("shift_factor", None)])
def test_an_sd3_vae_without_its_factors(sd3_folder, name, value):
    damage.edit_json(sd3_folder / "vae" / "config.json", lambda config: config.update({name: value}))
    refused(load_model, sd3_folder, f"the vae's {name} holds what is not a finite number")


def test_t5_is_left_out_only_where_the_index_says_so(sd3_folder):
    file = sd3_folder / "model_index.json"
    whole = file.read_text()
    damage.edit_json(file, lambda index: index.update(text_encoder_3=[None, None], tokenizer_3=[None, None]))
    assert load_model(str(sd3_folder)).pipe.text_encoder_3 is None
    file.write_text(whole)
    damage.edit_json(file, lambda index: index.pop("text_encoder_3") and index.pop("tokenizer_3") and None)
    refused(load_model, sd3_folder, "model_index.json names no text_encoder_3, tokenizer_3")
    file.write_text(whole)
    damage.edit_json(file, lambda index: index.update(tokenizer_3=[None, None]))
    refused(load_model, sd3_folder, "model_index.json names no tokenizer_3")


# ---------------------------------------------------------------- where it is asked


def test_a_run_is_refused_before_prompts_and_rewards_are_read(folder, small_config):
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    damage.cut(damage.weights_of(folder, "text_encoder"))
    config = small_config(f"actor_rollout_ref.model.path={folder}", "data.train_files=/no/such/file.txt")
    with pytest.raises(UnsupportedModelError, match="text_encoder/model.safetensors is cut off"):
        FlowGRPOTrainer(config)


def test_the_vllm_omni_engine_is_not_started_on_a_damaged_model(folder, small_config, monkeypatch):
    """The trainer loads and checks every part before it starts an engine."""
    from flowgrpo_rc.rollout import vllm_omni
    from flowgrpo_rc.rollout.vllm_omni import versions
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    started = []
    monkeypatch.setattr(versions, "check_versions", lambda: None)
    monkeypatch.setattr(vllm_omni, "VllmOmniEngine", lambda *a, **k: started.append(a), raising=False)
    damage.drop_weight(folder, "text_encoder")
    config = small_config(f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.name=vllm_omni")
    with pytest.raises(UnsupportedModelError, match="text_encoder/model.safetensors .* 1 missing"):
        FlowGRPOTrainer(config)
    assert not started


def test_the_command_ends_with_exit_code_2(folder, tmp_path, capsys):
    from tests_support import overrides_of

    from flowgrpo_rc.cli.main import main

    damage.drop_weight(folder, "text_encoder")
    path = f"actor_rollout_ref.model.path={folder}"
    assert main(["demo", *overrides_of(tmp_path / "run", path)]) == 2
    error = capsys.readouterr().err
    assert "error: actor_rollout_ref.model.path" in error
    assert "Traceback" not in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_files_beside_those_of_a_tokenizer_are_not_read(folder):
    """macOS leaves ``._NAME`` beside every file on some disks, and anything may lie in a folder."""
    (folder / "tokenizer" / "._tokenizer.json").write_bytes(b"\x00\x05\x16\x07")
    (folder / "tokenizer" / "notes.json").write_text("[1]")
    load_model(str(folder))


def test_a_package_that_a_part_needs_is_asked_for(folder, monkeypatch):
    """No download repairs that it is missing."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def needs_scipy(*_, **__):
        raise ImportError("Make sure to install scipy if you want to use beta sigmas.")

    monkeypatch.setattr(FlowMatchEulerDiscreteScheduler, "from_pretrained", needs_scipy)
    with pytest.raises(UnsupportedModelError, match="needs a package that is not installed .*scipy.*; install it"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["transformer/config.json", "tokenizer/tokenizer_config.json"])
def test_a_byte_order_mark_is_refused_where_no_loader_reads_it(folder, name):
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    refused(check_pipeline, folder, f"{name} is not JSON: Unexpected UTF-8 BOM")


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("transformer", lambda c: c.update(axes_dims_rope=[8, 12, 14]), "the transformer fails at its first image"),
        (
            "text_encoder",
            lambda c: c["text_config"].update(num_attention_heads=4, num_key_value_heads=4),
            "a text_encoder fails at its first prompt",
        ),
    ],
)
def test_a_network_that_stops_at_its_first_input(folder, part, change, says):
    """All weights have their shapes, so that nothing shows it before."""
    damage.edit_json(folder / part / "config.json", change)
    refused(load_model, folder, says, "config.json")
