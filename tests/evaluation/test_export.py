"""``flowgrpo-rc export-lora``: every other program reads the change that was trained."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import TINY
from torch.testing import assert_close

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.evaluation.export_names import formats_of
from flowgrpo_rc.models import Conditioning, ModelConfig
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora, linear_layers, save_lora
from flowgrpo_rc.models.prompts import pad
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.planner import pipeline

FILE = "pytorch_lora_weights.safetensors"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
PREFIX = {"comfyui": "diffusion_model.", "kohya": "lora_unet_"}
# Families whose models in other programs have the layers of the original release -> diffusers' converter of that.
ORIGINAL = {
    **dict.fromkeys(("flux_dev", "flux_schnell", "flux_kontext"), "flux"),
    **dict.fromkeys(("flux2_klein", "flux2_dev"), "flux2"),
    **dict.fromkeys(("wan", "wan_ti2v"), "wan"),
    **{"chroma": "chroma", "stable_diffusion_3": "sd3", "z_image": "z_image"},
    **{"lumina2": "lumina2", "aura_flow": "auraflow"},
}
# Families whose models have the layers of diffusers there.
QWEN = ["qwen_image_edit", "qwen_image_edit_plus", "qwen_image_edit_plus_2511"]
NAMELESS = ["bria", "cogview4", "sana"]


class Release(dict):
    """Weights of an original release. Biases and norms, which have no LoRA, are numbers of no meaning."""

    def pop(self, name, *default):
        return super().pop(name) if name in self else torch.zeros(224)


@pytest.fixture(scope="module", autouse=True)
def pipelines_are_built_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "FakePipeline", cache(pipeline.FakePipeline))
        yield


@pytest.fixture
def in_diffusers_names(monkeypatch):
    """``in_diffusers_names(family, changes)``: changes of a release's layers, by diffusers' names."""
    from diffusers.loaders import single_file_utils

    def convert(family, changes):
        name = ORIGINAL[family]
        starts = (f"convert_{name}_transformer", f"convert_{name}_to_diffusers")
        convert = next(value for key, value in vars(single_file_utils).items() if key.startswith(starts))
        # The converters of these releases know the released sizes alone.
        sizes = {"lumina2": (24, 12, 12), "flux": (32, 32, 32, 128), "chroma": (32, 32, 32, 128)}.get(name)
        split = torch.split
        monkeypatch.setattr(torch, "split", lambda tensor, given, dim=0: split(tensor, sizes or given, dim))
        found = convert(Release({f"{layer}.weight": change for layer, change in changes.items()}))
        monkeypatch.undo()
        return {name.removesuffix(".weight"): change for name, change in found.items() if change.ndim == 2}

    return convert


def changes_of(file, prefix):
    """ComfyUI's rule (``comfy/weight_adapter/lora.py``: ``load``, ``calculate_weight``) and kohya's (``merge_to_model``
    and its like): ``alpha / rank`` times up times down, the rank that of the down matrix."""
    lora = load_file(file)
    names = [name.removesuffix(".alpha") for name in lora if name.endswith(".alpha")]
    assert lora.keys() == {f"{n}.{end}" for n in names for end in ("alpha", "lora_up.weight", "lora_down.weight")}
    changes = {}
    for name in names:
        up, down = lora[f"{name}.lora_up.weight"], lora[f"{name}.lora_down.weight"]
        assert name.startswith(prefix)
        changes[name.removeprefix(prefix)] = lora[f"{name}.alpha"].item() / down.shape[0] * up @ down
    return changes


@pytest.fixture
def trained(folder_of_family, tmp_path):
    """``trained(family)``: its model with a random LoRA in every linear layer, the LoRA's folder, and its changes."""

    def build(family):
        TINY[family].before_loading()
        pipe = TINY[family].build()
        model = resolve_name(FAMILIES[type(pipe).__name__].adapter)(pipe)
        config = ModelConfig(lora_rank=4, lora_alpha=8, target_modules="all-linear")
        attach_lora(model.transformer, model, config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        for parameter in adapter_parameters(model.transformer).values():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        save_lora(model, model.transformer, tmp_path / "lora")
        weights = load_file(tmp_path / "lora" / FILE)
        changes = {
            name: 2.0 * weights[f"transformer.{name}.lora_B.weight"] @ weights[f"transformer.{name}.lora_A.weight"]
            for name in linear_layers(model.transformer)
        }
        return model, tmp_path / "lora", changes

    return build


def export(lora, form, *options):
    """Export and return the file or folder, which stands beside the LoRA's."""
    assert main(["export-lora", str(lora), "--format", form, *map(str, options)]) == 0
    return lora.with_name(f"{lora.name}_{form}{'' if form == 'merged' else '.safetensors'}")


def drop(weights, *names):
    """Take layers out of a LoRA's weights."""
    for name in names:
        del weights[f"transformer.{name}.lora_A.weight"], weights[f"transformer.{name}.lora_B.weight"]


def rewrite(lora, change, **settings):
    """Change the weights or the settings in a LoRA's file."""
    weights = load_file(lora / FILE)
    change(weights)
    settings = {f"transformer.{key}": value for key, value in ({"r": 4, "lora_alpha": 8} | settings).items()}
    save_file(weights, lora / FILE, {"lora_adapter_metadata": json.dumps(settings)})


@pytest.mark.parametrize("family", [*ORIGINAL, *QWEN])
def test_comfyui_and_kohya_read_the_trained_change(family, trained, folder_of_family, in_diffusers_names):
    """Whole, and with parts of the stacked layers that have no LoRA."""
    model, lora, changes = trained(family)
    forms = [form for form in PREFIX if form in formats_of(type(model.pipe).__name__)]
    for without in ((), ("to_q", "add_v_proj", "proj_mlp")):
        untrained = [name for name in changes if name.endswith(without)]
        rewrite(lora, lambda weights, names=untrained: drop(weights, *names))
        expected = {name: change * (name not in untrained) for name, change in changes.items()}
        files = {}
        for form in forms:
            export(lora, form, "--model", folder_of_family(family), "--out", lora.parent / form)
            files[form] = changes_of(lora.parent / form, PREFIX[form])
        found = files["comfyui"]
        if "kohya" in files:
            theirs = expected if family == "z_image" else found
            flat = {name.replace(".", "_"): change for name, change in theirs.items() if name not in untrained}
            assert_close(files["kohya"], flat, **CLOSE)
        if family in ORIGINAL:
            found = in_diffusers_names(family, found)
        for name, change in expected.items():
            # A layer that the file does not have is not changed.
            assert_close(found.get(name, torch.zeros_like(change)), change, **CLOSE)


@pytest.mark.parametrize("family", [*ORIGINAL, *QWEN, *NAMELESS])
def test_diffusers_and_the_merged_transformer_draw_what_was_trained(family, trained, folder_of_family):
    model, lora, changes = trained(family)
    assert ("comfyui" in formats_of(type(model.pipe).__name__)) == (family not in NAMELESS)
    weights = load_file(export(lora, "diffusers"))
    for name, change in changes.items():
        up, down = weights.pop(f"transformer.{name}.lora_B.weight"), weights.pop(f"transformer.{name}.lora_A.weight")
        assert_close(up @ down, change, **CLOSE)
    assert not weights
    merged = type(model.transformer).from_pretrained(export(lora, "merged", "--model", folder_of_family(family)))
    for name, layer in linear_layers(merged).items():
        base = model.transformer.get_submodule(name).base_layer
        assert_close(layer.weight, base.weight + changes[name], **CLOSE)
    size = model.smallest_image
    guidance = 1.0 if merged.config.get("guidance_embeds") else None
    conditioning = Conditioning(pad([model.blank_prompt()]), None, 1.0, guidance, size, size)
    latents = torch.randn(1, *model.latent_shape(size, size), generator=torch.Generator().manual_seed(0))
    times = torch.full((1,), 500.0)
    with torch.no_grad():
        drawn, expected = (model.velocity(net, latents, times, conditioning) for net in (merged, model.transformer))
    assert_close(drawn, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_a_run_exports_its_final_lora_or_its_average(trained, capsys):
    """The model is the one that the run's configuration names. The merged one has its shards and its precision."""
    _, lora, changes = trained("flux_dev")
    run = lora.parent
    shutil.copytree(lora, run / "lora_ema")
    rewrite(run / "lora_ema", lambda weights: weights.update({n: 2 * v for n, v in weights.items() if "lora_B" in n}))
    base = TINY["flux_dev"].build()
    base.transformer.to(torch.bfloat16)
    base.save_pretrained(run / "model", variant="fp16", max_shard_size="50KB")
    (run / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": {"path": str(run / "model")}}}))
    for options in (["comfyui", "--dtype=bfloat16"], ["kohya", "--average"], ["merged"]):
        assert main(["export-lora", str(run), "--format", *options]) == 0
    assert f"Written: {run / 'lora_ema_kohya.safetensors'} (30 layers)\n" in capsys.readouterr().out
    final, average = load_file(run / "lora_comfyui.safetensors"), load_file(run / "lora_ema_kohya.safetensors")
    half = average["lora_unet_img_in.lora_up.weight"] / 2
    assert torch.equal(final["diffusion_model.img_in.lora_up.weight"], half.bfloat16())
    assert len(list((run / "lora_merged").glob("*.safetensors"))) > 2
    merged = type(base.transformer).from_pretrained(run / "lora_merged", torch_dtype=torch.bfloat16)
    for name, layer in linear_layers(base.transformer).items():
        assert_close(merged.get_submodule(name).weight, (layer.weight.float() + changes[name]).bfloat16())


def poison(weights):
    weights["transformer.proj_out.lora_B.weight"][0, 0] = torch.nan


def misshape(weights):
    weights["transformer.proj_out.lora_B.weight"] = torch.zeros(5, 4)


def halve(weights):
    del weights["transformer.proj_out.lora_B.weight"]


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        (["diffusers"], poison, "holds values that are NaN, infinite or no floats, first in transformer."),
        (["diffusers"], halve, "has transformer.proj_out.lora_A.weight; give a LoRA of a transformer alone"),
        (["diffusers"], {"alpha_pattern": {"proj_out": 2}}, "has alpha_pattern; give a LoRA of a transformer alone"),
        (["diffusers", "--average"], None, "holds no lora_ema/; train with actor.ema_decay for one"),
        (["diffusers", "--out={folder}"], None, "is there already; move it away, or name another with --out"),
        (["diffusers", "--dtype=float16"], {"lora_alpha": 1e9}, "has numbers that float16 does not hold; take another"),
        (["comfyui"], None, "belongs to no run with a config.yaml; name the LoRA's model with --model"),
        (["comfyui", "--model=nowhere"], None, "nowhere is no folder of a pipeline here"),
        (
            ["comfyui", "--model={sana}"],
            None,
            "comfyui has no names for a SanaPipeline; its formats: diffusers, merged",
        ),
        (["kohya", "--model={flux_dev}"], None, "32x32, there it is missing; name its own with --model"),
        (["merged", "--model={sana}"], misshape, "its layer proj_out is 5x32, there it is 8x32; name its own"),
    ],
)
def test_what_is_refused(options, change, says, trained, folder_of_family, tmp_path, capsys):
    _, lora, _ = trained("sana")
    if callable(change):
        rewrite(lora, change)
    elif change:
        rewrite(lora, dict, **change)
    paths = {"folder": str(tmp_path), "sana": folder_of_family("sana"), "flux_dev": folder_of_family("flux_dev")}
    before = sorted(tmp_path.rglob("*"))
    assert main(["export-lora", str(lora), "--format", *(option.format(**paths) for option in options)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert says in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_there_is_kept_unless_it_is_named(trained, capsys):
    _, lora, _ = trained("sana")
    file = export(lora, "diffusers")
    file.write_bytes(b"kept")
    for folder, says in ((lora, "is there already"), (lora.parent, "holds no pytorch_lora_weights.safetensors")):
        assert main(["export-lora", str(folder), "--format=diffusers"]) == 2
        assert says in capsys.readouterr().err
    assert file.read_bytes() == b"kept"
    export(lora, "diffusers", "--out", file)
    assert len(load_file(file)) > 0


def test_diffusers_pipeline_reads_the_file(trained, tmp_path):
    """``load_lora_weights`` of a fresh pipeline: the same weights as the trained adapter's."""
    _, lora, changes = trained("flux_dev")
    pipe = TINY["flux_dev"].build()
    pipe.load_lora_weights(str(tmp_path), weight_name=export(lora, "diffusers").name)
    pipe.fuse_lora()
    base = TINY["flux_dev"].build().transformer
    for name, change in changes.items():
        weight = pipe.transformer.get_submodule(name).base_layer.weight
        assert_close(weight, base.get_submodule(name).weight + change, **CLOSE)


def test_the_documented_formats_are_those_that_exist():
    page = (Path(__file__).parents[2] / "docs/howto/export.md").read_text()
    documented = {name: re.findall("yes|no", cells) for name, cells in re.findall(r"\| `(\w+Pipeline)` (.+)", page)}
    formats = ("diffusers", "comfyui", "kohya", "merged")
    assert documented == {n: ["yes" if form in formats_of(n) else "no" for form in formats] for n in FAMILIES}
