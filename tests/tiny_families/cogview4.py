"""A `CogView4Pipeline` in miniature, with random weights."""

from tiny_families import parts

WIDTH = 32


@parts.seeded
def build():
    """Like CogView4."""
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
    from transformers import GlmConfig, GlmModel

    tokenizer = _tokenizer()
    return CogView4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
        ),
        vae=parts.vae(scaling_factor=1.0, shift_factor=0.0),
        text_encoder=GlmModel(GlmConfig(**parts.text_sizes(WIDTH, tokenizer, intermediate_size=48))),
        tokenizer=tokenizer,
        transformer=parts.louder(
            CogView4Transformer2DModel(
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                text_embed_dim=WIDTH,
                time_embed_dim=32,
                condition_dim=8,
            ),
            1.5,
        ),
    )


def _tokenizer():
    """A token a byte, behind the two that GLM begins every text with; padded on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "[gMASK]", "<sop>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin = [(token, vocab[token]) for token in special[1:]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B", special_tokens=begin
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:],
        padding_side="left",
    )
