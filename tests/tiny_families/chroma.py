"""A `ChromaPipeline` in miniature, with random weights."""

from tiny_families import parts

T5_WIDTH = 48


@parts.seeded
def build():
    """Blocks are modulated by a network of their own, whose last layer is scaled up: they then have a say."""
    import diffusers

    tokenizer = parts.t5_tokenizer()
    pipe = diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=parts.vae(),
        text_encoder=parts.t5(T5_WIDTH, tokenizer),
        tokenizer=tokenizer,
        transformer=diffusers.ChromaTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=16,
            approximator_hidden_dim=32,
            approximator_layers=2,
        ),
    )
    pipe.transformer.distilled_guidance_layer.out_proj.weight.data *= 4
    return pipe
