"""Tokenizers and text encoders in miniature: a token a character, random weights.

The encoders stay random: a transformer learns to read digits and places from what they make of a prompt.
"""

import string

from torch import nn
from transformers import CLIPTextConfig, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

CHARACTERS = string.printable.strip()


def clip_tokenizer(tokens: int) -> CLIPTokenizer:
    """A token a character, and one a character that ends a word; prompts are cut to `tokens`."""
    known = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(f"{c}</w>" for c in CHARACTERS)]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(known)}, merges=[], model_max_length=tokens
    )


def clip_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    """Two layers."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def enlarge_embeddings(model: nn.Module) -> None:
    """Random embeddings of size 1, next to which the layers' own are not lost."""
    for embedding in (module for module in model.modules() if isinstance(module, nn.Embedding)):
        nn.init.normal_(embedding.weight)


def t5_tokenizer() -> T5Tokenizer:
    """A token a character."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*special, *((c, -3.0) for c in CHARACTERS)], extra_ids=0)


def make_t5(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    """Two layers, whose attention looks at neighbours: a transformer without positions for the text then still knows
    which digit is the first."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model = T5EncoderModel(config)
    nn.init.normal_(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight, std=3.0)
    return model
