"""The adapter: strict binding, the strength of a saved one, and which of two is active."""

import os

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests_support import ADAPTER, names, same
from tolerances import EPSILON
from torch.testing import assert_close

from flowgrpo_rc.models import (
    AdapterMismatchError,
    Conditioning,
    ModelConfig,
    PromptEncoder,
    check_adapter_file,
    load_model,
)
from flowgrpo_rc.models.lora import (
    activate,
    adapter_active,
    adapter_parameters,
    adapter_state,
    attach_lora,
    base_parameters,
    linear_layers,
    load_adapter_state,
    load_lora,
    same_lora,
    save_lora,
)

LORA = ModelConfig(lora_rank=4, lora_alpha=12)


def randomise(transformer, seed=0):
    """Give both LoRA matrices values, so that the adapter does something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(transformer).values():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("alpha", "metadata"), [(2, True), (12, True), (16, True), (12, False)])
def test_an_adapter_at_full_strength_is_read_into_any_alpha(tiny_model, tmp_path, alpha, metadata):
    """Its update stays the same: bit for bit where ``alpha / rank`` is a power of two, else to rounding. So is a file
    without metadata."""
    config = ModelConfig(lora_rank=4, lora_alpha=alpha)
    attach_lora(tiny_model.transformer, tiny_model, config, dtype=torch.float32)
    randomise(tiny_model.transformer)
    before = adapter_state(tiny_model.transformer)
    save_lora(tiny_model, tiny_model.transformer, tmp_path, full_strength=True)
    if metadata:
        check_adapter_file(str(tmp_path), 4, alpha)
    else:
        save_file(load_file(tmp_path / ADAPTER), tmp_path / ADAPTER)
    randomise(tiny_model.transformer, seed=1)
    load_lora(tiny_model.transformer, tmp_path)
    for name, value in adapter_state(tiny_model.transformer).items():
        assert_close(value, before[name], rtol=0 if alpha != 12 else 2 * EPSILON, atol=0)


def test_products_in_bfloat16_from_float32_weights(tiny_model):
    """An adapted layer's output equals that of rounded weights, bit for bit; gradients are float32 and theirs."""
    transformer = tiny_model.transformer.to(torch.bfloat16)
    attach_lora(transformer, tiny_model, LORA, dtype=torch.float32, compute_dtype=torch.bfloat16)
    randomise(transformer)
    name = "transformer_blocks.0.attn.to_q"
    layer = transformer.get_submodule(name)
    first, second = (adapter_parameters(transformer)[f"{name}.lora_{m}.default.weight"] for m in "AB")
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded = [w.detach().bfloat16().requires_grad_() for w in (first, second)]
    scale = LORA.lora_alpha / LORA.lora_rank
    expected = layer.base_layer(x) + F.linear(F.linear(x, rounded[0]), rounded[1]) * scale
    found = layer(x)
    assert torch.equal(found, expected)
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    for weight, theirs in zip((first, second), rounded, strict=True):
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, theirs.grad.float())


def test_float16_has_no_products_of_its_own():
    assert [ModelConfig(dtype=d).lora_computes_in for d in ("float32", "bfloat16", "float16")] == [
        *("float32", "bfloat16", "float32")
    ]
    assert ModelConfig(dtype="bfloat16", lora_compute_dtype="float32").lora_computes_in == "float32"


def test_an_adapter_beside_others_leaves_them_as_they_are(tiny_model):
    """With fewer target modules, beside a float32 adapter whose matrices peft made."""
    transformer = tiny_model.transformer.to(torch.bfloat16)
    attach_lora(transformer, tiny_model, LORA, dtype=torch.float32, adapter="theirs")
    layer = transformer.get_submodule("transformer_blocks.0.attn.to_q")
    first = layer.lora_A["theirs"].weight
    second = torch.nn.init.normal_(layer.lora_B["theirs"].weight)
    for matrices, weight in ((layer.lora_A, first), (layer.lora_B, second)):
        matrices["theirs"] = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        matrices["theirs"].weight = weight
    narrow = ModelConfig(lora_rank=2, lora_alpha=2, target_modules=["to_q"])
    attach_lora(transformer, tiny_model, narrow, dtype=torch.bfloat16, adapter="other")
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    change = x.float() @ first.T @ second.T * (LORA.lora_alpha / LORA.lora_rank)
    with adapter_active(transformer, "theirs"):
        assert_close(layer(x), (layer.base_layer(x) + change).bfloat16(), rtol=2**-7, atol=0)


def test_load_refuses_another_adapter(tiny_model, tmp_path):
    with pytest.raises(AdapterMismatchError, match=r"holds no pytorch_lora_weights.safetensors"):
        load_lora(tiny_model.transformer, tmp_path)
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    save_lora(tiny_model, tiny_model.transformer, tmp_path)
    other = load_model("asset:tiny_qwen_image")
    attach_lora(other.transformer, other, ModelConfig(lora_rank=2, lora_alpha=12), dtype=torch.float32)
    with pytest.raises(AdapterMismatchError, match="lora_rank or target_modules differ"):
        load_lora(other.transformer, tmp_path)


