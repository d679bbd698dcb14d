"""A `FluxPipeline` in miniature, with random weights."""

from tiny_families import parts

T5_WIDTH = 48


@parts.seeded
def build(*, guidance_embeds=True, dynamic=True, pipeline="FluxPipeline"):
    """Like FLUX.1-dev; without guidance and dynamic shifts like FLUX.1-schnell."""
    import diffusers
    from transformers import CLIPTextModel

    clip_tokenizer = parts.clip_tokenizer()
    t5_tokenizer = parts.t5_tokenizer()
    return getattr(diffusers, pipeline)(
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=16,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0 if dynamic else 1.0, use_dynamic_shifting=dynamic
        ),
        vae=parts.vae(),
        text_encoder=CLIPTextModel(parts.clip_config(16, clip_tokenizer)),
        tokenizer=clip_tokenizer,
        text_encoder_2=parts.t5(T5_WIDTH, t5_tokenizer),
        tokenizer_2=t5_tokenizer,
    )


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """Of the pipeline's arguments, those that a family names in its own way."""
    guided = {} if guidance_scale is None else {"guidance_scale": guidance_scale}
    steered = {"negative_prompt": negative, "true_cfg_scale": true_cfg_scale} if true_cfg_scale > 1 else {}
    return {"prompt": prompts, "max_sequence_length": length, **guided, **steered}


def call_kontext(prompts, negative, true_cfg_scale, guidance_scale, length, images, size):
    """The reference as near to 32 x 32 pixels as multiples of 8 come with its shape of 3 to 2: 39.2 x 26.1."""
    from PIL.Image import Resampling

    return {
        **call(prompts, negative, true_cfg_scale, guidance_scale, length),
        "image": [image.resize((40, 24), Resampling.LANCZOS) for image in images],
        "_auto_resize": False,
        "max_area": size[0] * size[1],
    }
