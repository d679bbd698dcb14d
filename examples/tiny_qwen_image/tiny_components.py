"""The parts of a tiny `QwenImagePipeline`, untrained: the real classes in small sizes.

The tokenizer's vocabulary is made from the pipeline's fixed prompt template, one token per word, as in the
real Qwen tokenizer. The template is then 34 tokens long, which is how many embeddings the pipeline drops
from every prompt; `build_pipeline` checks it.
"""

from collections.abc import Sequence

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

LATENT_CHANNELS = 8
TEXT_WIDTH = 64
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

Pair = tuple[str, str]


def apply_merges(symbols: Sequence[str], merges: Sequence[Pair]) -> list[str]:
    """Byte-pair encoding of one word: apply the merges, first ones first."""
    symbols = list(symbols)
    for left, right in merges:
        position = 0
        while position < len(symbols) - 1:
            if (symbols[position], symbols[position + 1]) == (left, right):
                symbols[position : position + 2] = [left + right]
            position += 1
    return symbols


def make_merges(words: Sequence[str]) -> list[Pair]:
    """Merges that make one token of each word.

    Merges found for earlier words also act on later ones, so each word is first split by those, and only
    what is left is chained together.
    """
    merges: list[Pair] = []
    for word in words:
        symbols = apply_merges(word, merges)
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols = apply_merges(word, merges)
    return merges


def make_tokenizer(template: str, prompt: str) -> Qwen2Tokenizer:
    """A `Qwen2Tokenizer` with one token per byte and one per word of the template and of the prompt's
    start.

    Qwen's splitting rule always separates digits, so every digit is its own (byte) token.
    """
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(byte_tokens)}, merges=[])
    for token in CHAT_TOKENS:
        template = template.replace(token, "\n")
    pieces = splitter.backend_tokenizer.pre_tokenizer.pre_tokenize_str(template.replace("{}", prompt))
    merges = make_merges(list(dict.fromkeys(piece for piece, _ in pieces if piece.strip("Ċ"))))
    vocabulary = byte_tokens + [left + right for left, right in merges]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocabulary)},
        merges=merges,
        additional_special_tokens=[*CHAT_TOKENS, *VISION_TOKENS],
    )


def make_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """One random layer. It stays random: the transformer learns to read digits and places from it."""
    pad = tokenizer.pad_token_id
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "type": "default",
                "rope_type": "default",
                "mrope_section": [4, 6, 6],
                "rope_theta": 10000.0,
            },
            "tie_word_embeddings": True,
            "bos_token_id": pad,
            "eos_token_id": pad,
            "pad_token_id": pad,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
        },
        **{
            f"{token.strip('<|>').removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(token)
            for token in VISION_TOKENS
        },
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_vae() -> AutoencoderKLQwenImage:
    """32x32 pixels to 8x8 latents of 8 channels. The latents' mean and std are filled in after training."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def make_transformer() -> QwenImageTransformer2DModel:
    """Four dual-stream blocks, 128 wide, over 16 tokens of 2x2 latents."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def build_pipeline(prompt: str, seed: int) -> QwenImagePipeline:
    """The untrained pipeline; `prompt` shows which words the prompts will have."""
    blank = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    tokenizer = make_tokenizer(blank.prompt_template_encode, prompt)
    prefix = blank.prompt_template_encode.split("{}")[0]
    length = len(tokenizer(prefix)["input_ids"])
    if length != blank.prompt_template_encode_start_idx:
        raise RuntimeError(
            f"the prompt template is {length} tokens long, but this diffusers version drops "
            f"{blank.prompt_template_encode_start_idx}"
        )
    torch.manual_seed(seed)
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=make_transformer(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
