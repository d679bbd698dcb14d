"""FLUX.2 in miniature, klein and dev, with random weights. A token is of 4x4 pixels."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tiny_families import parts

KLEIN_LAYERS, DEV_LAYERS = 27, 30
"""The deepest layers of the text encoders that the pipelines read."""
TEXT_WIDTH = 16
KLEIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEV_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content[0].text %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]{% else %}[INST]{{ text }}[/INST]"
    "{% endif %}{% endfor %}"
)
DEV_TOKENS = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")


def build_klein(*, distilled=False):
    """A ``Flux2KleinPipeline``; the base model, or the distilled one, which takes no classifier-free guidance."""
    from diffusers import Flux2KleinPipeline

    tokenizer = parts.qwen_tokenizer(KLEIN_TEMPLATE)
    return _pipeline(Flux2KleinPipeline, tokenizer, _qwen3, guidance_embeds=False, is_distilled=distilled)


def build_dev():
    """A ``Flux2Pipeline``. It has a tokenizer where the released one has a processor, whose images it never takes."""
    from diffusers import Flux2Pipeline

    return _pipeline(Flux2Pipeline, _dev_tokenizer(), _mistral3, guidance_embeds=True)


@parts.seeded
def _pipeline(kind, tokenizer, text_encoder, *, guidance_embeds, **settings):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return kind(
        transformer=_transformer(guidance_embeds),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        **settings,
    )


def klein_call(prompts, negative, true_cfg_scale, guidance_scale, length, images=None, size=None):
    """Of the pipeline's arguments, those that a family names in its own way; its negative prompt is fixed."""
    return {"prompt": prompts, "guidance_scale": true_cfg_scale, "max_sequence_length": length, "image": images}


def dev_call(prompts, negative, true_cfg_scale, guidance_scale, length, images=None, size=None):
    """As ``klein_call``; there is no negative prompt."""
    return {"prompt": prompts, "guidance_scale": guidance_scale, "max_sequence_length": length, "image": images}


def _transformer(guidance_embeds):
    from diffusers import Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * TEXT_WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    # An untrained attention gives the mean of all tokens: here it picks some, and they count.
    louder = ("norm_q.", "norm_added_q.", "v_proj.", "attn.to_out.", "guidance_embedder.")
    for name, weights in transformer.named_parameters():
        if any(part in name for part in louder):
            weights.data *= 4
    return transformer


def _vae():
    """Untrained, so its last layer is scaled up; its batch-norm statistics are any but the identity's."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
    )
    vae.decoder.conv_out.weight.data *= 2
    vae.bn.running_mean.normal_(0, 0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def _qwen3(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_text_sizes(KLEIN_LAYERS, tokenizer)))


def _mistral3(tokenizer):
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=MistralConfig(**_text_sizes(DEV_LAYERS, tokenizer)),
            vision_config=PixtralVisionConfig(image_size=32, patch_size=16, **vision),
            image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        )
    )


def _text_sizes(layers, tokenizer):
    return parts.text_sizes(
        TEXT_WIDTH,
        tokenizer,
        num_hidden_layers=layers,
        intermediate_size=16,
        num_attention_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.3,  # larger than usual, so that the layers say different things
        tie_word_embeddings=True,
    )


def _dev_tokenizer():
    """A token a byte, one a word of the system message, and the marks of the chat template.

    It pads before the prompt, as the released one does.
    """
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from transformers import PreTrainedTokenizerFast

    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = sorted({word for word, _ in cut.pre_tokenize_str(SYSTEM_MESSAGE) if len(word) > 1})
    special = ["<unk>", "<s>", "</s>", "<pad>", *DEV_TOKENS]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    backend = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0))
    backend.pre_tokenizer = cut
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(DEV_TOKENS),
        padding_side="left",
        chat_template=DEV_TEMPLATE,
    )
