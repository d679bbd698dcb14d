"""An engine that multiplies in 8 bits by torchao's kernels; ``make quantization`` installs what this needs."""

import pytest
import torch
from rollout_cases import random_like, request_for
from tests_support import rows_of

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state, linear_layers, target_layers
from flowgrpo_rc.rollout import DiffusersEngine, diffusers_engine
from flowgrpo_rc.rollout.weights import layers_to_round
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytest.importorskip("torchao")

LORA = ModelConfig(lora_rank=4, lora_alpha=8)
R = "actor_rollout_ref.rollout"


def engine_of(**settings):
    """An int8 engine in bfloat16 with a random adapter."""
    model = load_model("asset:tiny_qwen_image", dtype="bfloat16")
    engine = DiffusersEngine(
        model, LORA, dtype=torch.bfloat16, micro_batch_size=6, device="cpu", quantization="int8", **settings
    )
    engine.sync(random_like(adapter_state(engine.transformer, engine.adapter), 0.05), 1)
    return model, engine


def integers(rows):
    """Rows of numbers as integers from -128 to 127 and a scale each, which is a bfloat16 number."""
    scale = (rows.abs().amax(1, keepdim=True) / 127.5).bfloat16().double()
    return (rows / scale).round().clamp(-128, 127), scale


@pytest.mark.parametrize("merge_adapter", [False, True])
def test_layers_multiply_integers(merge_adapter):
    """Weights and activations, a scale a row each, against the definition in float64; layers that stay are as ever."""
    model, engine = engine_of(merge_adapter=merge_adapter)
    rounded = layers_to_round(model.transformer, model, "int8", None)
    generator = torch.Generator().manual_seed(0)
    _, plain = engine_of(merge_adapter=merge_adapter, quantization_skip=["transformer_blocks"])
    exact = {name: layer.weight.double() for name, layer in linear_layers(plain.transformer).items()}
    for name, layer in linear_layers(engine.transformer).items():
        x = torch.randn(5, layer.in_features, generator=generator).bfloat16()
        if name not in rounded:
            assert torch.equal(layer.weight, exact[name].bfloat16())
            continue
        weight, scale = integers(exact[name])
        held, row_scale = integers(x.double())
        bias = 0 if layer.bias is None else layer.bias.double()
        expected = (held @ weight.T) * row_scale * scale.T + bias
        found = layer(x).double()
        # The output is a bfloat16 number.
        assert (found - expected).norm() < 2**-8 * expected.norm(), name
        assert 1e-3 < (found - (x.double() @ exact[name].T + bias)).norm() / expected.norm() < 0.03


def test_layers_are_merged_and_rounded_one_by_one(monkeypatch):
    """A plan counts the adapted layers in 8 bits alone."""
    model, engine = engine_of(merge_adapter=True)
    adapted = set(target_layers(model.transformer, model, LORA))
    rounded = adapted & layers_to_round(model.transformer, model, "int8", None)
    layers = linear_layers(engine.transformer)
    unrounded = []
    merge = diffusers_engine.merge_into_weights

    def counting(*given):
        merge(*given)
        unrounded.append(sum(type(layers[name].weight.detach()) is torch.Tensor for name in rounded))

    monkeypatch.setattr(diffusers_engine, "merge_into_weights", counting)
    engine.sync(random_like(adapter_state(engine.transformer, engine.adapter), 0.05), 2)
    assert len(unrounded) == len(rounded) > 1
    assert set(unrounded) == {1}


def test_a_row_of_a_batch_has_the_bits_of_one_alone():
    model, engine = engine_of()
    name = min(layers_to_round(model.transformer, model, "int8", None))
    layer = linear_layers(engine.transformer)[name]
    x = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(layer(x)[:3], layer(x[:3]))


def test_the_adapter_is_held_unrounded_and_proved():
    model, engine = engine_of()
    state = random_like(adapter_state(engine.transformer, engine.adapter), 0.05, 2)
    assert engine.sync(state, 2) == engine.digest_of(state)
    held = adapter_state(engine.transformer, engine.adapter)
    assert all(torch.equal(held[name], value.bfloat16()) for name, value in state.items())
    assert engine.generate(request_for(model)).echo.adapter_digest == engine.digest_of(state)


@pytest.mark.run
@pytest.mark.parametrize("settings", [(), (f"{R}.merge_adapter=true",), (f"{R}.placement=process",)])
def test_a_run_learns_with_a_gap(small_config, settings):
    """In 8 bits, modulation too, the gap is another one than bfloat16's. Which is the wider depends on the processor:
    few images are measured here."""
    gaps = []
    for quantization in ("null", "int8"):
        skip = "null" if quantization == "null" else "[img_mlp]"
        rounds = (f"{R}.quantization={quantization}", f"{R}.quantization_skip={skip}")
        config = small_config(*rounds, *settings, folder=quantization)
        steps = [row for row in rows_of(FlowGRPOTrainer(config).fit().root) if "reward/mean" in row]
        assert len(steps) == 2
        assert all(row["actor/grad_norm"] > 0 for row in steps)
        gaps.append(steps[0]["rollout_sync/engine_gap_abs_mean"])
    assert gaps[1] != gaps[0]
    assert 1e-5 < gaps[1] < 0.05
