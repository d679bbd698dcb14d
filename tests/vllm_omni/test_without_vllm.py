"""The parts of the vllm_omni engine that need no vllm; they run in the ordinary environment too."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_pair import request_for
from tiny_families import stable_diffusion_3 as tiny_sd3

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state, attach_lora, check_adapter_state
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.rollout import EngineLostError, RolloutError, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.vllm_omni import plain_torch, plugin, versions
from flowgrpo_rc.rollout.vllm_omni.adapter import as_held, engine_module, expected_shapes, pairs, unpaired
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES


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
    assert engine_module("transformer_blocks.0.attn.to_out.0", ()) == "transformer_blocks.0.attn.to_out"
    assert engine_module("a.attn.to_out.0", ("a.attn.to_out.0",)) == "a.attn.to_out.0"
    assert engine_module("transformer_blocks.0.attn.to_add_out", ()) == "transformer_blocks.0.attn.to_add_out"
    assert engine_module("blocks.0.ffn.net.0.proj", ()) == "blocks.0.ffn.net_0.proj"
    assert engine_module("blocks.0.ffn.net.2", ("blocks.0.ffn.net.2",)) == "blocks.0.ffn.net.2"
    assert engine_module("transformer_blocks.0.img_mod.0", ()) == "transformer_blocks.0.img_mod.0"


def test_plugin_is_inert_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert plugin.register() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert plugin.register() == "flowgrpo_rc.rollout.vllm_omni.platform.CpuOmniPlatform"


NO_KERNEL = "'_OpNamespace' '_C' object has no attribute 'convert_weight_packed'"
"""What torch says on a processor with AMX when vllm was built without kernels."""


@pytest.fixture
def vllm_choosing(monkeypatch):
    """A module in the place of vllm's, whose choice needs a kernel that is not built."""
    name, function = plain_torch.CHOICE
    module = ModuleType(name)

    def choose(layer, remove_weight):
        raise AttributeError(NO_KERNEL)

    setattr(module, function, choose)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def load_layer(module, remove_weight):
    """As vllm's layers do: its choice is looked up when the weights are there."""
    layer = torch.nn.Linear(8, 4)
    getattr(module, plain_torch.CHOICE[1])(layer, remove_weight=remove_weight)
    return layer


@pytest.mark.parametrize("remove_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_loaded_after_it_multiply_by_torch_and_keep_their_weights(vllm_choosing, remove_weight, dtype):
    with pytest.raises(AttributeError, match="convert_weight_packed"):
        load_layer(vllm_choosing, remove_weight)
    plain_torch.keep_plain_torch()
    plain_torch.keep_plain_torch()
    layer = load_layer(vllm_choosing, remove_weight).to(dtype)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))
    plain_torch.check_plain_torch(torch.nn.Sequential(layer))


def test_a_vllm_that_chooses_elsewhere_is_refused_with_the_remedy(vllm_choosing, monkeypatch):
    says = r"no dispatch_cpu_unquantized_gemm, .* install the versions of constraints-vllm.txt, or .*name=diffusers"
    delattr(vllm_choosing, plain_torch.CHOICE[1])
    with pytest.raises(RuntimeError, match=says):
        plain_torch.keep_plain_torch()
    monkeypatch.setitem(sys.modules, plain_torch.CHOICE[0], None)
    with pytest.raises(RuntimeError, match=says):
        plain_torch.keep_plain_torch()


def test_a_layer_with_another_product_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    plain_torch.check_plain_torch(model)
    model[0].cpu_linear = torch.nn.functional.linear
    plain_torch.check_plain_torch(model)
    model[1].cpu_linear = lambda x, weight, bias: x
    with pytest.raises(RuntimeError, match=r"chose a kernel for the layer 1 by what this processor offers.*diffusers"):
        plain_torch.check_plain_torch(model)


@pytest.mark.parametrize(
    ("error", "kernel"),
    [
        (NO_KERNEL, "convert_weight_packed"),
        (f"Orchestrator initialization failed: {NO_KERNEL}", "convert_weight_packed"),
        ("'_OpNamespace' '_C' object has no attribute 'create_onednn_mm_handler'", "create_onednn_mm_handler"),
        ("'_OpNamespace' '_moe_C' object has no attribute 'topk_softmax'", "topk_softmax"),
    ],
)
def test_a_missing_kernel_is_explained(error, kernel):
    explained = plain_torch.with_cause(error)
    assert explained.startswith(error)
    assert f"vllm asked for {kernel}, one of its compiled kernels" in explained
    assert "rollout.dtype=float32" in explained
    assert "rollout.name=diffusers" in explained
    assert "\n" not in explained


