"""A `Lumina2Pipeline` in miniature, with random weights."""

import string

from tiny_families import parts

WIDTH = 16


@parts.seeded
def build():
    """Like Lumina-Image 2.0."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    tokenizer = _tokenizer()
    return Lumina2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=parts.vae(block_out_channels=(8, 16, 16, 16)),  # 8 pixels a latent, which the pipeline takes for granted
        text_encoder=parts.gemma2(WIDTH, tokenizer, head_dim=8, query_pre_attn_scalar=8, sliding_window=64),
        tokenizer=tokenizer,
        transformer=parts.louder(
            Lumina2Transformer2DModel(
                hidden_size=24,
                num_layers=2,
                num_refiner_layers=1,
                num_attention_heads=2,
                num_kv_heads=1,
                multiple_of=16,
                axes_dim_rope=(4, 4, 4),
                axes_lens=(128, 8, 8),
                cap_feat_dim=WIDTH,
            ),
            1.5,
        ),
    )


def _tokenizer():
    """A token a character, and one for the pipeline's whole system prompt."""
    from diffusers import Lumina2Pipeline
    from transformers import GemmaTokenizer

    characters = ["▁", *string.printable.strip()]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *characters])}
    tokenizer = GemmaTokenizer(vocab=vocab, merges=[], add_bos_token=True)
    blank = Lumina2Pipeline(transformer=None, scheduler=None, vae=None, text_encoder=None, tokenizer=None)
    tokenizer.add_tokens([blank.system_prompt])
    return tokenizer
