"""An `AuraFlowPipeline` in miniature, with random weights."""

from tiny_families import parts

WIDTH = 24


@parts.seeded
def build():
    """Like AuraFlow."""
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    tokenizer = parts.t5_tokenizer()
    return AuraFlowPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=parts.vae(4, scaling_factor=0.13025, shift_factor=None),
        text_encoder=parts.umt5(WIDTH, tokenizer, d_kv=12, d_ff=32),
        tokenizer=tokenizer,
        transformer=parts.louder(
            AuraFlowTransformer2DModel(
                sample_size=8,
                num_mmdit_layers=1,
                num_single_dit_layers=1,
                attention_head_dim=12,
                num_attention_heads=2,
                joint_attention_dim=WIDTH,
                caption_projection_dim=24,
                pos_embed_max_size=64,
            ),
            1.5,
        ),
    )
