"""The parts of the vllm_omni engine that need no vllm; they run in the ordinary environment too."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state, attach_lora, check_adapter_state
from flowgrpo_rc.rollout.vllm_omni import plugin, versions
from flowgrpo_rc.rollout.vllm_omni.adapter import as_held, engine_module, expected_shapes, pairs, unpaired
from flowgrpo_rc.rollout.vllm_omni.process import engine_environment


@pytest.mark.parametrize("targets", [None, ["to_q", "to_out.0"], "all-linear"])
@pytest.mark.parametrize("attached_first", [False, True])
def test_expected_shapes_are_the_actors_adapter(tiny_model, targets, attached_first):
    config = ModelConfig(lora_rank=4, lora_alpha=8, target_modules=targets)
    before = expected_shapes(tiny_model, config)
    attach_lora(tiny_model.transformer, tiny_model, config, dtype=torch.float32)
    expected = expected_shapes(tiny_model, config) if attached_first else before
    state = adapter_state(tiny_model.transformer)
    assert expected == {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_adapter_state(state, expected)
    assert unpaired(pairs(state)).keys() == state.keys()


def test_an_adapter_that_does_not_bind_names_what_differs():
    expected = {"a.to_q.lora_A.default.weight": (2, 8), "a.to_q.lora_B.default.weight": (8, 2)}
    state = {name: torch.zeros(shape) for name, shape in expected.items()}
    dropped = "a.to_q.lora_B.default.weight"
    with pytest.raises(AdapterMismatchError, match=rf"1 of 2 weights missing \(first: {dropped}\)"):
        check_adapter_state({n: t for n, t in state.items() if n != dropped}, expected)
    with pytest.raises(AdapterMismatchError, match=r"lora_B.default.weight is \(8, 3\), expected \(8, 2\)"):
        check_adapter_state({**state, dropped: torch.zeros(8, 3)}, expected)


def test_held_values_are_rounded_then_scaled_and_the_trainers_left_alone():
    """bfloat16 has 8 significant bits: 1.01 -> 1.0078125; times 1.5 -> 1.51171875, rounded to 1.515625 (even)."""
    state = {"m.lora_A.default.weight": torch.tensor([[1.01]]), "m.lora_B.default.weight": torch.tensor([[1.01]])}
    held = as_held(state, torch.bfloat16, 1.5)
    assert held["m.lora_A.default.weight"].item() == 1.0078125
    assert held["m.lora_B.default.weight"].item() == 1.515625
    assert all(t.item() == torch.tensor(1.01).item() for t in state.values())


def test_names_in_vllm_omni():
    assert engine_module("transformer_blocks.0.attn.to_out.0") == "transformer_blocks.0.attn.to_out"
    assert engine_module("transformer_blocks.0.attn.to_add_out") == "transformer_blocks.0.attn.to_add_out"
    assert engine_module("transformer_blocks.0.img_mod.1") == "transformer_blocks.0.img_mod.1"


def test_plugin_is_inert_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert plugin.register() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert plugin.register() == "flowgrpo_rc.rollout.vllm_omni.platform.CpuOmniPlatform"


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"vllm": "0.29.1", "vllm-omni": "0.30.0", "diffusers": "0.40.0"}, "vllm is 0.29.1"),
        ({"vllm": "0.30.0", "vllm-omni": "0.28.0", "diffusers": "0.38.0"}, "vllm-omni is 0.28.0, diffusers is 0.38.0"),
        ({"diffusers": "0.40.0"}, "vllm is not installed, vllm-omni is not installed"),
    ],
)
def test_other_versions_are_an_import_error_with_the_working_set(monkeypatch, installed, says):
    def version(package):
        if package not in installed:
            raise versions.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError, match=rf"works with vllm 0.30.*, vllm-omni 0.30.*, diffusers 0.40.*; {says}"):
        versions.check_versions()


def test_the_working_set_passes(monkeypatch):
    installed = {"vllm": "0.30.0+cpu", "vllm-omni": "0.30.0", "diffusers": "0.40.1"}
    monkeypatch.setattr(versions, "version", installed.__getitem__)
    versions.check_versions()


def test_the_engines_environment_has_no_process_group_and_one_gpu(monkeypatch):
    for name, value in {
        "RANK": "1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "4,6",
    }.items():
        monkeypatch.setenv(name, value)
    environment = engine_environment("cuda:1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert engine_environment("cpu")["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_the_trainers_side_imports_no_vllm():
    code = (
        "import sys, flowgrpo_rc.rollout.vllm_omni.engine; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_qwen_image_so_far(tiny_model, monkeypatch):
    from flowgrpo_rc.rollout.vllm_omni import VllmOmniEngine, engine

    monkeypatch.setattr(engine, "check_versions", lambda: None)
    monkeypatch.setattr(tiny_model, "pipe", SimpleNamespace(transformer=None))
    with pytest.raises(ValueError, match="vllm_omni draws Qwen-Image only so far"):
        VllmOmniEngine(tiny_model, ModelConfig(), dtype=torch.float32, micro_batch_size=2, device="cpu")
