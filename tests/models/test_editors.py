"""Reference images in the families that edit: sizes, places, texts beside them, and the prompt stores' keys."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_families import flux, qwen_image_edit
from tiny_families.references import as_reference
from tolerances import LATENT
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, PromptEncoder, UnsupportedModelError, load_model
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.models.prompt_store import PromptStoreError, open_store
from flowgrpo_rc.prompt import Prompt


def reference(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return as_reference(Image.fromarray(pixels))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The tiny editors on the disk."""
    root = tmp_path_factory.mktemp("editors")
    flux.build(pipeline="FluxKontextPipeline").save_pretrained(root / "kontext")
    qwen_image_edit.build("QwenImageEditPipeline").save_pretrained(root / "edit")
    qwen_image_edit.build().save_pretrained(root / "plus")
    return root


@pytest.fixture(scope="module")
def kontext(folders):
    return load_model(str(folders / "kontext"))


@pytest.fixture(scope="module")
def plus(folders):
    return load_model(str(folders / "plus"))


@pytest.mark.parametrize(
    ("size", "trained"),
    [((60, 40), (1248, 832)), ((40, 60), (832, 1248)), ((9, 9), (1024, 1024)), ((99, 9), (1568, 672))],
)
def test_kontext_takes_the_nearest_shape_that_it_was_trained_with(kontext, size, trained):
    """A token of the tiny one has 8 pixels to a side."""
    assert kontext.reference_grid(reference(*size), None) == (trained[1] // 8, trained[0] // 8)


@pytest.mark.portable
def test_kontext_scales_by_itself_as_its_pipeline_does(kontext, monkeypatch):
    """With smaller shapes in the place of those that it was trained with."""
    shapes = [(32, 64), (48, 40), (64, 32)]
    monkeypatch.setattr("diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS", shapes)
    image = reference(60, 40)
    assert kontext.reference_grid(image, None) == (5, 6)
    expected = kontext.pipe(
        image=image.open(),
        prompt="x",
        height=32,
        width=32,
        max_area=32 * 32,
        num_inference_steps=1,
        max_sequence_length=24,
        guidance_scale=2.5,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    cond = Conditioning(PromptEncoder(kontext, 24)([Prompt("x", (image,))]), None, 1.0, 2.5, 32, 32)
    noise = kontext.initial_noise(torch.Generator().manual_seed(0), 32, 32)[None]
    schedule = kontext.schedule(1, 32, 32)
    with torch.no_grad():
        velocity = kontext.velocity(kontext.transformer, noise, schedule.timesteps, cond)
    assert_close(noise + (schedule.sigmas[1] - schedule.sigmas[0]) * velocity, expected, atol=LATENT, rtol=0)


@pytest.mark.parametrize("area", [None, 512 * 512])
@pytest.mark.parametrize("size", [(60, 40), (40, 60), (1000, 333), (7, 7)])
def test_qwen_scales_as_its_pipelines_do(plus, size, area):
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    width, height = calculate_dimensions(area or 1024 * 1024, size[0] / size[1])
    assert plus.reference_grid(reference(*size), area) == (height // 8, width // 8)


def velocity(model, prompts):
    """Of the same latents for each prompt."""
    embeds = PromptEncoder(model, 128)(prompts)
    scale = 2.5 if model.transformer.config.guidance_embeds else None
    cond = Conditioning(embeds, None, 1.0, scale, 32, 32)
    latents = torch.randn(1, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.velocity(
            model.transformer, latents.expand(len(prompts), -1, -1), torch.full((len(prompts),), 500.0), cond
        )


def test_what_is_drawn_depends_on_every_reference_and_its_place(kontext, plus):
    a, b, c = (reference(40, 60, seed) for seed in range(3))
    for model, images in ((kontext, [(a,), (b,)]), (plus, [(a, b), (b, a), (a, c), (c, b)])):
        rows = velocity(model, [Prompt("x", pair, 64 * 64) for pair in images])
        for i in range(len(rows)):
            for k in range(i):
                assert (rows[i] - rows[k]).abs().max() > 1e-3


def test_texts_are_cut_and_images_are_not(plus):
    """The text of the prompt and what the template has behind it count."""
    image = reference(60, 40)
    prompts = [Prompt("a much longer text than the other", (image,), 64 * 64), Prompt("x", (image,), 64 * 64)]
    whole, short = plus.encode(prompts, 1024)
    cut, same = plus.encode(prompts, 12)
    ending = plus.pipe.prompt_template_encode.split("{}")[1]
    length = len(plus.pipe.tokenizer(prompts[0].text + ending).input_ids)
    assert length > 12
    assert len(cut.embeds) == len(whole.embeds) - (length - 12)
    assert torch.equal(cut.embeds, whole.embeds[: len(cut.embeds)])
    assert torch.equal(same.embeds, short.embeds)
    assert torch.equal(cut.references, whole.references)


def test_a_store_of_another_vae_or_processor_is_refused(folders, tmp_path):
    """Reference tokens depend on the one, embeddings on the other."""
    store = tmp_path / "store"
    loader = PipelineLoader(str(folders / "edit"))
    prompt = Prompt("x", (reference(8, 8),), 32 * 32)
    PromptEncoder(loader.model, 64, open_store(str(store), loader.model, "float32"))([prompt])
    assert (prompt, 64) in open_store(str(store), PipelineLoader(str(folders / "edit")).model, "float32")
    other = shutil.copytree(folders / "edit", tmp_path / "vae")
    file = other / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file(weights | {"encoder.conv_in.weight": weights["encoder.conv_in.weight"] * 1.1}, file, {"format": "pt"})
    with pytest.raises(PromptStoreError, match=r"of another text encoder \(vae \w+ there and \w+ here\)"):
        open_store(str(store), PipelineLoader(str(other)).model, "float32")
    other = shutil.copytree(folders / "edit", tmp_path / "processor")
    file = other / "processor" / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["image_mean"] = [0.4, 0.4, 0.4]
    file.write_text(json.dumps(settings))
    with pytest.raises(PromptStoreError, match=r"of another text encoder \(processor \w+ there and \w+ here\)"):
        open_store(str(store), PipelineLoader(str(other)).model, "float32")


def test_encoding_holds_the_vae_no_longer_than_the_text_encoder(folders):
    loader = PipelineLoader(str(folders / "edit"))
    with loader.text_encoders():
        assert not any(p.is_meta for p in loader.model.pipe.vae.parameters())
    assert loader.model.pipe.text_encoder is None
    assert all(p.is_meta for p in loader.model.pipe.vae.parameters())


def test_torchvision_is_named_where_a_processor_needs_it(folders, monkeypatch):
    import transformers

    if not hasattr(transformers.Qwen2VLProcessor, "without_videos"):
        pytest.skip("torchvision is installed")
    monkeypatch.setattr(transformers, "Qwen2VLProcessor", transformers.Qwen2VLProcessor.__base__)
    with pytest.raises(UnsupportedModelError) as caught:
        PipelineLoader(str(folders / "plus"))
    assert str(caught.value) == (
        f"actor_rollout_ref.model.path: {folders / 'plus'} prepares reference images with a Qwen2VLProcessor, for "
        "which transformers needs torchvision; pip install '.[edit]' in a checkout"
    )
