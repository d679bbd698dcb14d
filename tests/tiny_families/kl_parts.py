"""Parts that several tiny pipelines are made of, untrained and without a hub."""


def autoencoder(channels: int, *, blocks: int = 3, scale: float = 2.0, **settings):
    """An ``AutoencoderKL`` of ``2 ** (blocks - 1)`` pixels a latent.

    Untrained, so its last layer is scaled up: images then use the whole range of grey levels.
    """
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8, *(16,) * (blocks - 1)),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **settings,
    )
    vae.decoder.conv_out.weight.data *= scale
    return vae
