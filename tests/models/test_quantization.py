"""A frozen base in 8 or 4 bits, under a LoRA; ``make quantization`` installs what this needs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests_support import before_step, power_cut, rows_of
from tolerances import LOG_PROB
from torch import nn
from torch.testing import assert_close

from flowgrpo_rc.actor.config import OPTIMIZERS
from flowgrpo_rc.actor.optimizer import optimizer_class
from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.base import compute_dtype
from flowgrpo_rc.models.config import BASE_QUANTIZATIONS
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
from flowgrpo_rc.models.quantization import (
    NF4_BLOCK,
    QuantizedLinear,
    block_layers,
    dequantized,
    is_quantized,
    numbers_of,
)
from flowgrpo_rc.planner.live_bytes import LiveBytes
from flowgrpo_rc.planner.passes import Passes
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig
from flowgrpo_rc.sde import log_prob, transition
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")

TINY = "asset:tiny_qwen_image"
LORA = ModelConfig(lora_rank=4)
ROWS = 4
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""QLoRA's table (arXiv 2305.14314, appendix E)."""


@pytest.fixture(scope="module", params=BASE_QUANTIZATIONS)
def quantization(request):
    return request.param


@pytest.fixture(scope="module")
def rounded(quantization):
    return load_model(TINY, dtype="bfloat16", quantization=quantization)


@pytest.fixture(scope="module")
def plain():
    return load_model(TINY, dtype="bfloat16")


def layers(transformer):
    return {name: m for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}


def tensors_of(weight):
    """The tensors of a weight."""
    if not is_quantized(weight):
        return [weight]
    if hasattr(weight, "quant_state"):
        return [weight.data, weight.quant_state.absmax]
    parts = (getattr(weight, name, None) for name in ("qdata", "scale", "zero_point"))
    return [part for part in parts if part is not None]


