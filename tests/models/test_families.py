"""Every model family against diffusers' own pipeline: what it draws, how it is scored, and what becomes of its LoRA."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tests_support import rows_of, same
from tiny_families import PROMPTS, TINY, VARIANTS, run_overrides
from tiny_families.references import asked, pictures
from tolerances import LATENT, LOG_PROB, guided
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, load_model
from flowgrpo_rc.models.lora import (
    ADAPTER_FILE,
    adapter_active,
    adapter_parameters,
    adapter_state,
    attach_lora,
    load_adapter_state,
    load_lora,
    save_lora,
)
from flowgrpo_rc.models.quantization import block_layers
from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest
from flowgrpo_rc.rollout.cache import CacheConfig
from flowgrpo_rc.rollout.seeds import seed_for
from flowgrpo_rc.rollout.weights import ONE_ROW_AN_IMAGE
from flowgrpo_rc.sde import log_prob, transition
from flowgrpo_rc.trainer import FlowGRPOTrainer

SEEDS = [seed_for(0, 0, 0, i) for i in range(3)]
STEPS = 4
LORA = ModelConfig(lora_rank=4, lora_alpha=8)
CPU = torch.device("cpu")


OF_VARIANTS = (
    "test_latents_and_images_equal_the_diffusers_pipeline",
    "test_rescored_log_probs_are_the_recorded_ones_but_for_precision",
    "test_requests_that_the_model_cannot_serve",
    "test_a_run_has_no_gap_and_moves_every_weight",
)
"""Tests of variants too, which have the blocks of another family, and prompts or settings of their own."""


def pytest_generate_tests(metafunc):
    """Give each test a family's ``name``; the tests of one family run after each other."""
    every = metafunc.function.__name__ in OF_VARIANTS
    names = [
        pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name
        for name in TINY
        if every or name not in VARIANTS
    ]
    metafunc.parametrize("name", names, scope="module")


@pytest.fixture(scope="module")
def folder(name, folder_of_family):
    return folder_of_family(name)


@pytest.fixture
def model(folder):
    loaded = load_model(folder)
    loaded.pipe.set_progress_bar_config(disable=True)
    return loaded


def conditioning(name, model, guidance, size):
    scale, embedded = guidance
    family = TINY[name]
    encoder = PromptEncoder(model, family.length)

    def encoded(texts):
        return encoder(asked(family.images, texts, family.reference_area))

    negative = encoded([model.negative_prompt] * len(PROMPTS)) if scale > 1 else None
    return Conditioning(encoded(PROMPTS), negative, scale, embedded, *size)


def drawn_by_the_pipeline(name, pipe, guidance, size, negative):
    """Final latents and images ``(3, H, W, 3)``, 0 to 1, of the family's own pipeline."""
    family = TINY[name]
    latents = []

    def keep(_pipe, step, _t, tensors):
        if step == STEPS - 1:
            latents.append(tensors["latents"].clone())
        return {}

    batches = [[i] for i in range(len(PROMPTS))] if family.images or family.alone else [list(range(len(PROMPTS)))]
    images = []
    for rows in batches:
        texts = [PROMPTS[i] for i in rows]
        references = {"images": pictures(family.images, len(PROMPTS))[rows[0]], "size": size} if family.images else {}
        with family.during_call():
            drawn = pipe(
                **family.call(texts, [negative] * len(rows), *guidance, family.length, **references),
                height=size[0],
                width=size[1],
                num_inference_steps=STEPS,
                generator=[torch.Generator().manual_seed(SEEDS[i]) for i in rows],
                output_type="np",
                callback_on_step_end=keep,
            )
        # A video's only frame is the image.
        images.append(drawn.frames[:, 0] if "frames" in drawn else drawn.images)
    return torch.cat(latents), np.concatenate(images)


def ode(name, model, guidance, size):
    """Latents of the deterministic loop, step by step as engines do it."""
    cond = conditioning(name, model, guidance, size)
    schedule = model.schedule(STEPS, *size)
    latents = torch.stack([model.initial_noise(torch.Generator().manual_seed(seed), *size) for seed in SEEDS])
    for t, sigma, following in zip(schedule.timesteps, schedule.sigmas[:-1], schedule.sigmas[1:], strict=True):
        with torch.no_grad():
            velocity = model.velocity(model.transformer, latents, t.expand(3), cond)
        latents = latents + (following - sigma) * velocity
    return latents


