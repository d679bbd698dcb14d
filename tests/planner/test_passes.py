"""Passes under fake tensors: scaled to full depth, and against real ones."""

import pytest
import torch
from small_pipelines import write
from tiny_families import TINY

from flowgrpo_rc.models.base import Conditioning, Prompts
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
from flowgrpo_rc.planner import passes
from flowgrpo_rc.planner.live_bytes import LiveBytes
from flowgrpo_rc.planner.passes import Passes, kinds_of
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig
from flowgrpo_rc.sde import log_prob, transition

TOKENS = 24


def rollout(family, guided):
    return RolloutConfig(
        pipeline=PipelineConfig(
            height=64,
            width=64,
            true_cfg_scale=4.0 if guided else 1.0,
            max_sequence_length=TOKENS,
            guidance_scale=3.5 if family == "flux" else None,
        )
    )


def passes_of(folder, family, *, guided=False, **model):
    lora = ModelConfig(**{"lora_rank": 4, "target_modules": ["to_q", "to_add_out"], **model})
    pipeline = FakePipeline(folder, torch.float32)
    return Passes(pipeline, lora, "float32", rollout(family, guided), autocast=False)


@pytest.fixture(scope="module", params=["qwen", "sd3", "flux"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / family, family)


def test_blocks_are_told_apart_by_their_shape(folder, family):
    kinds = [(kind.name, len(kind.blocks)) for kind in kinds_of(FakePipeline(folder, torch.float32).transformer)]
    assert (
        kinds
        == {
            "qwen": [("QwenImageTransformerBlock", 6)],
            # With two attentions, with one, and the last, which drops the prompt.
            "sd3": [("JointTransformerBlock", 3), ("JointTransformerBlock", 2), ("JointTransformerBlock", 1)],
            "flux": [("FluxTransformerBlock", 3), ("FluxSingleTransformerBlock", 4)],
        }[family]
    )


PLAIN = {"recompute": False, "reference": False, "detached": False, "accumulates": False}
EVERYTHING = {"recompute": True, "reference": True, "detached": False, "accumulates": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "guided", "how"),
    [
        ("qwen", True, EVERYTHING),  # six blocks of one kind
        ("qwen", True, PLAIN | {"detached": True}),
        ("flux", False, EVERYTHING),  # two kinds, of which both go on
    ],
)
def test_depth_scales_as_a_run_of_all_blocks_does(family, guided, how, tmp_path, monkeypatch):
    """Within a thousandth; operations to the last one. Afterwards the transformer has all its blocks."""
    folder = write(tmp_path / family, family)
    scaled = passes_of(folder, family, guided=guided)
    update = scaled.update(3, **how)
    places = {kind.place for kind in scaled.kinds}
    assert sum(len(kind.blocks) for kind in scaled.kinds) == sum(
        len(scaled.transformer.get_submodule(place)) for place in places
    )
    monkeypatch.setattr(passes, "SHORT", 100)
    whole = passes_of(folder, family, guided=guided)
    assert whole.lora_parameters == scaled.lora_parameters
    expected = whole.update(3, **how)
    assert update.peak == pytest.approx(expected.peak, rel=1e-3)
    for name in ("forward_flops", "backward_flops", "recomputed_flops"):
        assert getattr(update, name) == getattr(expected, name)
    assert (expected.recomputed_flops > 0) is how["recompute"]


