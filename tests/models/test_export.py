"""``flowgrpo-rc export-lora``: every other program reads the change that was trained."""

import json
import shutil
from pkgutil import resolve_name

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import TINY
from torch.testing import assert_close

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.models import Conditioning, ModelConfig
from flowgrpo_rc.models.export_names import formats_of
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora, base_parameters, linear_layers, save_lora
from flowgrpo_rc.models.prompts import pad
from flowgrpo_rc.models.registry import FAMILIES

FILE = "pytorch_lora_weights.safetensors"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# Programs whose models have the layers of the original release: diffusers' converter of that release -> tiny families.
CONVERTERS = {
    "flux": ["flux_dev", "flux_schnell", "flux_kontext"],
    "flux2": ["flux2_klein", "flux2_dev"],
    "chroma": ["chroma"],
    "sd3": ["stable_diffusion_3"],
    "z_image": ["z_image"],
    "lumina2": ["lumina2"],
    "auraflow": ["aura_flow"],
    "wan": ["wan", "wan_ti2v"],
}
ORIGINAL = {family: converter for converter, families in CONVERTERS.items() for family in families}
# Programs whose models have the layers of diffusers.
PREFIX = {"comfyui": "diffusion_model.", "kohya": "lora_unet_"}
QWEN = ["qwen_image_edit", "qwen_image_edit_plus", "qwen_image_edit_plus_2511"]
NAMELESS = ["bria", "cogview4", "sana"]


class Release(dict):
    """Weights of an original release. Biases and norms, which have no LoRA, are numbers of no meaning."""

    def pop(self, name, *default):
        return super().pop(name) if name in self else torch.zeros(224)


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
        return {name.removesuffix(".weight"): change for name, change in found.items() if name.endswith(".weight")}

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
    assert main(["export-lora", str(lora), "--format", form, *map(str, options)]) == 0
    return lora.parent / f"lora_{form}{'' if form == 'merged' else '.safetensors'}"


def forget(lora, *endings):
    """Leave the layers with these endings out of a LoRA's file."""
    weights = load_file(lora / FILE)
    settings = {"transformer.r": 4, "transformer.lora_alpha": 8}
    kept = {n: v for n, v in weights.items() if not n.split(".lora_")[0].endswith(endings)}
    save_file(kept, lora / FILE, {"lora_adapter_metadata": json.dumps(settings)})


@pytest.mark.parametrize("family", [*ORIGINAL, *QWEN])
def test_comfyui_and_kohya_read_the_trained_change(family, trained, folder_of_family, in_diffusers_names):
    model, lora, changes = trained(family)
    base = folder_of_family(family)
    forms = [form for form in ("comfyui", "kohya") if form in formats_of(type(model.pipe).__name__)]
    files = {form: changes_of(export(lora, form, "--model", base), PREFIX[form]) for form in forms}
    found = files["comfyui"]
    if "kohya" in files:
        theirs = changes if family == "z_image" else found
        assert files["kohya"].keys() == {name.replace(".", "_") for name in theirs}
        for name, change in theirs.items():
            assert_close(files["kohya"][name.replace(".", "_")], change, **CLOSE)
    if family in ORIGINAL:
        found = in_diffusers_names(family, found)
    assert changes.keys() <= found.keys()
    for name, change in changes.items():
        assert_close(found[name], change, **CLOSE)
