"""FLUX.2's own parts: chat templates, reference images, batch-norm statistics, and dev's processor."""

import shutil

import damage
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image
from tiny_families import flux2
from tiny_families.references import as_reference
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from flowgrpo_rc.models import UnsupportedModelError, load_model
from flowgrpo_rc.models.flux2 import LARGEST_REFERENCE, Flux2
from flowgrpo_rc.prompt import Prompt, ReferenceImage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a klein and a dev; dev's index names the processor that the released one has."""
    root = tmp_path_factory.mktemp("flux2")
    for name, pipe in (("klein", flux2.build_klein()), ("dev", flux2.build_dev())):
        pipe.save_pretrained(root / name)
    damage.edit_json(
        root / "dev" / "model_index.json", lambda index: index.update(tokenizer=["transformers", "PixtralProcessor"])
    )
    return root


@pytest.fixture(scope="module")
def models(saved):
    return {name: load_model(str(saved / name)) for name in ("klein", "dev")}


def reference(width, height):
    """An image that has a size and no pixels."""
    return ReferenceImage("0", width, height, "train.jsonl:3")


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("name", ["klein", "dev"])
def test_as_many_tokens_of_a_prompt_are_read_as_are_said(models, name):
    """A token is a character here: what differs in the last one that is kept shows, what differs behind it does not."""
    model = models[name]
    ((_, kept),) = model.tokenizers(64)
    assert 20 < kept < 64
    same, other, last, changed = model.encode(
        ["a" * kept + "b", "a" * kept + "c", "a" * (kept - 1) + "b", "a" * (kept - 1) + "c"], 64
    )
    assert torch.equal(same.embeds, other.embeds)
    assert (last.embeds - changed.embeds).abs().max() > 1e-2
    assert same.embeds.shape == (model.prompt_tokens(64), model.transformer.config.joint_attention_dim)


def test_a_processor_needs_no_torchvision_and_gives_the_same_tokens(saved, models):
    """Its tokenizer alone is read. What the pipeline makes of it is what it makes of the tokenizer that was saved."""
    model = models["dev"]
    assert isinstance(model, Flux2)
    assert isinstance(model.pipe.tokenizer, PreTrainedTokenizerFast)
    prompts = ["a cat", "[IMG] é 東京", "a word and " * 30]
    expected, _ = flux2.build_dev().encode_prompt(prompts, max_sequence_length=64)
    rows = torch.stack([row.embeds for row in model.encode(prompts, 64)])
    assert_close(rows, expected, rtol=0, atol=0)


# ---------------------------------------------------------------- reference images


@pytest.mark.parametrize(
    ("width", "height"), [(64, 64), (67, 131), (1024, 1024), (1500, 900), (2048, 512), (511, 4088), (4000, 3001)]
)
@pytest.mark.parametrize("area", [None, 128 * 128])
def test_a_references_grid_is_what_the_pipeline_makes_of_it(models, width, height, area):
    image = Flux2ImageProcessor._resize_if_exceeds_area(Image.new("L", (width, height)), area or LARGEST_REFERENCE)
    model = models["klein"]
    assert model.reference_grid(reference(width, height), area) == (image.height // 4, image.width // 4)


@pytest.mark.parametrize(
    ("size", "area", "says"),
    [
        ((63, 200), None, "63x200 pixels; this model takes at least 64 to a side"),
        ((200, 63), None, "200x63 pixels; this model takes"),
        ((64, 513), None, "64x513 pixels; this model takes at least 64 to a side and at most 8 times as many"),
        ((400, 64), 4 * 4, "400x64 pixels, of which reference_area=16 leaves less than a token; set it higher"),
    ],
)
def test_references_that_the_pipeline_refuses(models, size, area, says):
    with pytest.raises(ValueError, match=rf"^train.jsonl:3: got a reference image of {says}") as caught:
        models["klein"].reference_grid(reference(*size), area)
    assert "\n" not in str(caught.value)


def test_reference_area_scales_the_picture_down_before_the_vae(models):
    """It gives the tokens of the picture that was made smaller beforehand."""
    pixels = np.random.default_rng(0).integers(0, 256, (130, 200, 3), dtype=np.uint8)
    large = Image.fromarray(pixels)
    small = Flux2ImageProcessor._resize_to_target_area(large, 80 * 80)
    prompts = [
        Prompt("a", (as_reference(large),)),
        Prompt("a", (as_reference(large),), 80 * 80),
        Prompt("a", (as_reference(small),)),
    ]
    whole, scaled, expected, none = models["klein"].encode([*prompts, "a"], 64)
    assert whole.reference_grids == ((32, 50),)
    assert whole.references.shape == (32 * 50, 16)
    assert scaled.reference_grids == expected.reference_grids == ((16, 24),)
    assert torch.equal(scaled.references, expected.references)
    assert none.references is None
    assert none.reference_grids == ()


# ---------------------------------------------------------------- what is refused


def test_the_distilled_klein_takes_no_guidance(tmp_path):
    pipe = flux2.build_klein(distilled=True)
    pipe.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    model.check_request(32, 32, None, 1.0)
    says = "true_cfg_scale: got 4; this model is distilled and its pipeline takes no classifier-free guidance"
    with pytest.raises(ValueError, match=says):
        model.check_request(32, 32, None, 4.0)


def test_a_transformer_of_dev_embeds_the_guidance_even_if_its_file_is_silent(saved, tmp_path):
    folder = shutil.copytree(saved / "dev", tmp_path / "model")
    damage.edit_json(folder / "transformer" / "config.json", lambda config: config.pop("guidance_embeds") and None)
    model = load_model(str(folder))
    model.check_request(32, 32, 4.0)
    with pytest.raises(ValueError, match="true_cfg_scale: got 4; this model has the guidance in its transformer"):
        model.check_request(32, 32, 4.0, 4.0)


@pytest.mark.parametrize("name", ["klein", "dev"])
def test_a_tokenizer_without_a_chat_template(saved, tmp_path, name):
    folder = shutil.copytree(saved / name, tmp_path / "model")
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedModelError, match="chat_template is not set"):
        load_model(str(folder))
