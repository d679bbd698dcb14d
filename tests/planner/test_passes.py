"""Passes under fake tensors: blocks, guidance, decoding, references, and what is refused."""

import json

import pytest
import torch
from small_pipelines import PLAIN, write

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.planner.passes import Passes
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig


def passes_of(folder, family, *, guided=False, height=64, reference_area=None, **model):
    asked = PipelineConfig(
        height=height,
        width=64,
        true_cfg_scale=4.0 if guided else 1.0,
        max_sequence_length=24,
        guidance_scale=3.5 if family == "flux" else None,
        reference_area=reference_area,
    )
    lora = ModelConfig(**{"lora_rank": 4, "target_modules": ["to_q"], **model})
    return Passes(FakePipeline(folder, torch.float32), lora, "float32", RolloutConfig(pipeline=asked), autocast=False)


KINDS = {
    "qwen": [("QwenImageTransformerBlock", 6)],
    # With two attentions, with one, and the last, which drops the prompt.
    "sd3": [("JointTransformerBlock", 3), ("JointTransformerBlock", 2), ("JointTransformerBlock", 1)],
    "flux": [("FluxTransformerBlock", 3), ("FluxSingleTransformerBlock", 4)],
}


@pytest.fixture
def passes(family, tmp_path):
    """Passes of one family, without guidance."""
    return passes_of(write(tmp_path, family), family)


@pytest.mark.parametrize("family", KINDS)
def test_blocks_are_told_apart_by_their_shape_and_decoding_is_linear_in_images(family, passes):
    assert [(kind.name, len(kind.blocks)) for kind in passes.kinds] == KINDS[family]
    one, two = passes.decode(1), passes.decode(2)
    assert two.peak == pytest.approx(2 * one.peak, rel=0.01)
    assert two.forward_flops == 2 * one.forward_flops > 0


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
@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_a_reference_costs_what_as_many_pixels_more_do(family, tmp_path):
    """A square reference of 64 x 64 pixels beside a drawing of 64 x 64, and a drawing of 128 x 64."""
    folder = write(tmp_path, family)
    expected = passes_of(folder, family, height=128).forward(2)
    index = tmp_path / "model_index.json"
    editor = {"flux": "FluxKontextPipeline", "qwen": "QwenImageEditPipeline"}[family]
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": editor}))
    found, larger = (passes_of(folder, family, reference_area=side * side).forward(2) for side in (64, 96))
    if family == "flux":
        assert found.forward_flops == expected.forward_flops
        assert found.peak == pytest.approx(expected.peak, rel=0.05)  # the longer sequence is a copy
    else:  # its text encoder sees the image too
        assert found.forward_flops > expected.forward_flops
    assert larger.forward_flops > found.forward_flops


def test_a_missing_guidance_scale_and_a_single_block_are_refused(tmp_path):
    folder = write(tmp_path, "flux", guidance_embeds=True)
    with pytest.raises(ValueError, match="guidance_scale: got None for this model"):
        passes_of(folder, "qwen")
    with pytest.raises(ValueError, match=r"target_modules: transformer_blocks\.0\.attn\.to_q names a single block"):
        passes_of(folder, "flux", target_modules=["transformer_blocks.0.attn.to_q"])
