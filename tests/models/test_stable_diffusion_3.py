"""What the Stable Diffusion 3 adapter has besides what ``test_families.py`` asks of every family."""

import shutil

import pytest
import torch
from tiny_families import stable_diffusion_3 as tiny_sd3
from tolerances import EMBEDDING
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, UnsupportedModelError, load_model
from flowgrpo_rc.models.lora import adapter_parameters, adapter_state, attach_lora
from flowgrpo_rc.models.stable_diffusion_3 import StableDiffusion3
from flowgrpo_rc.rollout.seeds import seed_for

PROMPTS = ['the text "42"', "a long prompt of more tokens than the two CLIPs take", "x"]
SEEDS = [seed_for(0, 0, 0, i) for i in range(3)]
TOKENS = 24
"""``max_sequence_length``: longer than some prompts, shorter than others."""
LORA = ModelConfig(lora_rank=4, lora_alpha=12)


def generators():
    return [torch.Generator().manual_seed(seed) for seed in SEEDS]


def conditioning(model, cfg_scale=1.0, size=32):
    encoder = PromptEncoder(model, TOKENS)
    negative = encoder([" "] * 3) if cfg_scale > 1 else None
    return Conditioning(encoder(PROMPTS), negative, cfg_scale, None, size, size)


def pipeline_call(model, cfg_scale, steps, output_type, size=32):
    return model.pipe(
        prompt=PROMPTS,
        height=size,
        width=size,
        num_inference_steps=steps,
        guidance_scale=cfg_scale,
        generator=generators(),
        max_sequence_length=TOKENS,
        output_type=output_type,
    ).images


@pytest.mark.parametrize("steps", [1, 6, 10])
@pytest.mark.parametrize("settings", [{"shift": 3.0}, {"shift": 1.0}, {"dynamic": True}])
def test_schedule_is_the_pipelines(settings, steps):
    model = StableDiffusion3(tiny_sd3.build(**settings))
    for size in (32, 64):
        schedule = model.schedule(steps, size, size)
        pipeline_call(model, 1.0, steps, "latent", size)
        assert_close(schedule.sigmas, model.pipe.scheduler.sigmas, rtol=0, atol=0)
        assert_close(schedule.timesteps, model.pipe.scheduler.timesteps, rtol=0, atol=0)
        assert schedule.sigmas[0] == 1
        assert schedule.sigmas[-1] == 0


def test_dynamic_shifting_depends_on_the_size():
    model = StableDiffusion3(tiny_sd3.build(dynamic=True))
    assert (model.schedule(6, 32, 32).sigmas - model.schedule(6, 128, 128).sigmas).abs().max() > 1e-3


def test_noise_is_the_pipelines(tiny_sd3_model):
    expected = tiny_sd3_model.pipe.prepare_latents(3, 4, 32, 48, torch.float32, torch.device("cpu"), generators())
    ours = torch.stack([tiny_sd3_model.initial_noise(g, 32, 48) for g in generators()])
    assert_close(ours, expected, rtol=0, atol=0)
    assert ours.shape[1:] == tiny_sd3_model.latent_shape(32, 48)


@pytest.mark.portable
@pytest.mark.parametrize("t5", [True, False])
def test_encoding_is_the_pipelines(t5):
    """Padded by the tokenizers and without a mask; zeros in the place of a T5 that was left out."""
    model = StableDiffusion3(tiny_sd3.build(t5=t5))
    with torch.no_grad():
        embeds, negative, pooled, negative_pooled = model.pipe.encode_prompt(
            PROMPTS, None, None, max_sequence_length=TOKENS
        )
    encoder = PromptEncoder(model, TOKENS)
    ours = encoder(PROMPTS)
    assert ours.mask is None
    assert ours.embeds.shape == (3, tiny_sd3.CLIP_TOKENS + TOKENS, tiny_sd3.T5_WIDTH)
    assert_close(ours.embeds, embeds, rtol=0, atol=EMBEDDING)
    assert_close(ours.pooled, pooled, rtol=0, atol=EMBEDDING)
    assert bool((ours.embeds[:, tiny_sd3.CLIP_TOKENS :] != 0).any()) is t5
    # the trainer's empty negative prompt is a blank; to these tokenizers it is the pipeline's empty string
    empty = encoder([" "] * 3)
    assert_close(empty.embeds, negative, rtol=0, atol=EMBEDDING)
    assert_close(empty.pooled, negative_pooled, rtol=0, atol=EMBEDDING)


