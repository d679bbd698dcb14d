"""The Stable Diffusion 3 adapter against diffusers' own pipeline."""

import shutil

import numpy as np
import pytest
import torch
from tiny_families import stable_diffusion_3 as tiny_sd3
from tolerances import EMBEDDING, LATENT, LOG_PROB, guided
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, UnsupportedModelError, load_model
from flowgrpo_rc.models.lora import adapter_active, adapter_parameters, adapter_state, attach_lora, load_lora, save_lora
from flowgrpo_rc.models.stable_diffusion_3 import StableDiffusion3
from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest
from flowgrpo_rc.rollout.seeds import seed_for
from flowgrpo_rc.sde import log_prob, transition

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


def ode(model, cfg_scale, steps):
    """Latents of the deterministic loop, step by step as engines do it."""
    cond, schedule = conditioning(model, cfg_scale), model.schedule(steps, 32, 32)
    latents = torch.stack([model.initial_noise(g, 32, 32) for g in generators()])
    for t, sigma, following in zip(schedule.timesteps, schedule.sigmas[:-1], schedule.sigmas[1:], strict=True):
        with torch.no_grad():
            velocity = model.velocity(model.transformer, latents, t.expand(3), cond)
        latents = latents + (following - sigma) * velocity
    return latents


@pytest.mark.portable
@pytest.mark.parametrize("cfg_scale", [1.0, 4.5])
def test_latents_and_images_equal_the_diffusers_pipeline(tiny_sd3_model, cfg_scale):
    expected = pipeline_call(tiny_sd3_model, cfg_scale, 6, "latent")
    latents = ode(tiny_sd3_model, cfg_scale, 6)
    assert_close(latents, expected, atol=guided(LATENT, cfg_scale), rtol=0)
    images = pipeline_call(tiny_sd3_model, cfg_scale, 6, "np")
    ours = tiny_sd3_model.decode(latents, 32, 32).numpy()
    assert np.abs((images * 255).round() - ours).max() <= 1
    assert ours.std() > 20


@pytest.mark.parametrize("cfg_scale", [1.0, 4.5])
def test_the_engine_draws_the_pipelines_images(tiny_sd3_model, cfg_scale):
    expected = pipeline_call(tiny_sd3_model, cfg_scale, 6, "np")
    engine = DiffusersEngine(tiny_sd3_model, LORA, dtype=torch.float32, micro_batch_size=2, device="cpu")
    engine.sync(adapter_state(engine.transformer, engine.adapter), 0)
    request = RolloutRequest(conditioning(tiny_sd3_model, cfg_scale), torch.arange(3), 6, SEEDS, None)
    assert np.abs((expected * 255).round() - engine.generate(request).images.numpy()).max() <= 1


@pytest.mark.portable
def test_low_precision_leaves_the_gap_it_should(tiny_sd3_model):
    """Sampled in float32, bfloat16 and fp8, and the recorded steps scored again in float32, guidance and all."""
    request = RolloutRequest(
        conditioning(tiny_sd3_model, 4.5), torch.arange(3), 6, SEEDS, torch.tensor([0, 1, 2]), 2, noise_level=0.7
    )
    cond = request.conditioning.rows(request.prompt_index, torch.device("cpu"))
    gaps = {}
    for name, dtype, quantization in (
        ("none", torch.float32, None),
        ("bfloat16", torch.bfloat16, None),
        ("fp8", torch.bfloat16, "fp8"),
    ):
        engine = DiffusersEngine(
            tiny_sd3_model, LORA, dtype=dtype, micro_batch_size=2, device="cpu", quantization=quantization
        )
        state = {name: x.float() for name, x in adapter_state(engine.transformer, engine.adapter).items()}
        engine.sync(state, 0)
        own = DiffusersEngine(tiny_sd3_model, LORA, dtype=torch.float32, micro_batch_size=2, device="cpu")
        own.sync(state, 0)
        batch, differences = engine.generate(request).batch, []
        for w in range(2):
            x, t = batch["latents"][:, w], batch["timesteps"][:, w]
            with torch.no_grad(), adapter_active(own.transformer, own.adapter):
                velocity = tiny_sd3_model.velocity(own.transformer, x, t, cond)
            step = transition(
                x, velocity, batch["sigmas"][:, w], batch["next_sigmas"][:, w], noise_level=0.7, sde_type="sde"
            )
            again = log_prob(step, batch["next_latents"][:, w], sde_type="sde")
            differences.append((again - batch["rollout_log_probs"][:, w]).abs())
        gaps[name] = float(torch.stack(differences).mean())
    assert gaps["none"] < LOG_PROB
    assert 10 * gaps["none"] < gaps["bfloat16"] < gaps["fp8"] < 1.0, gaps


def test_guidance_and_prompts_change_the_image(tiny_sd3_model):
    plain, guided = ode(tiny_sd3_model, 1.0, 4), ode(tiny_sd3_model, 4.5, 4)
    assert (plain - guided).abs().max() > 1e-2
    cond = conditioning(tiny_sd3_model)
    other = Conditioning(cond.prompts.map(lambda t: t.flip(0)), None, 1.0, None, 32, 32)
    embeds_only = Conditioning(
        type(cond.prompts)(cond.prompts.embeds.flip(0), None, cond.prompts.pooled), None, 1.0, None, 32, 32
    )
    latents = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    velocities = []
    for c in (cond, other, embeds_only):
        with torch.no_grad():
            velocities.append(tiny_sd3_model.velocity(tiny_sd3_model.transformer, latents, torch.full((3,), 500.0), c))
    assert (velocities[0][0] - velocities[1][0]).abs().max() > 1e-3
    assert (velocities[1][0] - velocities[2][0]).abs().max() > 1e-3, "the pooled vector does nothing"


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


def test_diffusers_reloads_the_identical_image(tiny_sd3_model, tiny_sd3_path, tmp_path):
    base = pipeline_call(tiny_sd3_model, 4.5, 4, "np")
    attach_lora(tiny_sd3_model.transformer, tiny_sd3_model, LORA, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(tiny_sd3_model.transformer).values():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    trained = pipeline_call(tiny_sd3_model, 4.5, 4, "np")
    save_lora(tiny_sd3_model, tiny_sd3_model.transformer, tmp_path)
    fresh = load_model(tiny_sd3_path)
    fresh.pipe.load_lora_weights(str(tmp_path))
    assert np.abs(trained - base).max() > 0.1
    assert np.array_equal(pipeline_call(fresh, 4.5, 4, "np"), trained)
    before = adapter_state(tiny_sd3_model.transformer)
    for parameter in adapter_parameters(tiny_sd3_model.transformer).values():
        parameter.data.zero_()
    load_lora(tiny_sd3_model.transformer, tmp_path)
    assert all(torch.equal(v, before[n]) for n, v in adapter_state(tiny_sd3_model.transformer).items())


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
