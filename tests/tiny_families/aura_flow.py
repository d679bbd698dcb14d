"""An `AuraFlowPipeline` in miniature, with random weights."""

import torch

from tiny_families import parts

WIDTH = 24


def build():
    """Like AuraFlow."""
    from diffusers import AuraFlowPipeline, FlowMatchEulerDiscreteScheduler

    tokenizer = parts.t5_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return parts.ready(
            AuraFlowPipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
                vae=parts.vae(4, scaling_factor=0.13025, shift_factor=None),
                text_encoder=_text_encoder(tokenizer),
                tokenizer=tokenizer,
                transformer=_transformer(),
            )
        )


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """Of the pipeline's arguments, those that a family names in its own way."""
    return {
        "prompt": prompts,
        "negative_prompt": negative,
        "guidance_scale": true_cfg_scale,
        "max_sequence_length": length,
    }


def _transformer():
    from diffusers import AuraFlowTransformer2DModel

    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=12,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=24,
        pos_embed_max_size=64,
    )
    return parts.louder(transformer, 1.5)


def _text_encoder(tokenizer):
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=WIDTH,
            d_kv=12,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )
