"""A `Lumina2Pipeline` in miniature, with random weights."""

import string

import torch

from tiny_families import parts

WIDTH = 16


def build():
    """Like Lumina-Image 2.0."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline

    tokenizer = _tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return parts.ready(
            Lumina2Pipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
                vae=_vae(),
                text_encoder=_text_encoder(tokenizer),
                tokenizer=tokenizer,
                transformer=_transformer(),
            )
        )


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """Of the pipeline's arguments, those that a family names in its own way."""
    return {
        "prompt": prompts,
        "negative_prompt": negative,
        "guidance_scale": true_cfg_scale,
        "max_sequence_length": length,
    }


def _vae():
    """8 pixels a latent, which the pipeline takes for granted."""
    blocks = 4
    return parts.vae(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8, 16, 16, 16),
    )


def _transformer():
    from diffusers import Lumina2Transformer2DModel

    transformer = Lumina2Transformer2DModel(
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(128, 8, 8),
        cap_feat_dim=WIDTH,
    )
    return parts.louder(transformer, 1.5)


def _text_encoder(tokenizer):
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=64,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
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
