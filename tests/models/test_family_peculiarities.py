"""Peculiarities of Chroma, Bria, Sana, Wan and Stable Diffusion 3, besides ``test_families.py``'s tests of all."""

import json

import pytest
import torch
from tiny_families import PROMPTS, bria, chroma, sana, stable_diffusion_3, wan
from tolerances import EMBEDDING, GRADIENT, LATENT
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, UnsupportedModelError, attention, load_model
from flowgrpo_rc.models.bria import Bria
from flowgrpo_rc.models.chroma import Chroma
from flowgrpo_rc.models.load import check_pipeline
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
from flowgrpo_rc.models.sana import Sana
from flowgrpo_rc.models.stable_diffusion_3 import StableDiffusion3
from flowgrpo_rc.models.wan import Wan
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.prompt import Prompt
from flowgrpo_rc.rollout import DiffusersEngine

LORA = ModelConfig(lora_rank=4, lora_alpha=12)
TOKENS = 24


def state(model, seed=0):
    """Latents of three images of 32 or 64 pixels to a side, a noise level, and the conditioning without guidance."""
    size = 2 * model._multiple
    latents = torch.randn(3, *model.latent_shape(size, size), generator=torch.Generator().manual_seed(seed))
    cond = Conditioning(PromptEncoder(model, TOKENS)(PROMPTS), None, 1.0, None, size, size)
    return latents, torch.full((3,), 500.0), cond


# ---------------------------------------------------------------- Chroma


def chroma_mask(model, prompts, length):
    """The mask that the adapter gives the transformer."""
    cond = Conditioning(PromptEncoder(model, length)(prompts), None, 1.0, None, 32, 32)
    latents = torch.zeros(len(prompts), *model.latent_shape(32, 32))
    return model._inputs(torch.float32, latents, torch.zeros(len(prompts)), cond)["attention_mask"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [TOKENS, 300])
def test_chroma_masks_as_its_pipeline_does(dtype, length):
    """One embedding of padding is kept; 269, which is no number of bfloat16, is not rounded."""
    pipe = chroma.build()
    pipe.text_encoder.to(dtype)
    prompts = [*PROMPTS, "long " * 53 + "x"]
    _, of_text = pipe._get_t5_prompt_embeds(prompts, max_sequence_length=length)
    expected = pipe._prepare_attention_mask(4, 16, torch.float32, of_text.float())
    ours = chroma_mask(Chroma(pipe), prompts, length)
    assert_close(ours, expected.float(), rtol=0, atol=0)
    assert ours[2, :length].sum() == 4, "the start of a word, a character, the token that ends it, one of padding"


def test_an_attention_backend_for_chroma_must_take_a_mask(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "_fault", lambda name, head, masks, *rest: "no mask" if masks else "")
    arguments = {"folder": str(tmp_path), "dtype": torch.float32, "device": "cpu", "trains": False}
    attention.check_attention_backend("here", "flash", "BriaPipeline", **arguments)
    with pytest.raises(ValueError, match="does not compute attention with a mask"):
        attention.check_attention_backend("here", "flash", "ChromaPipeline", **arguments)


@pytest.mark.parametrize(
    ("family", "build"), [(Chroma, chroma.build), (Bria, bria.build), (Sana, sana.build), (Wan, wan.build)]
)
def test_recomputed_blocks_are_computed_as_before(family, build):
    """diffusers' own gradient checkpointing leaves the mask out of half of Chroma's blocks."""
    found = []
    for recomputes in (False, True):
        model = family(build())
        torch.manual_seed(0)
        attach_lora(
            model.transformer, model, ModelConfig(lora_rank=4, lora_init_weights="default"), dtype=torch.float32
        )
        parameters = adapter_parameters(model.transformer)
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        if recomputes:
            model.transformer.enable_gradient_checkpointing()
        velocity = model.velocity(model.transformer, *state(model))
        velocity.square().sum().backward()
        found.append((velocity.detach(), torch.cat([p.grad.flatten() for p in parameters.values()])))
    (velocity, gradient), (again, gradient_again) = found
    assert_close(again, velocity, rtol=0, atol=LATENT)
    assert (gradient_again - gradient).norm() < GRADIENT * gradient.norm()


# ---------------------------------------------------------------- Bria


def test_bria_steers_away_from_zeros_where_no_negative_prompt_is_given():
    pipe = bria.build()
    _, expected, _ = pipe.encode_prompt([PROMPTS[0]], negative_prompt=None, max_sequence_length=TOKENS)
    ours = PromptEncoder(Bria(pipe), TOKENS)(["", "bad"])
    assert_close(ours.embeds[:1], expected, rtol=0, atol=0)
    _, expected, _ = pipe.encode_prompt([PROMPTS[0]], negative_prompt=["bad"], max_sequence_length=TOKENS)
    assert_close(ours.embeds[1:], expected, rtol=0, atol=EMBEDDING)


