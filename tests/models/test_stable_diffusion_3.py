"""What the Stable Diffusion 3 adapter has besides what ``test_families.py`` asks of every family."""

import pytest
import torch
from tiny_families import stable_diffusion_3 as tiny_sd3
from tolerances import EMBEDDING
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder
from flowgrpo_rc.models.lora import adapter_state, attach_lora
from flowgrpo_rc.models.stable_diffusion_3 import StableDiffusion3
from flowgrpo_rc.rollout.seeds import seed_for

PROMPTS = ['the text "42"', "a long prompt of more tokens than the two CLIPs take", "x"]
SEEDS = [seed_for(0, 0, 0, i) for i in range(3)]
TOKENS = 24
"""``max_sequence_length``: longer than some prompts, shorter than others."""
LORA = ModelConfig(lora_rank=4, lora_alpha=12)


def conditioning(model, cfg_scale=1.0, size=32):
    encoder = PromptEncoder(model, TOKENS)
    negative = encoder([" "] * 3) if cfg_scale > 1 else None
    return Conditioning(encoder(PROMPTS), negative, cfg_scale, None, size, size)


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


def test_everything_is_frozen_and_in_evaluation_mode(tiny_sd3_model):
    pipe = tiny_sd3_model.pipe
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())


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


@pytest.mark.slow
def test_compiled_blocks_give_the_same_velocity(tiny_sd3_model):
    latents, cond = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)), conditioning(tiny_sd3_model)
    arguments = tiny_sd3_model.transformer, latents, torch.full((3,), 500.0), cond
    with torch.no_grad():
        expected = tiny_sd3_model.velocity(*arguments)
        tiny_sd3_model.transformer.compile_repeated_blocks(backend="eager")
        assert_close(tiny_sd3_model.velocity(*arguments), expected)
