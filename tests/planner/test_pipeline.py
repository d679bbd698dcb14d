"""Pipelines from configuration files: exact counts, and no memory."""

import json

import pytest
import torch
from small_pipelines import write
from torch._subclasses.fake_tensor import FakeTensor

from flowgrpo_rc.planner.pipeline import FakePipeline, PlanError, bytes_of, parameters_of, shipped_names

CLIP_L = 123_650_304
CLIP_G = 694_659_840
T5_XXL = 4_762_310_656
KL_VAE = 83_819_683
FLUX = (KL_VAE, [CLIP_L - 768 * 768, T5_XXL])
COUNTS = {
    "Qwen/Qwen-Image": (20_430_401_088, 126_892_531, [8_292_166_656]),
    "stabilityai/stable-diffusion-3.5-medium": (2_243_171_520, KL_VAE, [CLIP_L, CLIP_G, T5_XXL]),
    "stabilityai/stable-diffusion-3.5-large": (8_056_627_520, KL_VAE, [CLIP_L, CLIP_G, T5_XXL]),
    "black-forest-labs/FLUX.1-dev": (11_901_408_320, *FLUX),
    "black-forest-labs/FLUX.1-schnell": (11_891_178_560, *FLUX),
    "Tongyi-MAI/Z-Image-Turbo": (6_154_908_736, KL_VAE, [4_022_468_096]),
}
"""Parameters of the transformer, the VAE and the text encoders; the README beside the files names the sources."""


def test_every_shipped_pipeline_is_counted():
    assert shipped_names() == sorted(COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_shipped_pipelines(name):
    pipeline = FakePipeline(name, torch.bfloat16)
    transformer, vae, text_encoders = COUNTS[name]
    assert parameters_of(pipeline.transformer) == transformer
    assert parameters_of(pipeline.vae) == vae
    assert [parameters_of(encoder) for encoder in pipeline.text_encoders] == text_encoders
    for network in (pipeline.transformer, pipeline.vae, *pipeline.text_encoders):
        for tensor in (*network.parameters(), *network.buffers()):
            assert isinstance(tensor, FakeTensor)
            assert tensor.dtype == torch.bfloat16 or not tensor.is_floating_point()


def test_position_embeddings_of_sd3_are_weights_that_no_parameter_counts(tmp_path):
    """32 x 32 places of 64 numbers, of four bytes each."""
    transformer = FakePipeline(write(tmp_path, "sd3"), torch.float32).transformer
    assert bytes_of(transformer) == 4 * (parameters_of(transformer) + 32 * 32 * 64)


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
        ("no/such/folder", "no/such/folder is no folder of a pipeline here.*shipped with flowgrpo_rc are those of"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, says):
    with pytest.raises(PlanError, match=says):
        FakePipeline(path, torch.float32)


def test_another_pipelines_files_come_from_the_hub(tmp_path, monkeypatch):
    """Configuration files alone are downloaded; a failed download names both ways out."""
    import huggingface_hub

    folder = write(tmp_path / "p", "qwen")
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "some/pipeline":
            return folder
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert FakePipeline("some/pipeline", torch.float32).class_name == "QwenImagePipeline"
    assert asked == [("some/pipeline", ["model_index.json", "*/config.json"])]
    with pytest.raises(PlanError, match=r"cannot be read from the hub \(no network\).*give its name on the hub"):
        FakePipeline("no/pipeline", torch.float32)


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
