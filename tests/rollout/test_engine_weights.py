"""Engines whose weights are not the actor's: rounded, with the adapter merged, or in compiled blocks."""

import shutil

import pytest
import torch
from rollout_cases import random_like, request_for
from tolerances import LOG_PROB
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig, load_model, quantization
from flowgrpo_rc.models.lora import adapter_state, base_parameters, linear_layers, target_layers
from flowgrpo_rc.models.qwen_image import _rotate
from flowgrpo_rc.rollout import DiffusersEngine, RolloutConfig, diffusers_engine
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.engines import EMULATED
from flowgrpo_rc.rollout.weights import check_kernels, layers_to_round, on_device, round_fp8_rows

LORA = ModelConfig(lora_rank=4, lora_alpha=8)


def engine_of(model, dtype=torch.float32, lora=LORA, **settings):
    return DiffusersEngine(model, lora, dtype=dtype, micro_batch_size=6, device="cpu", **settings)


def synced(engine, seed=0):
    """The engine with a random adapter."""
    state = random_like(adapter_state(engine.transformer, engine.adapter), 0.05, seed)
    engine.sync(state, seed)
    return state


def base_weights(engine):
    return {name: layer.weight for name, layer in linear_layers(engine.transformer).items()}


def log_probs(engine, model):
    return engine.generate(request_for(model, cfg=4.0)).batch["rollout_log_probs"]


# ---------------------------------------------------------------------- the adapter merged into the weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_sum_with_the_last_adapter(tiny_model, dtype):
    """Against float64, rounded once; all other weights stay, and so does the model bit for bit. Emulated fp8 rounds the
    sum."""
    before = {name: p.detach().clone() for name, p in tiny_model.transformer.named_parameters()}
    engine = engine_of(tiny_model, dtype, merge_adapter=True)
    rounded = engine_of(tiny_model, dtype, merge_adapter=True, quantization=EMULATED)
    adapted = set(target_layers(tiny_model.transformer, tiny_model, LORA))
    assert adapted
    for seed in (1, 2):
        state = synced(engine, seed)
        rounded.sync(state, seed)
        for name, weight in base_weights(engine).items():
            assert weight.dtype == dtype
            assert torch.equal(base_weights(rounded)[name], round_fp8_rows(weight))
            start = before[f"{name}.weight"].to(dtype)
            if name not in adapted:
                assert torch.equal(weight, start)
                continue
            first, second = (state[f"{name}.lora_{part}.default.weight"].to(dtype).double() for part in "AB")
            exact = start.double() + 2 * second @ first
            # Half a unit in the last place, and float32's own sums.
            assert (weight - exact).abs().max() <= torch.finfo(dtype).eps / 2 * exact.abs().max() + 1e-6
            assert (weight - start).abs().max() > 0.01
    assert all(torch.equal(p, before[name]) for name, p in base_parameters(tiny_model.transformer).items())


def test_a_merged_engine_draws_what_one_with_its_adapter_beside_draws(tiny_model):
    merged = engine_of(tiny_model, merge_adapter=True)
    beside = engine_of(load_model("asset:tiny_qwen_image"))
    state = synced(merged)
    assert beside.sync(state, 0) == merged.sync(state, 0) == merged.digest_of(state)
    request = request_for(tiny_model, cfg=4.0)
    one, other = merged.generate(request), beside.generate(request)
    assert_close(one.batch["rollout_log_probs"], other.batch["rollout_log_probs"], rtol=0, atol=LOG_PROB)
    assert one.echo.adapter_digest == merged.digest_of(state)
    synced(beside, 1)
    assert not torch.equal(beside.generate(request).images, other.images)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_takes_memory_for_the_adapted_layers_alone(dtype):
    """If its precision is the actor's."""
    model = load_model("asset:tiny_qwen_image", dtype=dtype)
    engine = engine_of(model, getattr(torch, dtype), merge_adapter=True)
    synced(engine)
    own = {p.data_ptr() for p in model.transformer.parameters()}
    copied = {name for name, p in base_weights(engine).items() if p.data_ptr() not in own}
    assert copied == set(target_layers(model.transformer, model, LORA))


def test_an_engine_alone_merges_to_the_same_bits(tiny_model):
    beside = engine_of(tiny_model, torch.bfloat16, merge_adapter=True)
    alone = engine_of(load_model("asset:tiny_qwen_image"), torch.bfloat16, merge_adapter=True, alone=True)
    state = synced(beside)
    alone.sync(random_like(state, 0.05, 3), 0)
    assert alone.sync(state, 0) == beside.sync(state, 0)
    for name, weight in base_weights(beside).items():
        assert torch.equal(weight, base_weights(alone)[name])


# ---------------------------------------------------------------------- which layers are rounded, and where


def test_layers_that_stay_are_named_by_a_part(tiny_model):
    every = layers_to_round(tiny_model.transformer, tiny_model, "int8", ())
    assert all(name.startswith("transformer_blocks.") for name in every)
    own = layers_to_round(tiny_model.transformer, tiny_model, "fp8", None)
    assert every - own == {name for name in every if ".img_mlp." in name} != set()
    modulate = {name for name in own if name.endswith("_mod.1")}
    assert len(modulate) == 2 * len(tiny_model.transformer.transformer_blocks)
    assert own - layers_to_round(tiny_model.transformer, tiny_model, "int8", None) == modulate
    without = layers_to_round(tiny_model.transformer, tiny_model, "fp8", ["to_out.0", "transformer_blocks.0"])
    assert without == {n for n in every if not n.startswith("transformer_blocks.0.") and not n.endswith(".to_out.0")}
    assert layers_to_round(tiny_model.transformer, tiny_model, EMULATED, None) == set(
        linear_layers(tiny_model.transformer)
    )
    assert layers_to_round(tiny_model.transformer, tiny_model, None, None) == set()
    engine_of(tiny_model).close()
    assert layers_to_round(tiny_model.transformer, tiny_model, "int8", ()) == every
    with pytest.raises(ValueError, match=r"quantization_skip: img_mpl names no layer that int8 rounds; .*img_mlp"):
        layers_to_round(tiny_model.transformer, tiny_model, "int8", ["to_out.0", "img_mpl"])


def test_skipped_layers_keep_their_weights(tiny_model):
    engine = engine_of(tiny_model, quantization=EMULATED, quantization_skip=["attn"])
    for name, layer in linear_layers(tiny_model.transformer).items():
        expected = layer.weight if ".attn." in name else round_fp8_rows(layer.weight)
        assert torch.equal(base_weights(engine)[name], expected)


@pytest.mark.parametrize(("capability", "found"), [((8, 6), EMULATED), ((8, 9), "fp8"), ((9, 0), "fp8")])
def test_fp8_is_emulated_without_kernels(monkeypatch, capability, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda", 1)
    assert on_device("fp8", gpu) == found
    assert on_device("fp8", torch.device("cpu")) == EMULATED
    for kept in ("int8", EMULATED, None):
        assert on_device(kept, gpu) == kept


def test_fp8_kernels_take_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(quantization, "find_spec", lambda name: True)
    gpu = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"rollout.dtype: got float32 with quantization=fp8, .* to bfloat16, or"):
        check_kernels("fp8", torch.float32, gpu)
    check_kernels("fp8", torch.bfloat16, gpu)
    for kind in (EMULATED, "fp8", None):
        check_kernels(kind, torch.float32, torch.device("cpu"))


def test_fp8_on_a_cpu_is_the_emulation(tiny_model):
    """Weights, digests and the rule that the trainer works out without the engine."""
    named, emulated = (engine_of(tiny_model, torch.bfloat16, quantization=name) for name in ("fp8", EMULATED))
    state = synced(named)
    assert emulated.sync(state, 0) == named.digest_of(state)
    for name, weight in base_weights(named).items():
        assert torch.equal(weight, base_weights(emulated)[name])
    for name in ("fp8", EMULATED):
        config = RolloutConfig(dtype="bfloat16", quantization=name)
        assert digest_rule(config, LORA)(state) == named.digest_of(state)


# ---------------------------------------------------------------------- compiled blocks


def compiled(transformer):
    return {block._compiled_call_impl is not None for block in transformer.transformer_blocks}