def test_each_prompt_has_its_pooled_vector(tiny_sd3_model):
    encoder = PromptEncoder(tiny_sd3_model, TOKENS)
    first = encoder([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    again = encoder([PROMPTS[1], PROMPTS[0]])
    assert first.pooled is not None
    assert again.pooled is not None
    assert_close(again.pooled, first.pooled[[1, 0]], rtol=0, atol=0)
    assert_close(again.embeds, first.embeds[[1, 0]], rtol=0, atol=0)
    assert (first.pooled[0] - first.pooled[1]).abs().max() > 1e-3
    rows = first.rows(torch.tensor([1, 1, 2]), torch.device("cpu"))
    assert_close(rows.pooled, first.pooled[[1, 1, 2]], rtol=0, atol=0)


def test_everything_is_frozen_and_in_evaluation_mode(tiny_sd3_model):
    pipe = tiny_sd3_model.pipe
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())


def test_without_t5_it_loads_too(tmp_path):
    model = load_model(tiny_sd3.save(tmp_path, t5=False))
    assert model.pipe.text_encoder_3 is None
    assert len(PromptEncoder(model, TOKENS)(PROMPTS[:2]).embeds) == 2


def test_default_targets_are_the_joint_attention(tiny_sd3_model):
    """The last block has no text to go on with, so no ``to_add_out``; the second attention is left alone."""
    attach_lora(tiny_sd3_model.transformer, tiny_sd3_model, LORA, dtype=torch.float32)
    layers = {name.split(".lora_")[0] for name in adapter_state(tiny_sd3_model.transformer)}
    expected = {
        f"transformer_blocks.{block}.{target}"
        for block in range(3)
        for target in tiny_sd3_model.default_lora_targets
        if (block, target) != (2, "attn.to_add_out")
    }
    assert layers == expected


@pytest.mark.parametrize("targets", [None, ["attn.to_q", "attn2.to_v", "ff.net.2"], "all-linear"])
def test_gradients_reach_every_lora_matrix(tiny_sd3_model, targets):
    """With B not 0, each matrix of each target has a gradient; the last block's text queries alone act on nothing."""
    config = ModelConfig(lora_rank=4, lora_alpha=12, target_modules=targets)
    attach_lora(tiny_sd3_model.transformer, tiny_sd3_model, config, dtype=torch.float32)
    parameters = adapter_parameters(tiny_sd3_model.transformer)
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    latents = torch.randn(3, 4, 8, 8, generator=generator)
    cond = conditioning(tiny_sd3_model, 4.5)
    velocity = tiny_sd3_model.velocity(tiny_sd3_model.transformer, latents, torch.full((3,), 500.0), cond)
    velocity.square().sum().backward()
    without = {n for n, p in parameters.items() if p.grad is None or not p.grad.abs().max() > 0}
    dead = "transformer_blocks.2.attn.add_q_proj"
    assert without <= {f"{dead}.lora_{x}.default.weight" for x in "AB"}
    assert all(torch.isfinite(p.grad).all() for p in parameters.values() if p.grad is not None)
    assert len(parameters) > 5


def test_compiled_blocks_give_the_same_velocity(tiny_sd3_model):
    latents, cond = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)), conditioning(tiny_sd3_model)
    arguments = tiny_sd3_model.transformer, latents, torch.full((3,), 500.0), cond
    with torch.no_grad():
        expected = tiny_sd3_model.velocity(*arguments)
        tiny_sd3_model.transformer.compile_repeated_blocks(backend="eager")
        assert_close(tiny_sd3_model.velocity(*arguments), expected)


def test_requests_that_the_model_cannot_serve(tiny_sd3_model):
    """4 pixels a latent, 2 latents a patch, 20 positions: multiples of 8 up to 160."""
    tiny_sd3_model.check_request(32, 160, None)
    with pytest.raises(ValueError, match="height=36, width=32: this model draws multiples of 8 pixels"):
        tiny_sd3_model.check_request(36, 32, None)
    with pytest.raises(ValueError, match="height=32, width=168: this model has positions for at most 160 pixels"):
        tiny_sd3_model.check_request(32, 168, None)
    with pytest.raises(ValueError, match="guidance_scale: got 4.5 .* set guidance_scale=null and true_cfg_scale=4.5"):
        tiny_sd3_model.check_request(32, 32, 4.5)
    with pytest.raises(ValueError, match="max_sequence_length: got 513; this model takes at most 512"):
        PromptEncoder(tiny_sd3_model, 513)


@pytest.mark.parametrize("missing", ["text_encoder_3", "tokenizer_2", "vae", "transformer", "scheduler"])
def test_an_incomplete_download_is_one_line(tiny_sd3_path, tmp_path, missing):
    folder = shutil.copytree(tiny_sd3_path, tmp_path / "model")
    shutil.rmtree(folder / missing)
    says = rf"model cannot be loaded; is the download complete\? \(it holds no {missing}\)"
    with pytest.raises(UnsupportedModelError, match=says):
        load_model(str(folder))


def test_missing_weights_are_one_line(tiny_sd3_path, tmp_path):
    folder = shutil.copytree(tiny_sd3_path, tmp_path / "model")
    (folder / "text_encoder_2" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="cannot be loaded; is the download complete") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
