"""Parts that several tiny pipelines share: networks with random weights, and tokenizers, all of the released kinds."""

import string
from functools import wraps

import torch

CLIP_TOKENS = 16


def seeded(build):
    """``build()`` with the same random weights every time, in evaluation mode and silent."""

    @wraps(build)
    def ready(*args, **settings):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipe = build(*args, **settings)
        for part in pipe.components.values():
            if hasattr(part, "eval"):
                part.eval()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return ready


def call(prompts, negative, true_cfg_scale, guidance_scale, length):
    """The arguments of a pipeline that calls the scale of classifier-free guidance ``guidance_scale``."""
    return {
        "prompt": prompts,
        "negative_prompt": negative,
        "guidance_scale": true_cfg_scale,
        "max_sequence_length": length,
    }


def vae(latent_channels=16, block_out_channels=(8, 16, 16), **settings):
    """Untrained, so its last layer is scaled up: images then use the whole range of grey levels. 4 pixels a latent."""
    from diffusers import AutoencoderKL

    blocks = len(block_out_channels)
    found = AutoencoderKL(
        **{
            "down_block_types": ("DownEncoderBlock2D",) * blocks,
            "up_block_types": ("UpDecoderBlock2D",) * blocks,
            "block_out_channels": block_out_channels,
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "latent_channels": latent_channels,
            "scaling_factor": 0.3611,
            "shift_factor": 0.1159,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            **settings,
        }
    )
    found.decoder.conv_out.weight.data *= 2
    return found


def clip_tokenizer(length=CLIP_TOKENS):
    """A token a character, and one a character that ends a word; prompts are cut to ``length``."""
    from transformers import CLIPTokenizer

    characters = string.printable.strip()
    known = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    vocab = {token: i for i, token in enumerate(known)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=length)


def clip_config(width, tokenizer):
    """Of a CLIP's text half."""
    from transformers import CLIPTextConfig

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


def t5_tokenizer():
    """A token a character."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*special, *((c, -3.0) for c in string.printable.strip())], extra_ids=0)


def t5(width, tokenizer):
    """A T5's encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_sizes(width, tokenizer)))


def umt5(width, tokenizer, **settings):
    """A UMT5's encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_t5_sizes(width, tokenizer) | settings))


def _t5_sizes(width, tokenizer):
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": 24,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }


def gemma_tokenizer():
    """A token a character of ASCII, and a token a byte for others."""
    from transformers import GemmaTokenizer

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n", "▁", *string.printable.strip()]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    return GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], add_bos_token=True)


def qwen_tokenizer(chat_template):
    """A token a byte, and the marks of Qwen's chat template."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = chat_template
    return tokenizer


def gemma2(width, tokenizer, **settings):
    """A Gemma 2 without its head."""
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(**text_sizes(width, tokenizer, **{"query_pre_attn_scalar": 16} | settings)))


def text_sizes(width, tokenizer, **others):
    """Of a decoder's configuration."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **others,
    }


def louder(network, factor):
    """The network with its matrices scaled up: with the small weights of a new one, prompts hardly show."""
    for parameter in network.parameters():
        if parameter.ndim == 2:
            parameter.data *= factor
    return network