def reference(weight, held, quantization):
    """A weight rounded by the definition, in float64; in 8 bits with the scales of ``held``."""
    wide = weight.double()
    if quantization == "nf4":
        blocks = wide.flatten().view(-1, NF4_BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        table = torch.tensor(NF4, dtype=torch.float64)
        nearest = ((blocks / scale)[..., None] - table).abs().argmin(-1)
        return (table[nearest] * scale).view(wide.shape)
    scale = held.scale.double()
    largest = {"int8": 127.5, "fp8": 448}[quantization]
    assert_close(wide.abs().amax(dim=1, keepdim=True) / scale, torch.full_like(scale, largest), rtol=2**-8, atol=0)
    if quantization == "int8":
        return (wide / scale).round().clamp(-128, 127) * scale
    return (wide / scale).float().to(torch.float8_e4m3fn).double() * scale


def test_the_blocks_layers_are_rounded_and_no_others(rounded, plain):
    found = layers(rounded.transformer)
    assert {type(m) for n, m in found.items() if n.startswith("transformer_blocks.")} == {QuantizedLinear}
    assert {type(m) for n, m in found.items() if not n.startswith("transformer_blocks.")} == {nn.Linear}
    theirs = layers(plain.transformer)
    for name, layer in found.items():
        assert is_quantized(layer.weight) == isinstance(layer, QuantizedLinear)
        assert numbers_of(layer.weight) == theirs[name].weight.numel()
        if not is_quantized(layer.weight):
            assert torch.equal(layer.weight, theirs[name].weight)
        assert torch.equal(layer.bias, theirs[name].bias)
    assert compute_dtype(rounded.transformer) == torch.bfloat16
    assert not any(p.requires_grad for p in rounded.transformer.parameters())


def test_weights_are_those_of_the_definition(rounded, plain, quantization):
    """Up to the rounding to bfloat16, and weights half-way between two numbers of ``nf4``."""
    theirs = layers(plain.transformer)
    for name, layer in layers(rounded.transformer).items():
        if not isinstance(layer, QuantizedLinear):
            continue
        found = dequantized(layer.weight).double()
        weight = theirs[name].weight
        expected = reference(weight, layer.weight, quantization)
        assert found.shape == weight.shape
        close = torch.isclose(found, expected, rtol=2**-7, atol=0)
        assert close.double().mean() > 0.999


def test_values_and_gradients_are_those_of_the_dequantised_weights(rounded):
    """Bit for bit, whether autograd records or not, so that engine and actor agree."""
    layer = next(m for m in rounded.transformer.modules() if isinstance(m, QuantizedLinear))
    x = torch.randn(5, layer.in_features, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    taught, ours = (x.clone().requires_grad_() for _ in range(2))
    expected = F.linear(taught, dequantized(layer.weight), layer.bias)
    found = layer(ours)
    with torch.no_grad():
        assert torch.equal(layer(x), found)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_close(ours.grad, taught.grad, rtol=0, atol=0)


def test_autograd_keeps_no_dequantised_weight(rounded):
    kept = []
    layer = next(m for m in rounded.transformer.modules() if isinstance(m, QuantizedLinear))
    x = torch.randn(5, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert max(kept, default=0) < numbers_of(layer.weight)


@pytest.mark.parametrize("name", ["flux_dev", "stable_diffusion_3", "z_image"])
def test_layers_outside_of_blocks_stay_whatever_their_names_are(name, quantization, folder_of_family):
    transformer = load_model(folder_of_family(name), dtype="bfloat16", quantization=quantization).transformer
    rounded = {name for name, layer in layers(transformer).items() if is_quantized(layer.weight)}
    assert rounded == block_layers(transformer).keys()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_has_the_bytes_of_weights_and_update(quantization, recompute):
    asked = RolloutConfig(pipeline=PipelineConfig(height=64, width=64, max_sequence_length=64))
    pipeline = FakePipeline(TINY, torch.bfloat16, quantization)
    passes = Passes(pipeline, LORA, "float32", asked, autocast=False, lora_compute_dtype="bfloat16")
    planned = passes.update(ROWS, recompute=recompute, reference=False, detached=False, accumulates=False)
    with pipeline.fake:
        latents, level, conditioning = passes._state(ROWS)
    model = load_model(TINY, dtype="bfloat16", quantization=quantization)
    transformer = model.transformer
    assert passes.sizes.parameters == sum(map(numbers_of, transformer.parameters()))
    assert passes.sizes.transformer == sum(t.nbytes for p in transformer.parameters() for t in tensors_of(p))
    attach_lora(transformer, model, LORA, dtype=torch.float32, compute_dtype=torch.bfloat16)
    if recompute:
        transformer.enable_gradient_checkpointing()
    latents, level = (torch.rand(tensor.shape) for tensor in (latents, level))
    prompts = conditioning.prompts.map(lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype))
    conditioning = replace(conditioning, prompts=prompts)

    def step():
        velocity = model.velocity(transformer, latents, level * 1000, conditioning)
        made = transition(latents, velocity, level, level / 2, noise_level=0.7, sde_type="sde")
        log_prob(made, latents, sde_type="sde").sum().backward()
        for parameter in adapter_parameters(transformer).values():
            parameter.grad = None

    step()  # what is computed once and kept
    held = [tensor for p in transformer.parameters() for tensor in tensors_of(p)]
    with LiveBytes([*held, *transformer.buffers(), latents, level, prompts.embeds]) as live:
        step()
    assert live.peak == pytest.approx(planned.peak, rel=0.05)


def test_a_weight_that_is_not_finite_is_refused(quantization, tmp_path):
    model = load_model(TINY, dtype="float32")
    layers(model.transformer)["transformer_blocks.0.attn.to_q"].weight.data[3, 5] = float("nan")
    model.pipe.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not finite") as caught:
        PipelineLoader(str(tmp_path), dtype="bfloat16", quantization=quantization).load()
    assert "transformer" in str(caught.value)


@pytest.mark.run
def test_a_run_has_no_gap_and_resumes_to_the_same_numbers(quantization, small_config):
    """Its engine has the same rounded weights, and a run with another base does not continue it."""
    settings = [
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.algo.sde_window_size=1",
    ]
    optimizer = "actor_rollout_ref.actor.optim.name=adamw_8bit"
    rounded = [*settings, optimizer, f"actor_rollout_ref.model.quantization={quantization}"]
    whole = FlowGRPOTrainer(small_config(*rounded, folder="whole")).fit().root
    steps = [row for row in rows_of(whole) if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["rollout_sync/engine_gap_abs_mean"] < LOG_PROB
        assert row["actor/grad_norm"] > 0
    auto = ("trainer.resume_mode=auto", "trainer.save_freq=1")
    first = FlowGRPOTrainer(small_config(*rounded, *auto, folder="parts"))
    before_step(first, 1, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    with pytest.raises(CheckpointError, match=r"optim.name: got adamw, .* the moments of adamw_8bit; set it to"):
        FlowGRPOTrainer(small_config(*rounded, optimizer.removesuffix("_8bit"), *auto, folder="parts")).fit()
    with pytest.raises(CheckpointError, match="transformer"):
        FlowGRPOTrainer(small_config(*settings, *auto, folder="parts")).fit()
    assert rows_of(FlowGRPOTrainer(small_config(*rounded, *auto, folder="parts")).fit().root) == rows_of(whole)


@pytest.mark.run
def test_an_engine_elsewhere_may_have_another_attention_backend(quantization, small_config):
    model = "actor_rollout_ref.model"
    rollout = "actor_rollout_ref.rollout"
    settings = [f"{model}.dtype=bfloat16", f"{model}.quantization={quantization}", f"{rollout}.dtype=bfloat16"]
    settings += [f"{rollout}.placement=process", f"{rollout}.rollout_attn_backend=_native_math"]
    steps = [row for row in rows_of(FlowGRPOTrainer(small_config(*settings)).fit().root) if "reward/mean" in row]
    assert len(steps) == 2
    assert all(row["rollout_sync/engine_gap_abs_mean"] < 1e-3 for row in steps)


def test_moments_in_8_bits_learn_as_adamw_does():
    """The same gradients move a matrix as far, up to the rounding of moments; a small one to float32's rounding."""
    generator = torch.Generator().manual_seed(0)
    for shape, tolerance, kind in (((64, 128), 0.05, torch.uint8), ((16, 16), 1e-6, torch.float32)):
        weights = [torch.nn.Parameter(torch.zeros(shape)) for _ in OPTIMIZERS]
        steps = [optimizer_class(name)([w], lr=1e-3) for name, w in zip(OPTIMIZERS, weights, strict=True)]
        for _ in range(20):
            gradient = torch.randn(shape, generator=generator)
            for step, weight in zip(steps, weights, strict=True):
                weight.grad = gradient.clone()
                step.step()
        plain, rounded = weights
        assert steps[1].state[rounded]["state1"].dtype == kind
        assert (rounded - plain).norm() < tolerance * plain.norm()