@pytest.mark.portable
@pytest.mark.parametrize("which", [0, -1], ids=["plain", "guided"])
def test_latents_and_images_equal_the_diffusers_pipeline(name, model, which):
    family = TINY[name]
    guidance = family.guidances[which]
    for size in family.sizes:
        expected, images = drawn_by_the_pipeline(name, model.pipe, guidance, size, model.negative_prompt)
        latents = ode(name, model, guidance, size)
        assert latents.shape[1:] == model.latent_shape(*size)
        assert_close(latents, expected.reshape(latents.shape), atol=guided(LATENT, guidance[0]), rtol=0)
        ours = model.decode(latents, *size).numpy()
        assert np.abs((images * 255).round() - ours).max() <= 1
        assert ours.std() > 10


def test_encoding_is_the_inverse_of_decoding(name, model, monkeypatch):
    """Its scale, shift and packing, with a VAE that returns what it decoded."""
    size = TINY[name].sizes[1]
    images = torch.randint(0, 256, (2, *size, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    encoded = model.encode_images(images)
    assert encoded.shape == (2, *model.latent_shape(*size))
    assert encoded.dtype == torch.float32
    assert_close(encoded[1:], model.encode_images(images[1:]), atol=1e-4, rtol=1e-4)
    given, decode = [], model.pipe.vae.decode
    monkeypatch.setattr(
        model.pipe.vae, "decode", lambda latents, **more: given.append(latents) or decode(latents, **more)
    )
    monkeypatch.setattr(model.pipe.vae, "encode", lambda _, return_dict: (given[0],))
    pixels = model._decode(encoded, *size)
    assert_close(model._encode_pixels(pixels), encoded, atol=1e-5, rtol=1e-5)


def rescored_gap(model, own, batch, rows):
    """Mean difference of recorded log-probs and those that the engine ``own`` gives to the same steps."""
    differences = []
    for w in range(2):
        latents = batch["latents"][:, w]
        with torch.no_grad(), adapter_active(own.transformer, own.adapter):
            velocity = model.velocity(own.transformer, latents, batch["timesteps"][:, w], rows)
        step = transition(
            latents, velocity, batch["sigmas"][:, w], batch["next_sigmas"][:, w], noise_level=0.7, sde_type="sde"
        )
        again = log_prob(step, batch["next_latents"][:, w], sde_type="sde")
        differences.append((again - batch["rollout_log_probs"][:, w]).abs())
    return float(torch.stack(differences).mean())


@pytest.mark.portable
def test_rescored_log_probs_are_the_recorded_ones_but_for_precision(name, model):
    """Sampled in float32, bfloat16 and fp8, and the recorded steps scored again in float32, guidance and all."""
    family = TINY[name]
    cond = conditioning(name, model, family.guidances[-1], family.sizes[0])
    request = RolloutRequest(cond, torch.arange(3), 6, SEEDS, torch.tensor([0, 1, 2]), 2, noise_level=0.7)
    rows = cond.rows(request.prompt_index, CPU)
    gaps = {}
    precisions = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "fp8": (torch.bfloat16, "fp8")}
    for precision, (dtype, rounded) in precisions.items():
        engine = DiffusersEngine(model, LORA, dtype=dtype, micro_batch_size=2, device="cpu", quantization=rounded)
        state = {name: tensor.float() for name, tensor in adapter_state(engine.transformer, engine.adapter).items()}
        engine.sync(state, 0)
        own = DiffusersEngine(model, LORA, dtype=torch.float32, micro_batch_size=2, device="cpu")
        own.sync(state, 0)
        gaps[precision] = rescored_gap(model, own, engine.generate(request).batch, rows)
    assert gaps["float32"] < LOG_PROB
    # Which of the two is larger depends on the weights: FLUX.1 also rounds the timestep to bfloat16.
    assert 10 * gaps["float32"] < min(gaps["bfloat16"], gaps["fp8"]), gaps
    assert max(gaps["bfloat16"], gaps["fp8"]) < 1.0, gaps
    assert gaps["bfloat16"] != gaps["fp8"]


def test_a_bfloat16_actor_scores_its_engines_steps_bit_for_bit(name, folder):
    """From float32 LoRA weights, where the actor sees as many rows at once as the engine saw."""
    family = TINY[name]
    model = load_model(folder, dtype="bfloat16")
    differ = {}
    for computes in ("auto", "float32"):
        lora = replace(LORA, dtype="bfloat16", lora_compute_dtype=computes)
        engine = DiffusersEngine(model, lora, dtype=torch.bfloat16, micro_batch_size=3, device="cpu")
        actor = DiffusionActor(
            model,
            DiffusionActorConfig(ppo_micro_batch_size_per_gpu=3),
            lora,
            Accelerator(cpu=True),
            sde_type="sde",
            noise_level=0.7,
            total_optimizer_steps=1,
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in adapter_parameters(actor.transformer).values():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        engine.sync(adapter_state(actor.transformer), 0)
        cond = conditioning(name, model, family.guidances[-1], family.sizes[0])
        request = RolloutRequest(cond, torch.arange(3), 6, SEEDS, torch.tensor([2, 2, 2]), 1, noise_level=0.7)
        batch = engine.generate(request).batch
        differ[computes] = actor.score(batch, cond).log_probs - batch["rollout_log_probs"]
        engine.close()
        model.transformer.delete_adapters("default")
    assert differ["auto"].count_nonzero() == 0
    assert differ["float32"].count_nonzero() > 0


NO_CACHE = {"SD3", "ZImage", "Lumina2", "AuraFlow", "Sana"}
"""Transformers without any cache of diffusers, by the beginning of their names."""
NO_FIRST_BLOCK = NO_CACHE | {"Flux2", "Chroma", "Bria"}
NO_TAYLORSEER = NO_CACHE | {"CogView4", "Wan"}


@pytest.mark.parametrize(("cache", "without"), [("first_block", NO_FIRST_BLOCK), ("taylorseer", NO_TAYLORSEER)])
def test_a_cache_outside_the_window_leaves_no_gap(name, model, cache, without):
    """Or the engine says that the transformer cannot have it."""
    options = {"threshold": 1e9} if cache == "first_block" else {"disable_cache_before_step": 1}
    config = CacheConfig(name=cache, options=options)
    settings = {"dtype": torch.float32, "micro_batch_size": 2, "device": "cpu", "cache": config}
    if type(model.transformer).__name__.partition("Transformer")[0] in without:
        with pytest.raises(ValueError, match=f"cache.name: got {cache}, but the transformer .*; or set it to null"):
            DiffusersEngine(model, LORA, **settings)
        return
    engine = DiffusersEngine(model, LORA, **settings)
    engine.sync(adapter_state(engine.transformer, engine.adapter), 0)
    family = TINY[name]
    cond = conditioning(name, model, family.guidances[-1], family.sizes[0])
    plain = RolloutRequest(cond, torch.arange(3), 6, SEEDS, torch.tensor([3, 3, 3]), 2, noise_level=0.7)
    request = replace(plain, cache=config)
    batch = engine.generate(request).batch
    assert not torch.equal(batch["latents"], engine.generate(plain).batch["latents"])
    assert rescored_gap(model, engine, batch, cond.rows(request.prompt_index, CPU)) < LOG_PROB


def test_guidance_and_prompts_change_the_image(name, model):
    family = TINY[name]
    size = family.sizes[0]
    plain, steered = (ode(name, model, guidance, size) for guidance in (family.guidances[0], family.guidances[-1]))
    assert (plain - steered).abs().max() > 1e-3
    cond = conditioning(name, model, family.guidances[0], size)
    latents = torch.randn(3, *model.latent_shape(*size), generator=torch.Generator().manual_seed(0))
    velocities = []
    for order in ([0, 1, 2], [1, 0, 2]):
        rows = cond.rows(torch.tensor(order), CPU)
        with torch.no_grad():
            velocities.append(model.velocity(model.transformer, latents, torch.full((3,), 500.0), rows))
    assert (velocities[0][:2] - velocities[1][:2]).abs().max() > 1e-3
    assert_close(velocities[0][2], velocities[1][2], atol=LATENT, rtol=0)


@pytest.mark.portable
def test_guidance_is_the_same_in_one_call_and_in_two(name, model):
    """Prompts of other lengths than the negative one, joined or not."""
    family = TINY[name]
    if family.guidances[-1][0] == 1:
        with pytest.raises(ValueError, match="true_cfg_scale: got 4; this model .* takes no classifier-free guidance"):
            model.check_request(32, 32, family.guidances[-1][1], 4.0)
        return
    cond = conditioning(name, model, family.guidances[-1], family.sizes[0])
    latents = torch.randn(3, *model.latent_shape(*family.sizes[0]), generator=torch.Generator().manual_seed(0))
    velocities = []
    for model.batch_guidance in (True, False):
        with torch.no_grad():
            velocities.append(model.velocity(model.transformer, latents, torch.full((3,), 500.0), cond))
    assert_close(*velocities, atol=guided(LATENT, cond.true_cfg_scale), rtol=0)


def test_layers_of_one_row_an_image_are_those_that_modulate(name, model):
    """int8 leaves them out by their names; counted in a forward of three images."""
    cond = conditioning(name, model, TINY[name].guidances[0], TINY[name].sizes[0])
    latents = torch.randn(3, *model.latent_shape(*TINY[name].sizes[0]), generator=torch.Generator().manual_seed(0))
    rows = {}
    layers = block_layers(model.transformer)
    for key, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, given, key=key: rows.update({key: given[0][..., 0].numel()}))
    with torch.no_grad():
        model.velocity(model.transformer, latents, torch.full((3,), 500.0), cond)
    assert {key for key, count in rows.items() if count <= 3} == set(filter(ONE_ROW_AN_IMAGE.search, layers))


def randomise(model, scale=0.3):
    """A LoRA on the default layers, with weights that are not 0."""
    attach_lora(model.transformer, model, LORA, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(model.transformer).values():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator)


def test_gradients_reach_every_lora_matrix(name, model):
    family = TINY[name]
    randomise(model)
    cond = conditioning(name, model, family.guidances[-1], family.sizes[0])
    latents = torch.randn(3, *model.latent_shape(*family.sizes[0]), generator=torch.Generator().manual_seed(0))
    model.velocity(model.transformer, latents, torch.full((3,), 500.0), cond).square().sum().backward()
    parameters = adapter_parameters(model.transformer)
    layers = {key.split(".lora_")[0] for key in parameters}
    without = {key.split(".lora_")[0] for key, p in parameters.items() if p.grad is None or not p.grad.any()}
    assert without == {layer for layer in layers if layer.endswith(family.idle)}
    assert all(torch.isfinite(p.grad).all() for p in parameters.values() if p.grad is not None)
    assert len(layers) >= 4


@pytest.mark.parametrize("full_strength", [False, True])
def test_diffusers_reloads_the_identical_image(name, model, folder, tmp_path, full_strength):
    """Its scale is 2, a power of two, so that multiplying it into the weights rounds nothing."""
    family = TINY[name]
    call = (family.guidances[-1], family.sizes[0], model.negative_prompt)
    _, base = drawn_by_the_pipeline(name, model.pipe, *call)
    randomise(model)
    _, trained = drawn_by_the_pipeline(name, model.pipe, *call)
    save_lora(model, model.transformer, tmp_path, full_strength=full_strength)
    fresh = load_model(folder)
    fresh.pipe.set_progress_bar_config(disable=True)
    if hasattr(fresh.pipe, "load_lora_weights"):
        fresh.pipe.load_lora_weights(str(tmp_path))
    else:
        fresh.pipe.transformer.load_lora_adapter(str(tmp_path), weight_name=ADAPTER_FILE)
    assert np.abs(trained - base).max() > 0.05
    assert np.array_equal(drawn_by_the_pipeline(name, fresh.pipe, *call)[1], trained)
    before = adapter_state(model.transformer)
    load_adapter_state(model.transformer, {key: torch.zeros_like(value) for key, value in before.items()})
    load_lora(model.transformer, tmp_path)
    assert same(adapter_state(model.transformer), before)


def test_a_reader_that_knows_no_metadata_gets_the_whole_update(name, model, tmp_path):
    """``delta W = B @ A`` of the file against the weights that peft merges."""
    randomise(model)
    save_lora(model, model.transformer, tmp_path, full_strength=True)
    weights = load_file(tmp_path / ADAPTER_FILE)
    layers = [key.removesuffix(".lora_A.weight") for key in weights if key.endswith(".lora_A.weight")]
    assert 2 * len(layers) == len(weights)
    for layer in layers:
        delta = weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"]
        trained = model.transformer.get_submodule(layer.removeprefix("transformer.")).get_delta_weight("default")
        assert_close(delta, trained, rtol=1e-5, atol=1e-5)


def test_requests_that_the_model_cannot_serve(name, model):
    family = TINY[name]
    fitting = {"height": 32, "width": 32, "guidance_scale": family.guidances[0][1]}
    model.check_request(**fitting)
    for arguments, message in family.refused:
        with pytest.raises(ValueError, match=message) as caught:
            model.check_request(**fitting | arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"max_sequence_length: got {model.longest_prompt + 1}; this model takes"):
        PromptEncoder(model, model.longest_prompt + 1)


@pytest.mark.run
def test_a_run_has_no_gap_and_moves_every_weight(name, folder, small_config, tmp_path):
    """Two steps of the trainer from a new adapter; the second moves the first matrices too."""
    family = TINY[name]
    trainer = FlowGRPOTrainer(small_config(*run_overrides(name, folder, tmp_path / "data")))
    before = adapter_state(trainer.run.actor.transformer)
    steps = [row for row in rows_of(trainer.fit().root) if "reward/mean" in row]
    after = adapter_state(trainer.run.actor.transformer)
    still = {key for key, value in after.items() if torch.equal(value, before[key])}
    assert still == {key for key in after if key.split(".lora_")[0].endswith(family.idle)}
    assert len(steps) == 2
    for row in steps:
        assert row["actor/log_ratio_abs_mean_first"] < LOG_PROB
        assert row["rollout_sync/engine_gap_abs_mean"] < LOG_PROB
