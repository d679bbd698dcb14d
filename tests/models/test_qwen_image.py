"""The Qwen-Image adapter against diffusers' own pipeline."""

import numpy as np
import pytest
import torch
from tolerances import LATENT, guided
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, UnsupportedModelError, load_model
from flowgrpo_rc.models.base import EncodedPrompt
from flowgrpo_rc.models.load import read_pipeline_class
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.models.prompts import pad
from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest
from flowgrpo_rc.rollout.seeds import seed_for

PROMPTS = ['the text "42"', 'the text "07"', 'the text "93"']
SEEDS = [seed_for(0, 0, 0, i) for i in range(3)]


def sample(model, cfg_scale, steps):
    """Deterministic images through our engine, float32, with a fresh (zero) adapter."""
    engine = DiffusersEngine(
        model, ModelConfig(lora_rank=4, lora_alpha=4), dtype=torch.float32, micro_batch_size=2, device="cpu"
    )
    engine.sync(adapter_state(engine.transformer, engine.adapter), 0)
    encoder = PromptEncoder(model, 512)
    negative = encoder([" "] * 3) if cfg_scale > 1 else None
    conditioning = Conditioning(encoder(PROMPTS), negative, cfg_scale, None, 32, 32)
    request = RolloutRequest(conditioning, torch.arange(3), steps, SEEDS, None)
    return engine.generate(request)


@pytest.mark.portable
@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_images_equal_the_diffusers_pipeline(tiny_model, cfg_scale):
    negative = {"negative_prompt": [" "] * 3} if cfg_scale > 1 else {}
    expected = tiny_model.pipe(
        prompt=PROMPTS,
        height=32,
        width=32,
        num_inference_steps=6,
        true_cfg_scale=cfg_scale,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="np",
        **negative,
    ).images
    ours = sample(tiny_model, cfg_scale, 6).images.numpy()
    # decoding in two dimensions may round one grey level differently
    assert np.abs((expected * 255).round() - ours).max() <= 1
    assert ours.std() > 20


@pytest.mark.portable
def test_one_frame_in_2d_equals_the_vae_own(tiny_model):
    """Encoding and decoding of one frame, and of three, with and without the short way."""
    vae, generator = tiny_model.pipe.vae, torch.Generator().manual_seed(0)
    image, video = (torch.rand(2, 3, n, 32, 32, generator=generator) * 2 - 1 for n in (1, 3))

    def run():
        with torch.no_grad():
            latents = [vae.encode(x).latent_dist.mode() for x in (image, video)]
            return latents + [vae.decode(x).sample for x in latents]

    short = run()
    changed = [m for m in vae.modules() if m.__dict__.pop("forward", None) is not None]
    assert len(changed) > 10
    for ours, original in zip(short, run(), strict=True):
        assert_close(ours, original, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("multiple", "width"), [(1, 5), (4, 8), (5, 5), (8, 8)])
def test_prompts_are_padded_to_a_multiple(multiple, width):
    rows = [EncodedPrompt(torch.full((length, 3), float(length))) for length in (2, 5)]
    prompts = pad(rows, multiple)
    assert prompts.embeds.shape == (2, width, 3)
    assert prompts.embeds[:, :, 0].sum(1).tolist() == [4, 25]
    assert prompts.lengths == (2, 5)
    assert prompts.mask.sum(1).tolist() == [2, 5]
    assert pad(rows[1:], multiple).lengths == (None if width == 5 else (5,))


def test_padding_to_a_multiple_changes_a_velocity_by_rounding(tiny_model):
    latents = torch.randn(2, *tiny_model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for multiple in (1, 32):
        tiny_model.prompt_multiple = multiple
        encode = PromptEncoder(tiny_model, 64)
        cond = Conditioning(encode(["a", 'the text "12"']), encode([" ", " "]), 4.0, None, 32, 32)
        assert cond.prompts.embeds.shape[1] % multiple == 0
        with torch.no_grad():
            found.append(tiny_model.velocity(tiny_model.transformer, latents, torch.tensor([900.0, 100.0]), cond))
    assert_close(*found, rtol=0, atol=guided(LATENT, 4.0))


@pytest.mark.portable
def test_longer_prompts_pad_with_a_mask(tiny_model):
    """A padded short prompt gives the velocity that it gives alone."""
    encoder = PromptEncoder(tiny_model, 512)
    alone, padded = encoder([PROMPTS[0]]), encoder([PROMPTS[0], 'the text "42" and the text "43"'])
    assert alone.mask is None
    assert padded.mask is not None
    assert padded.mask.sum(1).tolist() == [len(alone.embeds[0]), padded.embeds.shape[1]]
    latents = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    velocities = []
    for prompts in (alone, padded):
        cond = Conditioning(prompts, None, 1.0, None, 32, 32).rows(torch.tensor([0]), torch.device("cpu"))
        with torch.no_grad():
            velocities.append(tiny_model.velocity(tiny_model.transformer, latents, torch.tensor([500.0]), cond))
    assert_close(velocities[0], velocities[1], atol=2e-5, rtol=1e-4)


def test_refuses_what_is_not_a_supported_pipeline(tmp_path):
    with pytest.raises(UnsupportedModelError, match="holds no model_index.json"):
        read_pipeline_class(str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(UnsupportedModelError, match="is a StableDiffusionPipeline; supported: QwenImagePipeline,"):
        load_model(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="neither an existing folder nor a pipeline on the hub"):
        read_pipeline_class("nobody/no-such-model")
    with pytest.raises(UnsupportedModelError, match="model.path: is empty"):
        read_pipeline_class("")
    with pytest.raises(FileNotFoundError, match="asset:nothing is not shipped.*asset:tiny_qwen_image"):
        read_pipeline_class("asset:nothing")
