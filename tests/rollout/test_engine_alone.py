"""An engine with a model of its own draws the bits of the engine beside the actor, and holds its weights once."""

import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from rollout_cases import assert_same_bits, random_like, request_for

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state, attach_lora
from flowgrpo_rc.rollout import DiffusersEngine, RolloutConfig, build_engine
from flowgrpo_rc.rollout.build import build_engine_alone, check_placement, digest_rule
from flowgrpo_rc.rollout.engines import ENGINES, EngineEntry

MODEL = ModelConfig(path="asset:tiny_qwen_image", lora_rank=4, lora_alpha=8)
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8 in float32": {"dtype": "float32", "quantization": "fp8"},
    "attention": {"dtype": "float32", "rollout_attn_backend": "_native_math"},
}


@pytest.fixture(params=SETTINGS)
def rollout(request):
    return RolloutConfig(micro_batch_size=4, **SETTINGS[request.param])


def adapter_of(model, seed=0):
    """An adapter by the names and shapes of the actor's."""
    attach_lora(model.transformer, model, MODEL, dtype=torch.float32)
    return random_like(adapter_state(model.transformer), seed=seed)


@pytest.mark.slow
def test_an_engine_alone_draws_the_bits_of_the_engine_beside_the_actor(tiny_model, rollout):
    """Through a pickled configuration, as it arrives in another process."""
    sections = pickle.loads(pickle.dumps((rollout, MODEL)))
    engine = build_engine_alone(sections[0], sections[1], "cpu")
    beside = build_engine(rollout, tiny_model, MODEL, "cpu")
    state = adapter_of(tiny_model)
    digest = beside.sync(state, 3)
    assert engine.sync(state, 3) == digest == digest_rule(rollout, MODEL)(state)
    request = request_for(tiny_model, cfg=4.0, record_means=True)
    assert_same_bits(engine.generate(request), beside.generate(request))
    plain = request_for(tiny_model, cfg=4.0, window=0)
    assert_same_bits(engine.generate(plain), beside.generate(plain))
    engine.close()


def test_the_digest_of_a_state_in_the_engines_dtype_is_that_of_the_state(tiny_model, rollout):
    """The pool sends adapters that have been rounded already."""
    state = adapter_of(tiny_model)
    rounded = {name: value.to(getattr(torch, rollout.dtype)) for name, value in state.items()}
    rule = digest_rule(rollout, MODEL)
    assert rule(rounded) == rule(state)
    assert rule(adapter_of(load_model(MODEL.path), seed=1)) != rule(state)


def live_bytes():
    """Bytes of all storages that Python's tensors hold."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and not o.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.slow
def test_an_engine_alone_holds_its_weights_once(rollout):
    """Transformer and adapter in the engine's dtype, VAE in the model's, and no other copy."""
    before = live_bytes()
    engine = build_engine_alone(rollout, MODEL, "cpu")
    assert isinstance(engine, DiffusersEngine)
    held = {n: sum(p.nbytes for p in n.parameters()) for n in (engine.transformer, engine._model.pipe.vae)}
    assert {p.dtype for p in engine.transformer.parameters()} == {getattr(torch, rollout.dtype)}
    # Tables of angles for rotary embeddings come on top.
    assert live_bytes() - before < sum(held.values()) + 0.25 * held[engine.transformer]
    assert not any(name.startswith("text_encoder") and part for name, part in engine._model.pipe.components.items())


def test_guidance_in_two_calls_arrives(rollout):
    model = ModelConfig(path=MODEL.path, batch_guidance=False)
    engine = build_engine_alone(rollout, model, "cpu")
    assert isinstance(engine, DiffusersEngine)
    assert not engine._model.batch_guidance


@pytest.mark.parametrize("actors", [None, "_native_math"])
def test_an_engine_alone_has_the_attention_kernel_that_it_is_given(actors):
    """Also where it is the actor's: no actor sets it there."""
    rollout = RolloutConfig(dtype="float32", rollout_attn_backend="_native_math")
    engine = build_engine_alone(rollout, replace(MODEL, attn_backend=actors), "cpu")
    assert isinstance(engine, DiffusersEngine)
    processors = [module.processor for module in engine.transformer.modules() if hasattr(module, "processor")]
    assert {processor._attention_backend for processor in processors} == {AttentionBackendName("_native_math")}


def test_an_engine_without_a_digest_rule_stays_in_the_trainers_process(monkeypatch):
    monkeypatch.setitem(ENGINES, "dark", EngineEntry("nowhere:Dark"))
    with pytest.raises(ValueError, match=r"rollout.name: got dark, which has no digest_rule .* diffusers, vllm_omni$"):
        digest_rule(RolloutConfig(name="dark"), MODEL)
    with pytest.raises(ValueError, match="rollout.name: got dark, which has no digest_rule"):
        check_placement(RolloutConfig(name="dark", placement="process"))
