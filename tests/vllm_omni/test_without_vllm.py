"""The parts of the vllm_omni engine that need no vllm; they run in the ordinary environment too."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from engine_pair import request_for
from tiny_families import stable_diffusion_3

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout import EngineLostError, RolloutError, Trajectories
from flowgrpo_rc.rollout.build import build_engine_alone
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.vllm_omni import engine, plugin, registry
from flowgrpo_rc.rollout.vllm_omni.adapter import as_held, engine_module, pairs, unpaired
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES


def test_an_adapter_is_pairs_and_half_a_pair_does_not_bind():
    state = {f"{layer}.lora_{matrix}.default.weight": torch.zeros(1) for layer in ("to_q", "ff.0") for matrix in "AB"}
    assert unpaired(pairs(state)).keys() == state.keys()
    with pytest.raises(AdapterMismatchError, match="does not bind: ff.0.lora_A.default.weight is missing"):
        pairs({name: tensor for name, tensor in state.items() if name != "ff.0.lora_A.default.weight"})


def test_held_values_are_rounded_then_scaled_and_the_trainers_left_alone():
    """bfloat16 has 8 significant bits: 1.01 -> 1.0078125; times 1.5 -> 1.51171875, rounded to 1.515625 (even)."""
    state = {"m.lora_A.default.weight": torch.tensor([[1.01]]), "m.lora_B.default.weight": torch.tensor([[1.01]])}
    held = as_held(state, torch.bfloat16, 1.5)
    assert held["m.lora_A.default.weight"].item() == 1.0078125
    assert held["m.lora_B.default.weight"].item() == 1.515625
    assert all(t.item() == torch.tensor(1.01).item() for t in state.values())


@pytest.mark.parametrize(
    ("name", "present", "expected"),
    [
        ("transformer_blocks.0.attn.to_out.0", (), "transformer_blocks.0.attn.to_out"),
        ("a.attn.to_out.0", ("a.attn.to_out.0",), "a.attn.to_out.0"),
        ("transformer_blocks.0.attn.to_add_out", (), "transformer_blocks.0.attn.to_add_out"),
        ("blocks.0.ffn.net.0.proj", (), "blocks.0.ffn.net_0.proj"),
        ("blocks.0.ffn.net.2", ("blocks.0.ffn.net.2",), "blocks.0.ffn.net.2"),
        ("transformer_blocks.0.img_mod.0", (), "transformer_blocks.0.img_mod.0"),
    ],
)
def test_names_in_vllm_omni(name, present, expected):
    assert engine_module(name, present) == expected


def test_plugin_is_inert_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert plugin.register() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert plugin.register() == "flowgrpo_rc.rollout.vllm_omni.platform.CpuOmniPlatform"


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"vllm": "0.30.0+cpu", "vllm-omni": "0.30.0", "diffusers": "0.40.1"}, None),
        ({"vllm": "0.29.1", "vllm-omni": "0.30.0", "diffusers": "0.40.0"}, "vllm is 0.29.1"),
        ({"vllm": "0.30.0", "vllm-omni": "0.28.0", "diffusers": "0.38.0"}, "vllm-omni is 0.28.0, diffusers is 0.38.0"),
        ({"diffusers": "0.40.0"}, "vllm is not installed, vllm-omni is not installed"),
    ],
)
def test_other_versions_are_an_import_error_with_the_working_set(monkeypatch, installed, says):
    def version(package):
        if package not in installed:
            raise registry.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(registry, "version", version)
    if says is None:
        registry.check_versions()
        return
    with pytest.raises(ImportError, match=rf"works with vllm 0.30.*, vllm-omni 0.30.*, diffusers 0.40.*; {says}"):
        registry.check_versions()


@pytest.mark.process
def test_the_trainers_side_imports_no_vllm():
    code = (
        "import sys, flowgrpo_rc.rollout.vllm_omni.engine, flowgrpo_rc.rollout.vllm_omni.server; "
        "print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def make_handle(monkeypatch):
    """``make(model, **settings of the model)``: a handle whose process is not started, without vllm."""
    monkeypatch.setattr(engine, "check_versions", lambda: None)
    rollout = RolloutConfig(name="vllm_omni", dtype="float32", micro_batch_size=2)

    def make(model, devices=("cpu",), **settings):
        return engine.VllmOmniHandle(rollout, model, ModelConfig(**settings), devices)

    return make


def test_pipelines_layers_and_devices_are_refused_before_anything_is_started(
    make_handle, tiny_model, tiny_sd3_model, tmp_path, monkeypatch
):
    """vllm-omni's own refusals come after minutes, of layers with the first push only."""
    assert make_handle(tiny_sd3_model, target_modules=["to_q", "ff.net.2"]).name == "vllm_omni 0 (cpu)"
    with pytest.raises(ValueError, match="target_modules: time_text_embed.timestep_embedder.linear_1 can have no"):
        make_handle(tiny_sd3_model, target_modules="all-linear")
    with pytest.raises(ValueError, match=r"rollout.devices: got cpu\+cpu; .* so name cpu by itself"):
        make_handle(tiny_model, devices=("cpu", "cpu"))
    stable_diffusion_3.build(t5=False).save_pretrained(tmp_path)
    without_t5 = load_model(str(tmp_path))
    with pytest.raises(ValueError, match="vllm_omni loads text_encoder_3, which this model was saved without"):
        make_handle(without_t5)
    parts = {**tiny_model.pipe.components, "vae_scale_factor": tiny_model.pipe.vae_scale_factor}
    monkeypatch.setattr(tiny_model, "pipe", SimpleNamespace(**parts))
    with pytest.raises(ValueError, match=f"draws {', '.join(PIPELINES)} only so far, got SimpleNamespace"):
        make_handle(tiny_model)