def test_other_errors_stay_as_they_are():
    for error in ("out of memory", "'Config' object has no attribute 'sample_size'", ""):
        assert plain_torch.with_cause(error) == error


def test_the_engines_process_explains_its_errors(tiny_model, monkeypatch):
    """What it answers, and the end of its log, are quoted with cause and remedy."""
    handle = make_handle(tiny_model, ModelConfig(), monkeypatch)
    assert handle._explain is plain_torch.with_cause


def make_handle(model, lora, monkeypatch):
    """A handle whose process is not started, in an environment without vllm."""
    from flowgrpo_rc.rollout.vllm_omni import handle

    monkeypatch.setattr(handle, "check_versions", lambda: None)
    rollout = RolloutConfig(name="vllm_omni", dtype="float32", micro_batch_size=2)
    return handle.VllmOmniHandle(rollout, model, lora, ["cpu"], rollout.vllm_omni)


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


@pytest.mark.process
def test_the_trainers_side_imports_no_vllm():
    code = (
        "import sys, flowgrpo_rc.rollout.vllm_omni.engine; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_other_pipelines_are_refused(tiny_model, monkeypatch):
    parts = {**tiny_model.pipe.components, "vae_scale_factor": tiny_model.pipe.vae_scale_factor}
    monkeypatch.setattr(tiny_model, "pipe", SimpleNamespace(**parts))
    says = f"vllm_omni draws {', '.join(PIPELINES)} only so far, got SimpleNamespace"
    with pytest.raises(ValueError, match=says):
        make_handle(tiny_model, ModelConfig(), monkeypatch)


def test_layers_that_take_no_adapter_are_refused_before_anything_is_started(tiny_sd3_model, monkeypatch):
    """As the user names them; vllm-omni's own refusal comes with the first push only."""
    make_handle(tiny_sd3_model, ModelConfig(target_modules=["to_q", "ff.net.2"]), monkeypatch)
    says = r"target_modules: time_text_embed.timestep_embedder.linear_1 and \d+ more can have no adapter in vllm-omni"
    with pytest.raises(ValueError, match=says):
        make_handle(tiny_sd3_model, ModelConfig(target_modules="all-linear"), monkeypatch)


def test_every_pipeline_of_the_table_is_a_family():
    for name, entry in PIPELINES.items():
        assert name in FAMILIES
        module, _, rollout = entry.rollout.partition(":")
        source = Path(find_spec("flowgrpo_rc").origin).parents[1] / f"{module.replace('.', '/')}.py"
        assert f"class {rollout}(Rollout, " in source.read_text()


def test_a_model_without_its_t5_is_refused(tmp_path, monkeypatch):
    """vllm-omni would look for its folder, and its process would end."""
    model = load_model(tiny_sd3.save(tmp_path, t5=False))
    with pytest.raises(ValueError, match="vllm_omni loads text_encoder_3, which this model was saved without"):
        make_handle(model, ModelConfig(), monkeypatch)


class Losing:
    """A handle whose calls are lost ``losses`` times, and which notes them."""

    def __init__(self, losses):
        self.losses = losses
        self.calls = []
        self.expected = {"a": (1,)}

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


@pytest.fixture
def engine_of(monkeypatch, tiny_model):
    """``make(handle)``: the engine beside the actor around this handle."""
    from flowgrpo_rc.rollout.vllm_omni import engine

    def make(handle):
        monkeypatch.setattr(engine, "VllmOmniHandle", lambda *_, **__: handle)
        return engine.VllmOmniEngine(RolloutConfig(name="vllm_omni"), tiny_model, ModelConfig(), "cpu")

    return make


def test_a_lost_process_is_started_once_and_gets_its_adapter_again(engine_of, tiny_model):
    handle = Losing(0)
    made = engine_of(handle)
    assert made.sync({"a": torch.zeros(1)}, 4) == "digest 4"
    handle.losses = 1
    with pytest.warns(UserWarning, match="killed; starting it anew"):
        made.generate(request_for(tiny_model))
    assert handle.calls == ["start", "sync 4", "generate", "start", "sync 4", "generate"]
    assert made.restarts == 1
    handle.losses = 1
    with pytest.warns(UserWarning, match="killed; starting it anew"):
        assert made.sync({"a": torch.ones(1)}, 5) == "digest 5"
    assert handle.calls[6:] == ["sync 5", "start", "sync 5"]


def test_a_process_that_is_lost_twice_in_a_call_is_an_error(engine_of, tiny_model):
    handle = Losing(0)
    made = engine_of(handle)
    made.sync({"a": torch.zeros(1)}, 4)
    handle.losses = 2
    with pytest.warns(UserWarning, match="starting it anew"), pytest.raises(RolloutError, match="^killed$"):
        made.generate(request_for(tiny_model))