def test_every_tensor_must_bind(tiny_model):
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    state = adapter_state(tiny_model.transformer)
    dropped = next(name for name in state if "to_out.0" in name)
    partial = {name: torch.ones_like(value) for name, value in state.items() if name != dropped}
    with pytest.raises(AdapterMismatchError, match=rf"1 of {len(state)} weights missing \(first: {dropped}"):
        load_adapter_state(tiny_model.transformer, partial)
    with pytest.raises(AdapterMismatchError, match="1 unexpected"):
        load_adapter_state(tiny_model.transformer, {**state, "stranger": torch.ones(1)})
    # a refused state changes nothing
    assert same(state, adapter_state(tiny_model.transformer))


def test_all_linear_reaches_every_linear_layer(tiny_model):
    linear = sum(isinstance(m, torch.nn.Linear) for m in tiny_model.transformer.modules())
    config = ModelConfig(lora_rank=2, lora_alpha=2, target_modules="all-linear")
    attach_lora(tiny_model.transformer, tiny_model, config, dtype=torch.float32)
    assert len(adapter_state(tiny_model.transformer)) == 2 * linear


def test_disabled_adapter_is_the_base_model(tiny_model):
    latents = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    prompts = PromptEncoder(tiny_model, 512)(['the text "42"'])
    cond = Conditioning(prompts, None, 1.0, None, 32, 32)

    def velocity():
        with torch.no_grad():
            return tiny_model.velocity(tiny_model.transformer, latents, torch.tensor([500.0]), cond)

    base = velocity()
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    randomise(tiny_model.transformer)
    adapted = velocity()
    with adapter_active(tiny_model.transformer, None):
        assert_close(velocity(), base, rtol=0, atol=0)
    assert_close(velocity(), adapted, rtol=0, atol=0)
    assert (adapted - base).abs().max() > 1e-3


def test_the_same_adapter_is_known_again(tiny_model, tmp_path):
    """Two files of one adapter may differ in the order of their entries; another value is another adapter."""
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    randomise(tiny_model.transformer)
    for name in ("one", "two"):
        save_lora(tiny_model, tiny_model.transformer, tmp_path / name)
    assert same_lora(tmp_path / "one", tmp_path / "two")
    assert not same_lora(tmp_path / "one", tmp_path)
    next(iter(adapter_parameters(tiny_model.transformer).values())).data[0, 0] += 1
    save_lora(tiny_model, tiny_model.transformer, tmp_path / "three")
    assert not same_lora(tmp_path / "one", tmp_path / "three")
    (tmp_path / "two" / ADAPTER).write_bytes(b"x")
    assert not same_lora(tmp_path / "one", tmp_path / "two")


def test_files_get_the_mode_of_the_umask(tiny_model, tmp_path):
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    before = os.umask(0o026)
    try:
        save_lora(tiny_model, tiny_model.transformer, tmp_path)
    finally:
        os.umask(before)
    assert names(tmp_path) == [ADAPTER]
    assert (tmp_path / ADAPTER).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_a_second_adapter_starts_as_it_would_alone(tiny_model, targets):
    """The same layers and the same draws of the global generator, whatever is attached already."""
    config = ModelConfig(lora_rank=4, lora_alpha=4, target_modules=targets)
    alone = load_model("asset:tiny_qwen_image")
    for model, first in ((alone, False), (tiny_model, True)):
        if first:
            attach_lora(model.transformer, model, config, dtype=torch.bfloat16, adapter="rollout")
        torch.manual_seed(7)
        attach_lora(model.transformer, model, config, dtype=torch.float32)
    expected, found = adapter_state(alone.transformer), adapter_state(tiny_model.transformer)
    assert list(found) == list(expected) == list(adapter_state(tiny_model.transformer, "rollout"))
    assert same(found, expected)
    rollout = adapter_parameters(tiny_model.transformer, "rollout").values()
    assert {p.dtype for p in rollout} == {torch.bfloat16}
    base = base_parameters(tiny_model.transformer)
    assert base.keys() == base_parameters(alone.transformer).keys()
    assert len(base) + 2 * len(expected) == len(list(tiny_model.transformer.parameters()))


def test_an_adapter_is_made_active_without_a_change_of_what_is_trained(tiny_model):
    """``adapter_active`` writes to a private name of peft's; its layers must go on reading that."""
    transformer = tiny_model.transformer
    outputs = {}
    layer_name = next(name for name in linear_layers(transformer) if name.endswith("to_q"))
    for adapter in ("rollout", "default"):
        attach_lora(transformer, tiny_model, LORA, dtype=torch.float32, adapter=adapter)
        for parameter in adapter_parameters(transformer, adapter).values():
            parameter.data.fill_({"rollout": 0.1, "default": 0.3}[adapter])
    layer = transformer.get_submodule(layer_name)
    x = torch.ones(1, layer.in_features)
    trainable = [p.requires_grad for p in transformer.parameters()]
    for adapter in ("rollout", "default"):
        with adapter_active(transformer, adapter):
            outputs[adapter] = layer(x) - layer.base_layer(x)
            assert transformer.active_adapters() == [adapter]
    # scale * B A x, all entries of A and B equal to v: 12 / 4 * 4 * v^2 * in_features
    for adapter, value in (("rollout", 0.1), ("default", 0.3)):
        expected = torch.full_like(outputs[adapter], 12 * value**2 * layer.in_features)
        assert_close(outputs[adapter], expected, atol=1e-4, rtol=1e-4)
    assert [p.requires_grad for p in transformer.parameters()] == trainable
    activate(transformer, None)
    assert torch.equal(layer(x), layer.base_layer(x))
