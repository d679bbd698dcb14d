"""The adapter: strict binding, and a save that plain diffusers reloads to the identical image."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import EPSILON
from torch.testing import assert_close

from flowgrpo_rc.models import AdapterMismatchError, ModelConfig, check_adapter_file, load_model
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


def draw(pipe):
    return pipe(
        prompt='the text "42"',
        height=32,
        width=32,
        num_inference_steps=4,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images


def test_diffusers_reloads_the_identical_image(tiny_model, tmp_path):
    """``lora_alpha`` differs from the rank, so a save that loses it draws another image."""
    base = draw(tiny_model.pipe)
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    randomise(tiny_model.transformer)
    trained = draw(tiny_model.pipe)
    save_lora(tiny_model, tiny_model.transformer, tmp_path)
    fresh = load_model("asset:tiny_qwen_image")
    fresh.pipe.load_lora_weights(str(tmp_path))
    assert np.abs(trained - base).max() > 0.1
    assert np.array_equal(draw(fresh.pipe), trained)


@pytest.mark.parametrize("alpha", [2, 12, 16])
def test_an_adapter_at_full_strength_is_read_into_any_alpha(tiny_model, tmp_path, alpha):
    """Its update stays the same: bit for bit where ``alpha / rank`` is a power of two, else to rounding."""
    config = ModelConfig(lora_rank=4, lora_alpha=alpha)
    attach_lora(tiny_model.transformer, tiny_model, config, dtype=torch.float32)
    randomise(tiny_model.transformer)
    before = adapter_state(tiny_model.transformer)
    save_lora(tiny_model, tiny_model.transformer, tmp_path, full_strength=True)
    check_adapter_file(str(tmp_path), 4, alpha)
    randomise(tiny_model.transformer, seed=1)
    load_lora(tiny_model.transformer, tmp_path)
    for name, value in adapter_state(tiny_model.transformer).items():
        assert_close(value, before[name], rtol=0 if alpha != 12 else 2 * EPSILON, atol=0)


def test_a_file_without_metadata_has_full_strength(tiny_model, tmp_path):
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    randomise(tiny_model.transformer)
    save_lora(tiny_model, tiny_model.transformer, tmp_path, full_strength=True)
    expected = adapter_state(tiny_model.transformer)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(load_file(file), file)
    load_lora(tiny_model.transformer, tmp_path)
    for name, value in adapter_state(tiny_model.transformer).items():
        assert_close(value, expected[name], rtol=2 * EPSILON, atol=0)


@pytest.mark.run
def test_a_runs_final_adapter_has_full_strength_and_its_checkpoint_the_trained_weights(finished_run):
    """Rank 8 and alpha 16, so that the second matrices of ``lora/`` are twice those of the last checkpoint."""
    file = "pytorch_lora_weights.safetensors"
    trained = load_file(finished_run.root / "checkpoints" / "step_2" / file)
    final = load_file(finished_run.root / "lora" / file)
    assert final.keys() == trained.keys()
    for name, value in final.items():
        assert torch.equal(value, trained[name] * (2 if ".lora_B." in name else 1)), name


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
    assert all(torch.equal(state[n], p) for n, p in adapter_parameters(tiny_model.transformer).items())


def test_all_linear_reaches_every_linear_layer(tiny_model):
    linear = sum(isinstance(m, torch.nn.Linear) for m in tiny_model.transformer.modules())
    config = ModelConfig(lora_rank=2, lora_alpha=2, target_modules="all-linear")
    attach_lora(tiny_model.transformer, tiny_model, config, dtype=torch.float32)
    assert len(adapter_state(tiny_model.transformer)) == 2 * linear


def test_disabled_adapter_is_the_base_model(tiny_model):
    latents = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    from flowgrpo_rc.models import Conditioning, PromptEncoder

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
    (tmp_path / "two" / "pytorch_lora_weights.safetensors").write_bytes(b"x")
    assert not same_lora(tmp_path / "one", tmp_path / "two")


def test_files_get_the_mode_of_the_umask(tiny_model, tmp_path):
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    before = os.umask(0o026)
    try:
        save_lora(tiny_model, tiny_model.transformer, tmp_path)
    finally:
        os.umask(before)
    assert [(p.name, p.stat().st_mode & 0o777) for p in tmp_path.iterdir()] == [
        ("pytorch_lora_weights.safetensors", 0o640)
    ]


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
    assert all(torch.equal(found[n], expected[n]) for n in expected)
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