@pytest.mark.slow
def test_guidance_in_two_calls_takes_the_memory_of_one_half(tmp_path):
    """A forward holds one half at a time, and has the operations of both; so does an update whose second half is
    detached, and then no backward pass goes through it."""
    folder = write(tmp_path / "qwen", "qwen", num_layers=2)
    joined = passes_of(folder, "qwen", guided=True)
    apart = passes_of(folder, "qwen", guided=True, batch_guidance=False)
    unguided = passes_of(folder, "qwen")
    both, one_by_one, single = joined.forward(3), apart.forward(3), unguided.forward(3)
    assert both.forward_flops == one_by_one.forward_flops == 2 * single.forward_flops
    assert single.peak <= one_by_one.peak < 1.1 * single.peak < 0.7 * both.peak
    detached = joined.update(3, **PLAIN | {"detached": True})
    alone = unguided.update(3, **PLAIN)
    assert detached.forward_flops == 2 * alone.forward_flops
    assert detached.backward_flops == alone.backward_flops
    assert alone.peak <= detached.peak <= alone.peak + single.peak  # the second half's forward, and no graph of it


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_real_step_has_the_living_bytes_of_the_fake_one(tiny_model, recompute):
    """Tensor for tensor: the same operations allocate the same storages, whatever they hold."""
    asked = RolloutConfig(pipeline=PipelineConfig(height=32, width=32, max_sequence_length=TOKENS, true_cfg_scale=4.0))
    lora = ModelConfig(lora_rank=4)
    pipeline = FakePipeline("asset:tiny_qwen_image", torch.float32)
    fake = Passes(pipeline, lora, "float32", asked, autocast=False)
    expected = fake.update(5, recompute=recompute, reference=False, detached=False, accumulates=False)

    transformer = tiny_model.transformer
    attach_lora(transformer, tiny_model, lora, dtype=torch.float32)
    if recompute:
        transformer.enable_gradient_checkpointing()
    prompts = Prompts(torch.randn(5, TOKENS, 64), torch.ones(5, TOKENS, dtype=torch.bool), lengths=(TOKENS,) * 5)
    conditioning = Conditioning(prompts, prompts, 4.0, None, 32, 32)
    latents = torch.randn(5, *tiny_model.latent_shape(32, 32))
    level = torch.full((5,), 0.5)

    def step():
        velocity = tiny_model.velocity(transformer, latents, level * 1000, conditioning)
        made = transition(latents, velocity, level, level / 2, noise_level=0.7, sde_type="sde")
        log_prob(made, latents, sde_type="sde").sum().backward()
        for parameter in adapter_parameters(transformer).values():
            parameter.grad = None

    step()  # what is computed once and kept
    given = [latents, level, prompts.embeds, prompts.mask]
    with LiveBytes([*transformer.parameters(), *transformer.buffers(), *given]) as live:
        step()
    assert live.peak + sum(tensor.nbytes for tensor in given) == pytest.approx(expected.peak, rel=5e-3)
    assert sum(stretch.flops for stretch in live.stretches) == sum(
        (expected.forward_flops, expected.backward_flops, expected.recomputed_flops)
    )


def test_decoding_is_linear_in_images_up_to_what_is_decoded_at_once(folder, family):
    of = passes_of(folder, family)
    one, two = of.decode(1), of.decode(2)
    assert two.peak == pytest.approx(2 * one.peak, rel=0.01)
    assert two.forward_flops == 2 * one.forward_flops > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TINY))
def test_every_family_can_be_planned(name, tmp_path):
    """Twice the rows, twice the work; a mask without values stands for prompts that are whole."""
    family = TINY[name]
    family.build().save_pretrained(tmp_path)
    scale, embedded = family.guidances[-1]
    asked = PipelineConfig(
        height=32, width=32, true_cfg_scale=scale, guidance_scale=embedded, max_sequence_length=family.length
    )
    planned = Passes(
        FakePipeline(str(tmp_path), torch.float32),
        ModelConfig(lora_rank=4),
        "float32",
        RolloutConfig(pipeline=asked),
        autocast=False,
    )
    one, two = (
        planned.update(rows, recompute=False, reference=False, detached=False, accumulates=False) for rows in (1, 2)
    )
    assert one.peak > 0
    assert two.forward_flops == 2 * one.forward_flops > 0
    assert two.backward_flops == 2 * one.backward_flops > 0


def test_a_guidance_scale_that_is_missing_is_refused(tmp_path):
    asked = RolloutConfig(pipeline=PipelineConfig(height=64, width=64))
    pipeline = FakePipeline(write(tmp_path / "flux", "flux", guidance_embeds=True), torch.float32)
    with pytest.raises(ValueError, match="guidance_scale: got None for this model"):
        Passes(pipeline, ModelConfig(), "float32", asked, autocast=False)