@pytest.mark.slow
def test_an_engines_compiled_blocks_are_its_own_on_the_same_weights(tiny_model, monkeypatch):
    """Its graphs run in every forward of a block, and draw what eager blocks draw."""
    graphs = []

    def counting(graph, _inputs):
        def call(*args):
            graphs.append(1)
            return graph(*args)

        return call

    monkeypatch.setattr(diffusers_engine, "COMPILE_BACKEND", counting)
    engine = engine_of(tiny_model, torch_compile=True)
    assert compiled(engine.transformer) == {True}
    assert compiled(tiny_model.transformer) == {False}
    own = {p.data_ptr() for p in tiny_model.transformer.parameters()}
    assert {p.data_ptr() for p in base_weights(engine).values()} <= own
    state = synced(engine)
    found = log_probs(engine, tiny_model)
    blocks = len(engine.transformer.transformer_blocks)
    assert sum(graphs) == 5 * blocks
    eager = engine_of(load_model("asset:tiny_qwen_image"))
    eager.sync(state, 0)
    assert_close(found, log_probs(eager, tiny_model), rtol=0, atol=LOG_PROB)


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [1, 16])
def test_lengths_of_prompts_in_multiples_make_fewer_graphs(tiny_model, monkeypatch, multiple):
    """Three batches whose longest prompts differ, one of them without padding."""
    graphs = []
    monkeypatch.setattr(diffusers_engine, "COMPILE_BACKEND", lambda graph, _inputs: graphs.append(1) or graph)
    torch._dynamo.reset()
    engine = engine_of(tiny_model, torch_compile=True)
    tiny_model.prompt_multiple = multiple
    synced(engine)
    for words in (["x", 'the text "12"'], ["x", 'the text "345"'], ["y", "x"]):
        engine.generate(request_for(tiny_model, words, index=(0, 1), starts=(0, 0)))
    assert (len(graphs) == 1) is (multiple == 16)
    assert graphs


@pytest.mark.slow
def test_an_engine_shares_an_actors_compiled_blocks(tiny_model):
    lora = ModelConfig(lora_rank=4, lora_alpha=8, torch_compile=True)
    for compiles in (True, False):
        engine = engine_of(load_model("asset:tiny_qwen_image"), lora=lora, torch_compile=compiles)
        assert engine._shares
        assert compiled(engine.transformer) == {False}  # the actor will do it
    config = RolloutConfig(dtype="float32", torch_compile=True)
    alone = DiffusersEngine.from_config(config, load_model("asset:tiny_qwen_image"), lora, "cpu", alone=True)
    assert compiled(alone.transformer) == {True}


@pytest.mark.slow
@pytest.mark.parametrize("merge_adapter", [False, True])
def test_inductor_has_one_graph_for_all_blocks(tiny_model, merge_adapter):
    """Nothing breaks it: no complex numbers, no hook; another adapter needs no new one."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    engine = engine_of(tiny_model, torch_compile=True, merge_adapter=merge_adapter)
    eager = engine_of(load_model("asset:tiny_qwen_image"))
    for seed in (1, 2):
        eager.sync(synced(engine, seed), seed)
        found, expected = (one.generate(request_for(tiny_model, cfg=4.0)) for one in (engine, eager))
        assert_close(found.batch["latents"], expected.batch["latents"], rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_rotations_by_real_numbers_are_those_by_complex_ones():
    """Against float64; gradients too. Complex frequencies, as other transformers have them, go diffusers' way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, 8, generator=generator).requires_grad_()
    angles = torch.randn(7, 4, generator=generator)
    frequencies = torch.polar(torch.ones_like(angles), angles)
    wide = torch.view_as_complex(x.double().detach().unflatten(-1, (4, 2))) * frequencies.to(torch.complex128)[:, None]
    exact = torch.view_as_real(wide).flatten(-2)
    found = _rotate(x, torch.view_as_real(frequencies))
    theirs = _rotate(x, frequencies)
    for one in (found, theirs):
        assert_close(one.double(), exact, rtol=1e-6, atol=1e-6)
    weights = torch.randn(exact.shape, generator=generator)
    gradients = [torch.autograd.grad((one * weights).sum(), x)[0] for one in (found, theirs)]
    assert_close(*gradients, rtol=1e-6, atol=1e-6)
    assert _rotate(x.bfloat16(), torch.view_as_real(frequencies)).dtype == torch.bfloat16