def test_a_vae_without_a_shift_stays_in_float32(tmp_path):
    bria.build(shift_factor=None).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16")
    assert model.pipe.vae.dtype == torch.float32
    assert model.transformer.dtype == torch.bfloat16
    assert FakePipeline(str(tmp_path), torch.bfloat16).model.pipe.vae.config.shift_factor == 0


# ---------------------------------------------------------------- Sana


@pytest.mark.parametrize("said", ["", "bad"])
def test_sana_gives_its_instruction_to_prompts_and_not_to_negative_ones(said):
    pipe = sana.build()
    instruction = Sana(pipe)._instruction
    assert instruction[-1] == "User Prompt: "
    embeds, masks, blank, of_blank = pipe.encode_prompt(
        list(PROMPTS), negative_prompt=said, max_sequence_length=TOKENS, complex_human_instruction=instruction
    )
    ours = PromptEncoder(Sana(pipe), TOKENS)([*PROMPTS, Prompt(said, negative=True)])
    lengths = [*masks.sum(1).tolist(), int(of_blank[0].sum())]
    assert ours.mask.sum(1).tolist() == lengths
    for row, expected, length in zip(ours.embeds, [*embeds, blank[0]], lengths, strict=True):
        assert_close(row[:length], expected[:length], rtol=0, atol=EMBEDDING)


# ---------------------------------------------------------------- Wan


@pytest.mark.parametrize(
    "entries", [{"transformer_2": ["diffusers", "WanTransformer3DModel"]}, {"boundary_ratio": 0.875}]
)
@pytest.mark.parametrize("load", [check_pipeline, load_model, lambda path: FakePipeline(path, torch.float32)])
def test_two_transformers_that_take_turns_are_refused(tmp_path, entries, load):
    wan.build().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | entries))
    with pytest.raises(UnsupportedModelError, match=r"has two transformers, .* take a model that has one") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_copy_in_bfloat16_is_what_diffusers_loads_in_it(tmp_path):
    """Norms and embeddings of time stay in float32, and positions are as exact as ever."""
    pipe = wan.build()
    pipe.save_pretrained(tmp_path)
    expected = type(pipe.transformer).from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16)
    model = load_model(str(tmp_path))
    engine = DiffusersEngine(model, LORA, dtype=torch.bfloat16, micro_batch_size=2, device="cpu")
    names = {key: key.replace(".base_layer", "") for key in engine.transformer.state_dict()}
    ours = {names[key]: value for key, value in engine.transformer.state_dict().items() if ".lora_" not in key}
    ours |= dict(engine.transformer.named_buffers())
    theirs = expected.state_dict() | dict(expected.named_buffers())
    assert ours.keys() == theirs.keys()
    assert {value.dtype for value in theirs.values()} == {torch.float32, torch.bfloat16}
    for name, value in theirs.items():
        assert_close(ours[name], value, rtol=0, atol=0)


# ---------------------------------------------------------------- Stable Diffusion 3


@pytest.mark.portable
@pytest.mark.parametrize("t5", [True, False])
def test_sd3_encodes_as_its_pipeline_does(t5):
    """Padded by the tokenizers and without a mask; zeros in the place of a T5 that was left out."""
    model = StableDiffusion3(stable_diffusion_3.build(t5=t5))
    with torch.no_grad():
        embeds, negative, pooled, negative_pooled = model.pipe.encode_prompt(
            list(PROMPTS), None, None, max_sequence_length=TOKENS
        )
    encoder = PromptEncoder(model, TOKENS)
    ours = encoder(PROMPTS)
    assert ours.mask is None
    clip_tokens = stable_diffusion_3.CLIP_TOKENS
    assert ours.embeds.shape == (3, clip_tokens + TOKENS, stable_diffusion_3.T5_WIDTH)
    assert_close(ours.embeds, embeds, rtol=0, atol=EMBEDDING)
    assert_close(ours.pooled, pooled, rtol=0, atol=EMBEDDING)
    assert bool((ours.embeds[:, clip_tokens:] != 0).any()) is t5
    # The trainer's empty negative prompt is a blank; to these tokenizers it is the pipeline's empty string.
    empty = encoder([" "] * 3)
    assert_close(empty.embeds, negative, rtol=0, atol=EMBEDDING)
    assert_close(empty.pooled, negative_pooled, rtol=0, atol=EMBEDDING)


def test_everything_is_frozen_and_in_evaluation_mode(tiny_sd3_model):
    pipe = tiny_sd3_model.pipe
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())
