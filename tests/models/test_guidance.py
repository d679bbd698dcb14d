"""Guidance: one forward of both halves equals two, and which half has a gradient."""

from dataclasses import replace

import pytest
import torch
from tolerances import GRADIENT, LATENT, guided
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, load_model
from flowgrpo_rc.models.base import EncodedPrompt
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
from flowgrpo_rc.models.prompts import pad

SCALE = 4.0
LORA = ModelConfig(lora_rank=4, lora_alpha=8)


def rows_of(model, prompts, negative, length=24):
    """Conditioning, latents and timesteps of an image a prompt."""
    encoder = PromptEncoder(model, length)
    cond = Conditioning(encoder(prompts), encoder(negative), SCALE, None, 32, 32)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(len(prompts), *model.latent_shape(32, 32), generator=generator)
    return latents, torch.linspace(900, 100, len(prompts)), cond


def counting_calls(model):
    rows = []
    model.transformer.register_forward_pre_hook(
        lambda _, args, inputs: rows.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    return rows


@pytest.mark.portable
@pytest.mark.parametrize("family", ["tiny_model", "tiny_sd3_model"])
def test_one_forward_gives_the_velocity_of_two(request, family):
    model = request.getfixturevalue(family)
    arguments = rows_of(model, ["one", "a longer prompt than that"], ["blurry and badly drawn, with a frame", "x"])
    calls = counting_calls(model)
    try:
        with torch.no_grad():
            together = model.velocity(model.transformer, *arguments)
            model.batch_guidance = False
            apart = model.velocity(model.transformer, *arguments)
    finally:
        model.batch_guidance = True  # the fixture is shared
        model.transformer._forward_pre_hooks.clear()
    assert calls == [4, 2, 2]
    assert_close(together, apart, atol=guided(LATENT, SCALE), rtol=0)


def test_lengths_that_a_family_cannot_mask_make_two_calls(tiny_sd3_model):
    latents, timesteps, cond = rows_of(tiny_sd3_model, ["one", "two"], [" ", " "])
    shorter = replace(cond.negative, embeds=cond.negative.embeds[:, :-3])
    calls = counting_calls(tiny_sd3_model)
    with torch.no_grad():
        tiny_sd3_model.velocity(tiny_sd3_model.transformer, latents, timesteps, replace(cond, negative=shorter))
    tiny_sd3_model.transformer._forward_pre_hooks.clear()
    assert calls == [2, 2]


def test_prompts_that_are_joined_keep_their_embeddings_and_masks():
    first = pad([EncodedPrompt(torch.ones(2, 3), torch.ones(1)), EncodedPrompt(torch.ones(1, 3), torch.ones(1))])
    second = pad([EncodedPrompt(torch.full((4, 3), 2.0), torch.zeros(1))])
    both = first.followed_by(second)
    assert both.embeds.sum(2).tolist() == [[3, 3, 0, 0], [3, 0, 0, 0], [6, 6, 6, 6]]
    assert both.mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert both.pooled.tolist() == [[1], [1], [0]]
    assert both.lengths == (2, 1, 4)
    assert both.rows(torch.tensor([2, 0, 2]), torch.device("cpu")).lengths == (4, 2, 4)
    alike = second.followed_by(second)
    assert alike.mask is None
    assert alike.lengths is None
    assert first.lengths == replace(first, lengths=None).lengths == (2, 1)


def gradient_of(model, latents, timesteps, cond, **settings):
    """The adapter's flat gradient of a fixed weighted sum of velocities."""
    velocity = model.velocity(model.transformer, latents, timesteps, cond, **settings)
    weights = torch.linspace(-1, 1, velocity.numel()).reshape(velocity.shape)
    parameters = list(adapter_parameters(model.transformer).values())
    return torch.cat([g.flatten() for g in torch.autograd.grad((weights * velocity).sum(), parameters)])


def test_detaching_leaves_the_scaled_gradient_of_the_conditional_half(tiny_sd3_path):
    """Against float64: ``v = u + s (c - u)``, so ``dv = s dc`` detached and ``s dc + (1 - s) du`` otherwise."""
    model = load_model(tiny_sd3_path)
    attach_lora(model.transformer, model, LORA, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(model.transformer).values():
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    latents, timesteps, cond = rows_of(model, ["one", "two"], [" ", " "])
    both = gradient_of(model, latents, timesteps, cond)
    model.batch_guidance = False
    apart = gradient_of(model, latents, timesteps, cond)
    detached = gradient_of(model, latents, timesteps, cond, detach_unconditional=True)

    model.transformer.double()
    parameters = list(adapter_parameters(model.transformer).values())

    def half(prompts):
        inputs = model._inputs(torch.float64, latents, timesteps.double(), replace(cond, prompts=prompts))
        output = model.transformer(**inputs, return_dict=False)[0]
        weights = torch.linspace(-1, 1, output.numel()).double().reshape(output.shape)
        return torch.cat([g.flatten() for g in torch.autograd.grad((weights * output).sum(), parameters)])

    conditional = half(cond.prompts)
    unconditional = half(cond.negative)
    for found, expected in (
        (detached, SCALE * conditional),
        (both, SCALE * conditional + (1 - SCALE) * unconditional),
        (apart, SCALE * conditional + (1 - SCALE) * unconditional),
    ):
        assert (found - expected).norm() < guided(GRADIENT, SCALE) * conditional.norm()
    assert (both - detached).norm() > 0.1 * both.norm()
