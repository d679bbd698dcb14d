"""The section ``actor_rollout_ref.model``: targets and paths, and the LoRA that a run starts from."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowgrpo_rc.models import AdapterMismatchError, ModelConfig, check_adapter_file
from flowgrpo_rc.models import quantization as module
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.models.lora import ADAPTER_FILE, METADATA_KEY, attach_lora, load_lora, save_lora
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.trainer import FlowGRPOTrainer, setup

NAMELESS = ([1, 2], [None], [], "", " ", ["to_q", ""], ["to_q", 3], [["to_q"]], {"a": 1}, 3, True, 1.5, [True])
MISSPELLED = ("All-Linear", "ALL_LINEAR", "all_linear", ["all-linear", "to_q"], [" all-linear"])


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        *((targets, "give a non-empty list") for targets in NAMELESS),
        *((targets, "write all-linear alone and in this spelling") for targets in MISSPELLED),
        *((targets, r"several names are a list: \[to_q,to_k\]") for targets in ("to_q,to_k", ["to_q, to_k"])),
    ],
)
def test_targets_that_are_no_names(targets, says):
    got = re.escape(f"actor_rollout_ref.model.target_modules: got {targets!r}; ")
    with pytest.raises(ValueError, match=f"{got}.*{says}"):
        ModelConfig(target_modules=targets)
    for fine in ("all-linear", ["all-linear"]):
        ModelConfig(target_modules=fine)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ("norm_q", r"norm_q match no linear layer \(norm_q is a RMSNorm; only linear layers take a LoRA here\)"),
        (["to_q", "img_mlp"], r"img_mlp match no linear layer \(img_mlp is a FeedForward"),
        (["to_Q"], "to_Q match no linear layer; its layers end in: .*to_q"),
        ("to_.*", r"to_\.\* match no linear layer; its layers end in"),
        (["transformer_blocks"], "transformer_blocks is a ModuleList"),
    ],
)
def test_targets_that_the_model_has_no_linear_layer_for(tiny_model, targets, says):
    with pytest.raises(ValueError, match=says):
        attach_lora(tiny_model.transformer, tiny_model, ModelConfig(target_modules=targets), dtype=torch.float32)


@pytest.fixture
def adapter(tiny_model, tmp_path):
    """A LoRA of rank 4 and alpha 12 in a folder."""
    attach_lora(tiny_model.transformer, tiny_model, ModelConfig(lora_rank=4, lora_alpha=12), dtype=torch.float32)
    save_lora(tiny_model, tiny_model.transformer, tmp_path / "lora")
    return tmp_path / "lora"


def test_a_starting_lora_is_checked_by_its_header(adapter):
    check_adapter_file(str(adapter), 4, 12)
    with pytest.raises(AdapterMismatchError, match=r"has rank 4, actor_rollout_ref\.model\.lora_rank is 8"):
        check_adapter_file(str(adapter), 8, 12)
    with pytest.raises(AdapterMismatchError, match=r"has lora_alpha 12, actor_rollout_ref\.model\.lora_alpha is 8"):
        check_adapter_file(str(adapter), 4, 8)


@pytest.mark.parametrize("odd", [{"use_rslora": True}, {"alpha_pattern": {"to_q": 16}}, {"rank_pattern": {"to_q": 8}}])
def test_a_lora_with_several_scales_is_refused(tiny_model, adapter, odd):
    """By ``lora_alpha / r`` alone it would start at another strength."""
    file = adapter / ADAPTER_FILE
    with safe_open(file, "pt") as content:
        settings = json.loads(content.metadata()[METADATA_KEY])
    settings |= {f"transformer.{name}": value for name, value in odd.items()}
    save_file(load_file(file), file, {"format": "pt", METADATA_KEY: json.dumps(settings)})
    says = f"has {next(iter(odd))}, by which its layers have other scales"
    with pytest.raises(AdapterMismatchError, match=f"lora_adapter_path: .*{says}"):
        check_adapter_file(str(adapter), 4, 12)
    with pytest.raises(AdapterMismatchError, match=says):
        load_lora(tiny_model.transformer, adapter)


def test_the_home_folder_is_known(adapter, monkeypatch):
    monkeypatch.setenv("HOME", str(adapter.parent))
    check_adapter_file("~/lora", 4, 12)
    assert resolve_asset("~/lora") == str(adapter)


def test_a_starting_lora_that_is_damaged_or_not_there(adapter, tmp_path):
    field = r"actor_rollout_ref\.model\.lora_adapter_path: "
    with pytest.raises(AdapterMismatchError, match=f"{field}.*gone is no folder; give the one that holds"):
        check_adapter_file(str(tmp_path / "gone"), 4, 12)
    with pytest.raises(AdapterMismatchError, match=f"{field}.* is no folder"):
        check_adapter_file(str(adapter / ADAPTER_FILE), 4, 12)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(AdapterMismatchError, match=f"{field}.*empty holds no {ADAPTER_FILE}"):
        check_adapter_file(str(empty), 4, 12)
    content = (adapter / ADAPTER_FILE).read_bytes()
    for part in (content[:-5], content[:100], b"", b"\xff" * 64):
        (adapter / ADAPTER_FILE).write_bytes(part)
        with pytest.raises(AdapterMismatchError, match=f"{field}.*{ADAPTER_FILE} cannot be read"):
            check_adapter_file(str(adapter), 4, 12)


@pytest.mark.parametrize(("quantization", "library"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_package_that_is_missing_is_named_before_the_model_is_read(monkeypatch, quantization, library):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"quantization: got {quantization}, which needs {library}, .* pip install"):
        PipelineLoader("asset:tiny_qwen_image", dtype="bfloat16", quantization=quantization)


def test_an_engines_packages_are_asked_for_before_the_model_is_read(monkeypatch, small_config):
    """Rounding that no kernel computes needs none."""
    config = small_config("actor_rollout_ref.rollout.quantization=int8")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(setup, "_check_attention", None)
    with pytest.raises(ValueError, match="rollout.quantization: got int8, which needs torchao, .* or set it to null"):
        FlowGRPOTrainer(config)
    module.check_packages(engine="fp8_emulated")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.actor.optim.name=adamw_8bit", "optim.name: got adamw_8bit, .* or set it to adamw"),
        (
            "actor_rollout_ref.model.quantization=fp8",
            "model.quantization: got fp8, which needs torchao, .* to null",
        ),
    ],
)
def test_a_run_asks_for_packages_before_it_reads_anything(monkeypatch, small_config, setting, message):
    config = small_config("actor_rollout_ref.model.dtype=bfloat16", setting)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(setup, "check_pipeline", None)
    with pytest.raises(ValueError, match=message):
        FlowGRPOTrainer(config)
