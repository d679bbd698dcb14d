"""A `StableDiffusion3Pipeline` in miniature, with random weights: the real classes in small sizes, built without a hub.

Like 3.5-medium it has two CLIPs and a T5, normalised queries and keys, and a second attention in its first block.
"""

import string
from pathlib import Path

import torch

CLIP_TOKENS, T5_WIDTH = 16, 48
SIZE = {"height": 32, "width": 32}


def build(shift: float = 3.0, *, t5: bool = True, dynamic: bool = False):
    """The pipeline; its weights depend on nothing but this code and torch's generator."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    tokenizers = [_clip_tokenizer(), _clip_tokenizer(), _t5_tokenizer() if t5 else None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=dynamic),
            vae=_vae(),
            text_encoder=_clip(16, tokenizers[0]),
            tokenizer=tokenizers[0],
            text_encoder_2=_clip(24, tokenizers[1]),
            tokenizer_2=tokenizers[1],
            text_encoder_3=_t5(tokenizers[2]) if t5 else None,
            tokenizer_3=tokenizers[2],
        )
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        if part is not None:
            part.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(folder: Path, **settings) -> str:
    """Build it into ``folder``; returns the path as ``actor_rollout_ref.model.path`` takes it."""
    build(**settings).save_pretrained(folder)
    return str(folder)


def _transformer():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
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
    )


def _vae():
    """Untrained, so its last layer is scaled up: images then use the whole range of grey levels."""
    from diffusers import AutoencoderKL

    blocks = 3
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.decoder.conv_out.weight.data *= 2
    return vae


def _clip(width: int, tokenizer):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5(tokenizer):
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=T5_WIDTH,
            d_kv=24,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def _clip_tokenizer():
    """A token a character, and one a character that ends a word."""
    from transformers import CLIPTokenizer

    characters = string.printable.strip()
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=CLIP_TOKENS)


def _t5_tokenizer():
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*special, *((c, -3.0) for c in string.printable.strip())], extra_ids=0)
