"""A `StableDiffusion3Pipeline` in miniature, with random weights: the real classes in small sizes, built without a hub.

Like 3.5-medium it has two CLIPs and a T5, normalised queries and keys, and a second attention in its first block.
"""

from tiny_families import parts

CLIP_TOKENS = parts.CLIP_TOKENS
T5_WIDTH = 48


@parts.seeded
def build(*, t5: bool = True, clip_tokens: int = CLIP_TOKENS):
    """The pipeline; its weights depend on nothing but this code and torch's generator."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    clips = [parts.clip_tokenizer(clip_tokens) for _ in range(2)]
    t5_tokenizer = parts.t5_tokenizer() if t5 else None
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=16 + 24,
            pos_embed_max_size=20,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.vae(4, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=CLIPTextModelWithProjection(parts.clip_config(16, clips[0])),
        tokenizer=clips[0],
        text_encoder_2=CLIPTextModelWithProjection(parts.clip_config(24, clips[1])),
        tokenizer_2=clips[1],
        text_encoder_3=parts.t5(T5_WIDTH, t5_tokenizer) if t5 else None,
        tokenizer_3=t5_tokenizer,
    )
