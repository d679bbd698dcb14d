"""A `ZImagePipeline` in miniature, with random weights."""

import torch

from tiny_families import parts

WIDTH = 32
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@parts.seeded
def build():
    """Like Z-Image and Z-Image-Turbo; the template makes captions on both sides of 32 tokens."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = parts.qwen_tokenizer(CHAT_TEMPLATE)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.vae(),
        text_encoder=Qwen3Model(Qwen3Config(**parts.text_sizes(WIDTH, tokenizer, intermediate_size=48))),
        tokenizer=tokenizer,
        transformer=_transformer(),
    )


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """Of the pipeline's arguments, those that a family names in its own way."""
    return parts.call(prompts, negative, true_cfg_scale - 1, guidance_scale, length)


def _transformer():
    from diffusers import ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 8, 8],
    )
    # Zeros in a new transformer; trained ones are not.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return transformer
