"""Peculiarities of Z-Image, Lumina2, CogView4 and AuraFlow, besides ``test_families.py``'s tests of all."""

import pytest
import torch
from tiny_families import TINY, cogview4, lumina2, z_image
from tolerances import EMBEDDING, LATENT
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, PromptEncoder
from flowgrpo_rc.models.aura_flow import AuraFlow
from flowgrpo_rc.models.cogview4 import CogView4
from flowgrpo_rc.models.lumina2 import Lumina2
from flowgrpo_rc.models.z_image import ZImage
from flowgrpo_rc.prompt import Prompt

ADAPTERS = {"z_image": ZImage, "lumina2": Lumina2, "cogview4": CogView4, "aura_flow": AuraFlow}
SHORT, LONG = "x", "a caption of so many letters that it takes more than thirty-two tokens"
SIZE = (32, 48)


@pytest.fixture(scope="module", params=list(ADAPTERS))
def name(request):
    return request.param


@pytest.fixture
def model(name):
    return ADAPTERS[name](TINY[name].build())


def velocity_of_the_short_one(model, prompts):
    """Of the first image, whose prompt is ``SHORT``."""
    latents = torch.randn(1, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    count = len(prompts)
    cond = Conditioning(PromptEncoder(model, 112)(prompts), None, 1.0, None, *SIZE)
    with torch.no_grad():
        return model.velocity(
            model.transformer, latents.expand(count, *latents.shape[1:]), torch.full((count,), 600.0), cond
        )[0]


def test_a_longer_prompt_of_the_batch_changes_nothing(model):
    alone = velocity_of_the_short_one(model, [SHORT])
    together = velocity_of_the_short_one(model, [SHORT, LONG])
    assert_close(together, alone, atol=LATENT, rtol=0)
    other = velocity_of_the_short_one(model, [LONG, SHORT])
    assert (other - alone).abs().max() > 100 * LATENT


def test_the_tokens_that_are_kept_are_those_that_are_read(name, model):
    length = TINY[name].length
    [(tokenizer, kept)] = model.tokenizers(length)
    text = LONG * 2
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    last = len(text) - len(tokens) + kept  # a token a letter, and perhaps one before them
    all_read, cut, changed = (
        model.encode([said], length)[0].embeds
        for said in (text[:last], text[:last] + "z", text[: last - 1] + chr(ord(text[last - 1]) + 1))
    )
    assert kept < len(tokens)
    assert len(cut) == model.prompt_tokens(length)
    # Where a closing template stands behind the prompt, the cut is in it or before it.
    assert_close(cut[: len(all_read)][:kept], all_read[: len(cut)][:kept], atol=EMBEDDING, rtol=0)
    assert (changed[: len(cut)] - cut[: len(changed)]).abs().max() > 100 * EMBEDDING


def test_z_images_longest_caption_and_largest_image_have_positions():
    model = ZImage(z_image.build())
    [embeds] = [row.embeds for row in model.encode(["a" * 300], model.longest_prompt)]
    assert len(embeds) == model.longest_prompt == 224
    cond = Conditioning(PromptEncoder(model, model.longest_prompt)(["a" * 300]), None, 1.0, None, 64, 64)
    latents = torch.zeros(1, *model.latent_shape(64, 64))
    with torch.no_grad():
        assert model.velocity(model.transformer, latents, torch.tensor([500.0]), cond).isfinite().all()


def test_lumina2_gives_prompts_alone_its_system_prompt():
    model = Lumina2(lumina2.build())
    pipe = model.pipe
    said, said_mask, unsaid, unsaid_mask = pipe.encode_prompt(["a cat"], negative_prompt=[""], max_sequence_length=80)
    _, _, bad, bad_mask = pipe.encode_prompt(["a cat"], negative_prompt=["bad"], max_sequence_length=80)
    asked = ["a cat", "", Prompt("bad", negative=True)]
    prompt, negative, steered = (row.embeds for row in model.encode(asked, 80))
    assert_close(steered, bad[0][bad_mask[0].bool()], atol=EMBEDDING, rtol=0)
    assert_close(prompt, said[0][said_mask[0].bool()], atol=EMBEDDING, rtol=0)
    assert_close(negative, unsaid[0][unsaid_mask[0].bool()], atol=EMBEDDING, rtol=0)
    assert len(negative) == 1


@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_cogview4s_attention_is_that_of_diffusers(cfg_scale):
    """The same weights in a pipeline that no adapter has touched."""
    plain = cogview4.build()
    model = CogView4(cogview4.build())
    assert type(plain.transformer.transformer_blocks[0].attn1.processor) is not type(
        model.transformer.transformer_blocks[0].attn1.processor
    )
    expected = plain(
        LONG,
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=1,
        guidance_scale=cfg_scale,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=96,
        output_type="latent",
    ).images
    encoder = PromptEncoder(model, 96)
    negative = encoder([""]) if cfg_scale > 1 else None
    cond = Conditioning(encoder([LONG]), negative, cfg_scale, None, *SIZE)
    schedule = model.schedule(1, *SIZE)
    noise = model.initial_noise(torch.Generator().manual_seed(0), *SIZE)[None]
    with torch.no_grad():
        velocity = model.velocity(model.transformer, noise, schedule.timesteps, cond)
    assert_close(noise + (schedule.sigmas[1] - schedule.sigmas[0]) * velocity, expected, atol=LATENT, rtol=0)


def test_cogview4s_padding_has_finite_gradients():
    model = CogView4(cogview4.build())
    encoder = PromptEncoder(model, 96)
    cond = Conditioning(encoder([SHORT, LONG]), None, 1.0, None, *SIZE)
    latents = torch.randn(2, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    model.velocity(model.transformer, latents, torch.full((2,), 600.0), cond).square().sum().backward()
    gradients = [p.grad for p in model.transformer.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
