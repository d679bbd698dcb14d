"""A `BriaPipeline` in miniature, with random weights."""

from tiny_families import parts

T5_WIDTH = 48


@parts.seeded
def build(*, dynamic=True, shift_factor=0.1159):
    """With dynamic shifts, or one; its VAE may have no shift of the latents."""
    import diffusers

    tokenizer = parts.t5_tokenizer()
    return diffusers.BriaPipeline(
        transformer=diffusers.BriaTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=1.0 if dynamic else 3.0, use_dynamic_shifting=dynamic
        ),
        vae=parts.vae(shift_factor=shift_factor),
        text_encoder=parts.t5(T5_WIDTH, tokenizer),
        tokenizer=tokenizer,
    )
