"""Plans of the families that edit: reference tokens count like tokens of the drawing."""

import json

import pytest
import torch
from small_pipelines import write

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.planner.passes import Passes
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig

LORA = ModelConfig(lora_rank=4, target_modules=["to_q"])


def forward(folder, height, reference_area=None, guidance_scale=None):
    asked = RolloutConfig(
        pipeline=PipelineConfig(
            height=height,
            width=64,
            max_sequence_length=8,
            guidance_scale=guidance_scale,
            reference_area=reference_area,
        )
    )
    passes = Passes(FakePipeline(folder, torch.float32), LORA, "float32", asked, autocast=False)
    return passes.forward(2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_a_reference_costs_what_as_many_pixels_more_do(family, tmp_path):
    """A square reference of 64 x 64 pixels beside a drawing of 64 x 64, and a drawing of 128 x 64."""
    editor = {"flux": "FluxKontextPipeline", "qwen": "QwenImageEditPipeline"}[family]
    scale = 3.5 if family == "flux" else None
    folder = write(tmp_path / family, family)
    expected = forward(folder, 128, guidance_scale=scale)
    index = tmp_path / family / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": editor}))
    found = forward(folder, 64, 64 * 64, guidance_scale=scale)
    larger = forward(folder, 64, 96 * 96, guidance_scale=scale)
    if family == "flux":
        assert found.forward_flops == expected.forward_flops
        assert found.peak == pytest.approx(expected.peak, rel=0.05)  # the longer sequence is a copy
    else:  # its text encoder sees the image too
        assert found.forward_flops > expected.forward_flops
    assert larger.forward_flops > found.forward_flops
