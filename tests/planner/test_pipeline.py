"""Pipelines from configuration files: exact counts, and no memory."""

import json
from functools import cache

import pytest
import torch
from small_pipelines import write
from torch._subclasses.fake_tensor import FakeTensor

from flowgrpo_rc.planner.pipeline import FakePipeline, PlanError, bytes_of, parameters_of, shipped_names

CLIP_L = 123_650_304
CLIP_G = 694_659_840
T5_XXL = 4_762_310_656
UMT5_XXL = 5_680_910_336
QWEN3_4B = 4_022_468_096
GEMMA2_2B = 2_614_341_888
KL_VAE = 83_819_683
FLUX2_VAE = 84_046_115
SDXL_VAE = 83_653_863
WAN_VAE = 126_892_531
QWEN_IMAGE = (20_430_401_088, WAN_VAE, [8_292_166_656])
FLUX_DEV = (11_901_408_320, KL_VAE, [CLIP_L - 768 * 768, T5_XXL])
KLEIN_4B = (3_875_544_576, FLUX2_VAE, [QWEN3_4B])
Z_IMAGE = (6_154_908_736, KL_VAE, [QWEN3_4B])
COUNTS = {
    "Qwen/Qwen-Image": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit-2509": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit-2511": QWEN_IMAGE,
    "stabilityai/stable-diffusion-3.5-medium": (2_243_171_520, KL_VAE, [CLIP_L, CLIP_G, T5_XXL]),
    "stabilityai/stable-diffusion-3.5-large": (8_056_627_520, KL_VAE, [CLIP_L, CLIP_G, T5_XXL]),
    "black-forest-labs/FLUX.1-dev": FLUX_DEV,
    "black-forest-labs/FLUX.1-Kontext-dev": FLUX_DEV,
    "black-forest-labs/FLUX.1-schnell": (11_891_178_560, *FLUX_DEV[1:]),
    "black-forest-labs/FLUX.2-dev": (32_223_281_152, FLUX2_VAE, [24_011_361_280]),
    "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-9B": (9_078_581_248, FLUX2_VAE, [8_190_735_360]),
    "Tongyi-MAI/Z-Image": Z_IMAGE,
    "Tongyi-MAI/Z-Image-Turbo": Z_IMAGE,
    "Alpha-VLLM/Lumina-Image-2.0": (2_609_769_152, KL_VAE, [GEMMA2_2B]),
    "zai-org/CogView4-6B": (6_369_118_272, 406_100_643, [8_779_194_368]),
    "lodestones/Chroma1-HD": (8_899_983_424, KL_VAE, [T5_XXL]),
    "fal/AuraFlow-v0.3": (6_858_605_568, SDXL_VAE, [1_223_550_976]),
    "briaai/BRIA-3.2": (3_785_669_392, SDXL_VAE, [T5_XXL]),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": (1_604_462_752, 312_250_275, [GEMMA2_2B]),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1_418_996_800, WAN_VAE, [UMT5_XXL]),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (4_999_787_712, 704_688_668, [UMT5_XXL]),
}
"""Parameters of the transformer, the VAE and the text encoders, of which the README beside the files says more."""


def test_every_shipped_pipeline_is_counted():
    assert shipped_names() == sorted(COUNTS)


@cache
def in_bfloat16(name):
    """A shipped pipeline, built once."""
    return FakePipeline(name, torch.bfloat16)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_shipped_pipelines(name):
    pipeline = in_bfloat16(name)
    transformer, vae, text_encoders = COUNTS[name]
    assert parameters_of(pipeline.transformer) == transformer
    assert parameters_of(pipeline.vae) == vae
    assert [parameters_of(encoder) for encoder in pipeline.text_encoders] == text_encoders
    for network in (pipeline.transformer, pipeline.vae, *pipeline.text_encoders):
        # BRIA's pipeline has its VAE in float32.
        dtype = torch.float32 if name.startswith("briaai/") and network is pipeline.vae else torch.bfloat16
        for tensor in (*network.parameters(), *network.buffers()):
            assert isinstance(tensor, FakeTensor)
            assert tensor.dtype == dtype or not tensor.is_floating_point()


def test_position_embeddings_of_sd3_are_weights_that_no_parameter_counts():
    """384 x 384 places of 1536 numbers."""
    pipeline = in_bfloat16("stabilityai/stable-diffusion-3.5-medium")
    assert bytes_of(pipeline.transformer) == 2 * (2_243_171_520 + 384 * 384 * 1536)


def test_the_tiny_model_is_counted_as_it_is_loaded(tiny_model):
    pipeline = FakePipeline("asset:tiny_qwen_image", torch.float32)
    for fake, loaded in [
        (pipeline.transformer, tiny_model.transformer),
        (pipeline.vae, tiny_model.pipe.vae),
        (pipeline.text_encoders[0], tiny_model.pipe.text_encoder),
    ]:
        assert parameters_of(fake) == parameters_of(loaded)
        assert bytes_of(fake) == bytes_of(loaded)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "is empty; give a pipeline folder, or one of .*Qwen/Qwen-Image"),
        ("nobody/nothing", "nobody/nothing is no folder of a pipeline here.*shipped with flowgrpo_rc are those of"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, says):
    with pytest.raises(PlanError, match=says):
        FakePipeline(path, torch.float32)


def test_files_that_cannot_be_used_are_named(tmp_path):
    folder = write(tmp_path / "p", "qwen")
    config = tmp_path / "p" / "transformer" / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"num_attention_heads": 4', '"num_attention_heads": "many"'))
    with pytest.raises(PlanError, match="transformer/config.json gives no QwenImageTransformer2DModel"):
        FakePipeline(folder, torch.float32)
    config.write_text("[1]")
    with pytest.raises(PlanError, match="config.json holds a JSON list; it must be an object"):
        FakePipeline(folder, torch.float32)
    config.unlink()
    with pytest.raises(PlanError, match="config.json cannot be read"):
        FakePipeline(folder, torch.float32)
    index = tmp_path / "p" / "model_index.json"
    index.write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(PlanError, match="is a StableDiffusionPipeline; what can be planned: QwenImagePipeline"):
        FakePipeline(folder, torch.float32)
