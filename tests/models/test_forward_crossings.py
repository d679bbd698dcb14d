"""Places at which a family's velocity and gradient wait for an accelerator: the whole list, with file and count."""

from dataclasses import replace

import pytest
import torch
from crossings import DEVICE, Crossings, OnDevice, put_on_device
from tiny_families import PROMPTS, TINY, VARIANTS
from tiny_families.references import asked
from tolerances import LATENT, guided
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, load_model
from flowgrpo_rc.models.lora import attach_lora

# A variant has the blocks of another family, so that the quick tests leave it out.
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in TINY]
IMAGES = len(PROMPTS)

QWEN = ("diffusers/models/transformers/transformer_qwenimage.py", "to device")
AT_FIRST = {
    # Tables of positions, which stay on the device.
    "z_image": {("diffusers/models/transformers/transformer_z_image.py", "to device"): 3},
    "qwen_image_edit": {QWEN: 2},
    "qwen_image_edit_plus": {QWEN: 2},
    "qwen_image_edit_plus_2511": {QWEN: 2},
}
"""Waits of the first forward alone."""
ALWAYS = {
    # With ``zero_cond_t`` the transformer lists the tokens of references on the host, inside its forward.
    "qwen_image_edit_plus_2511": {QWEN: 1},
}
"""Waits of every forward; no other family waits."""


@pytest.mark.parametrize("name", EVERY)
def test_prompts_of_other_lengths_make_no_forward_wait(name, folder_of_family):
    """Guided where the family is, with references and with activations that the backward pass recomputes."""
    family = TINY[name]
    family.before_loading()
    model = load_model(folder_of_family(name))
    transformer = model.transformer
    attach_lora(transformer, model, ModelConfig(lora_rank=4, lora_alpha=4), dtype=torch.float32)
    transformer.enable_gradient_checkpointing()
    scale, embedded = family.guidances[-1]
    size = family.sizes[0]
    encoder = PromptEncoder(model, family.length)
    prompts, negative = (
        encoder(asked(family.images, texts, family.reference_area))
        for texts in (PROMPTS, [model.negative_prompt] * IMAGES)
    )
    assert prompts.lengths is None or len({*prompts.lengths}) > 1
    cond = Conditioning(prompts, negative if scale > 1 else None, scale, embedded, *size)
    some = replace(cond, guided=(True, False, True))
    latents = torch.stack([model.initial_noise(torch.Generator().manual_seed(i), *size) for i in range(IMAGES)])
    timesteps = torch.tensor([900.0, 500.0, 100.0])
    with torch.no_grad():
        expected = [model.velocity(transformer, latents, timesteps, given) for given in (cond, some)]
    put_on_device(transformer)
    latents = OnDevice(latents)
    timesteps = OnDevice(timesteps)

    def forward(given):
        with Crossings() as crossings:
            rows = given.rows(torch.arange(IMAGES), DEVICE)
            return model.velocity(transformer, latents, timesteps, rows), crossings.found

    always = ALWAYS.get(name, {})
    _, first = forward(cond)
    assert first - forward(cond)[1] == AT_FIRST.get(name, {})
    for given, wanted in zip((cond, some), expected, strict=True):
        velocity, found = forward(given)
        assert found == always
        assert_close(velocity.detach().values, wanted, atol=guided(LATENT, scale), rtol=0)
        with Crossings() as crossings:
            velocity.sum().backward()
        assert not crossings.found
