"""The parts of a tiny `FluxKontextPipeline`, untrained: the real classes in small sizes."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from image_vae import make_vae
from text_encoders import clip_config, clip_tokenizer, enlarge_embeddings, make_t5, t5_tokenizer
from transformers import CLIPTextModel

LATENT_CHANNELS = 8
CLIP_WIDTH = T5_WIDTH = 32
TEXT_TOKENS = 16
HEADS, HEAD_WIDTH = 4, 20


def make_transformer() -> FluxTransformer2DModel:
    """One double and three single blocks, 80 wide, over 16 tokens of 2x2 latents, the reference's 16 and the text's."""
    return FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=3,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        axes_dims_rope=(4, 8, 8),
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=False,
    )


def build_pipeline(seed: int) -> FluxKontextPipeline:
    """The untrained pipeline."""
    torch.manual_seed(seed)
    tokenizer, tokenizer_2 = clip_tokenizer(TEXT_TOKENS), t5_tokenizer()
    clip = CLIPTextModel(clip_config(tokenizer, CLIP_WIDTH))
    enlarge_embeddings(clip)
    pipeline = FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=make_vae(LATENT_CHANNELS, (8, 16, 24), groups=1),
        text_encoder=clip.eval(),
        tokenizer=tokenizer,
        text_encoder_2=make_t5(tokenizer_2, T5_WIDTH).eval(),
        tokenizer_2=tokenizer_2,
        transformer=make_transformer(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