class Losing:
    """A handle whose calls are lost ``losses`` times, and which notes them."""

    def __init__(self, *arguments, **_):
        self.arguments = arguments
        self.losses = 0
        self.calls = []

    def start(self):
        self.calls.append("start")

    def sync(self, state, version):
        return self._call(f"sync {version}", f"digest {version}")

    def generate(self, request):
        return self._call("generate", object.__new__(Trajectories))

    def _call(self, name, answer):
        self.calls.append(name)
        if self.losses:
            self.losses -= 1
            raise EngineLostError("killed")
        return answer


def test_an_engine_alone_reads_no_weights(monkeypatch):
    """They are read once, by the process below."""
    monkeypatch.setattr(engine, "VllmOmniHandle", Losing)
    lora = ModelConfig(path="asset:tiny_qwen_image", batch_guidance=False)
    built = build_engine_alone(RolloutConfig(name="vllm_omni"), lora, "cpu")
    _, model, _, devices = built._handle.arguments
    assert all(p.is_meta for p in model.transformer.parameters())
    assert devices == ["cpu"]
    assert not model.batch_guidance
    assert built._handle.calls == ["start"]


def test_a_lost_process_is_started_once_a_call_and_gets_its_adapter_again(monkeypatch, tiny_model):
    monkeypatch.setattr(engine, "VllmOmniHandle", Losing)
    made = engine.VllmOmniEngine(RolloutConfig(name="vllm_omni"), tiny_model, ModelConfig(), "cpu")
    calls = made._handle.calls
    assert made.sync({"a": torch.zeros(1)}, 4) == "digest 4"
    made._handle.losses = 1
    with pytest.warns(UserWarning, match="killed; starting it anew"):
        made.generate(request_for(tiny_model))
    assert calls == ["start", "sync 4", "generate", "start", "sync 4", "generate"]
    assert made.restarts == 1
    made._handle.losses = 1
    with pytest.warns(UserWarning, match="killed; starting it anew"):
        assert made.sync({"a": torch.ones(1)}, 5) == "digest 5"
    assert calls[6:] == ["sync 5", "start", "sync 4", "sync 5"]
    made._handle.losses = 3
    with pytest.warns(UserWarning, match="starting it anew"), pytest.raises(RolloutError, match="^killed$"):
        made.generate(request_for(tiny_model))
