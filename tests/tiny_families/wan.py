"""A `WanPipeline` in miniature, with random weights."""

from tiny_families import parts

T5_WIDTH, CHANNELS = 48, 4


@parts.seeded
def build(*, expand_timesteps=False):
    """Like Wan 2.1, with the solver of released checkpoints; with ``expand_timesteps`` like Wan 2.2 TI2V-5B."""
    import diffusers

    tokenizer = parts.t5_tokenizer()
    return diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=parts.umt5(T5_WIDTH, tokenizer),
        vae=_vae(residual=expand_timesteps),
        # Of order 1 and without its corrector, so that its steps are Euler's; the noise levels do not depend on it.
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
            solver_order=1,
            disable_corrector=list(range(8)),
        ),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=T5_WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=64,
        ),
        expand_timesteps=expand_timesteps,
    )


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """Of the pipeline's arguments, those that a family names in its own way."""
    return parts.call(prompts, negative, true_cfg_scale, guidance_scale, length) | {"num_frames": 1}


def _vae(*, residual):
    """Of 4 pixels a latent; of 8 the residual kind, which joins 2x2 pixels first. The last layer is scaled up."""
    from diffusers import AutoencoderKLWan

    colours = 12 if residual else 3
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.7571, -0.7089, -0.9113, 0.1075],
        latents_std=[2.8184, 1.4541, 2.3275, 2.6558],
        is_residual=residual,
        in_channels=colours,
        out_channels=colours,
        patch_size=2 if residual else None,
        scale_factor_temporal=2,
        scale_factor_spatial=8 if residual else 4,
    )
    vae.decoder.conv_out.weight.data *= 2
    return vae
