"""A `SanaPipeline` in miniature, with random weights."""

from tiny_families import parts

GEMMA_WIDTH, CHANNELS = 32, 8


@parts.seeded
def build(*, out_channels=CHANNELS):
    """With the solver of released checkpoints. With twice as many ``out_channels`` it predicts a variance too."""
    import diffusers

    tokenizer = parts.gemma_tokenizer()
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=parts.gemma2(GEMMA_WIDTH, tokenizer),
        vae=_vae(),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=out_channels,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=GEMMA_WIDTH,
        ),
        # Of order 1, so that its steps are Euler's; the noise levels do not depend on it.
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=1
        ),
    )


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """Of the pipeline's arguments, those that a family names in its own way."""
    return parts.call(prompts, negative, true_cfg_scale, guidance_scale, length) | {"use_resolution_binning": False}


def _vae():
    """Of 32 pixels a latent, which the pipeline's sizes are multiples of. Its last layer is scaled up."""
    from diffusers import AutoencoderDC

    blocks = ("ResBlock",) * 5 + ("EfficientViTBlock",)
    scales = ((),) * 5 + ((5,),)
    channels = (4, 4, 8, 8, 8, 8)
    vae = AutoencoderDC(
        latent_channels=CHANNELS,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        scaling_factor=0.41407,
    )
    vae.decoder.conv_out.weight.data *= 2
    return vae
