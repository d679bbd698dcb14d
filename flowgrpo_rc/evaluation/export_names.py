"""Names that other programs' models give to the layers of diffusers' transformers.

A row has a pattern of our names and the name of theirs. Several of our layers with one name are stacked in their
model, in the order of ``STACKED``. The rows follow ComfyUI's models and the key maps of its ``comfy/utils.py``, and
kohya's models in sd-scripts and musubi-tuner.
"""

import re

Names = dict[str, str]

STACKED = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp")
"""Last parts of our names, in the order in which the other models stack these layers."""

SAME: Names = {r"(.+)": r"\1"}

# FLUX.1, FLUX.2 and Chroma. A modulation of FLUX.2 is shared by all blocks, one of Chroma is computed.
FLUX: Names = {
    r"transformer_blocks.(\d+).norm1.linear": r"double_blocks.\1.img_mod.lin",
    r"transformer_blocks.(\d+).attn.to_[qkv]": r"double_blocks.\1.img_attn.qkv",
    r"transformer_blocks.(\d+).attn.to_out.0": r"double_blocks.\1.img_attn.proj",
    r"transformer_blocks.(\d+).ff.(net.0.proj|linear_in)": r"double_blocks.\1.img_mlp.0",
    r"transformer_blocks.(\d+).ff.(net.2|linear_out)": r"double_blocks.\1.img_mlp.2",
    r"transformer_blocks.(\d+).norm1_context.linear": r"double_blocks.\1.txt_mod.lin",
    r"transformer_blocks.(\d+).attn.add_[qkv]_proj": r"double_blocks.\1.txt_attn.qkv",
    r"transformer_blocks.(\d+).attn.to_add_out": r"double_blocks.\1.txt_attn.proj",
    r"transformer_blocks.(\d+).ff_context.(net.0.proj|linear_in)": r"double_blocks.\1.txt_mlp.0",
    r"transformer_blocks.(\d+).ff_context.(net.2|linear_out)": r"double_blocks.\1.txt_mlp.2",
    r"single_transformer_blocks.(\d+).norm.linear": r"single_blocks.\1.modulation.lin",
    r"single_transformer_blocks.(\d+).(attn.to_[qkv]|proj_mlp|attn.to_qkv_mlp_proj)": r"single_blocks.\1.linear1",
    r"single_transformer_blocks.(\d+).(proj_out|attn.to_out)": r"single_blocks.\1.linear2",
    r"(\w+_stream_modulation\w*).linear": r"\1.lin",
    r"(distilled_guidance_layer.(in|out)_proj)": r"\1",
    r"(distilled_guidance_layer.layers.\d+).linear_1": r"\1.in_layer",
    r"(distilled_guidance_layer.layers.\d+).linear_2": r"\1.out_layer",
    r"time_(text|guidance)_embed.timestep_embedder.linear_1": "time_in.in_layer",
    r"time_(text|guidance)_embed.timestep_embedder.linear_2": "time_in.out_layer",
    r"time_(text|guidance)_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    r"time_(text|guidance)_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    r"time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    r"time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    r"x_embedder": "img_in",
    r"context_embedder": "txt_in",
    r"norm_out.linear": "final_layer.adaLN_modulation.1",
    r"proj_out": "final_layer.linear",
}
STABLE_DIFFUSION_3: Names = {
    r"transformer_blocks.(\d+).norm1.linear": r"joint_blocks.\1.x_block.adaLN_modulation.1",
    r"transformer_blocks.(\d+).(attn2?).to_[qkv]": r"joint_blocks.\1.x_block.\2.qkv",
    r"transformer_blocks.(\d+).(attn2?).to_out.0": r"joint_blocks.\1.x_block.\2.proj",
    r"transformer_blocks.(\d+).ff.net.0.proj": r"joint_blocks.\1.x_block.mlp.fc1",
    r"transformer_blocks.(\d+).ff.net.2": r"joint_blocks.\1.x_block.mlp.fc2",
    r"transformer_blocks.(\d+).norm1_context.linear": r"joint_blocks.\1.context_block.adaLN_modulation.1",
    r"transformer_blocks.(\d+).attn.add_[qkv]_proj": r"joint_blocks.\1.context_block.attn.qkv",
    r"transformer_blocks.(\d+).attn.to_add_out": r"joint_blocks.\1.context_block.attn.proj",
    r"transformer_blocks.(\d+).ff_context.net.0.proj": r"joint_blocks.\1.context_block.mlp.fc1",
    r"transformer_blocks.(\d+).ff_context.net.2": r"joint_blocks.\1.context_block.mlp.fc2",
    r"time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    r"time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    r"time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    r"time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    r"context_embedder": "context_embedder",
    r"norm_out.linear": "final_layer.adaLN_modulation.1",
    r"proj_out": "final_layer.linear",
}
Z_IMAGE: Names = {
    r"(.+).attention.to_[qkv]": r"\1.attention.qkv",
    r"(.+).attention.to_out.0": r"\1.attention.out",
    r"(.+.feed_forward.w[123]|.+.\d+.adaLN_modulation.0)": r"\1",
    r"(t_embedder.mlp.[02]|cap_embedder.1)": r"\1",
    r"all_(x_embedder|final_layer).2-1(.*)": r"\1\2",
}
LUMINA_2: Names = {
    r"(.+).attn.to_[qkv]": r"\1.attention.qkv",
    r"(.+).attn.to_out.0": r"\1.attention.out",
    r"(.+).feed_forward.linear_([123])": r"\1.feed_forward.w\2",
    r"(.+).norm1.linear": r"\1.adaLN_modulation.1",
    r"time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    r"time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    r"time_caption_embed.caption_embedder.1": "cap_embedder.1",
    r"x_embedder": "x_embedder",
    r"norm_out.linear_1": "final_layer.adaLN_modulation.1",
    r"norm_out.linear_2": "final_layer.linear",
}
AURA_FLOW: Names = {
    r"joint_transformer_blocks.(\d+).norm1.linear": r"double_layers.\1.modX.1",
    r"joint_transformer_blocks.(\d+).norm1_context.linear": r"double_layers.\1.modC.1",
    r"joint_transformer_blocks.(\d+).attn.to_([qkv])": r"double_layers.\1.attn.w2\2",
    r"joint_transformer_blocks.(\d+).attn.to_out.0": r"double_layers.\1.attn.w2o",
    r"joint_transformer_blocks.(\d+).attn.add_([qkv])_proj": r"double_layers.\1.attn.w1\2",
    r"joint_transformer_blocks.(\d+).attn.to_add_out": r"double_layers.\1.attn.w1o",
    r"joint_transformer_blocks.(\d+).ff.linear_([12])": r"double_layers.\1.mlpX.c_fc\2",
    r"joint_transformer_blocks.(\d+).ff.out_projection": r"double_layers.\1.mlpX.c_proj",
    r"joint_transformer_blocks.(\d+).ff_context.linear_([12])": r"double_layers.\1.mlpC.c_fc\2",
    r"joint_transformer_blocks.(\d+).ff_context.out_projection": r"double_layers.\1.mlpC.c_proj",
    r"single_transformer_blocks.(\d+).norm1.linear": r"single_layers.\1.modCX.1",
    r"single_transformer_blocks.(\d+).attn.to_([qkv])": r"single_layers.\1.attn.w1\2",
    r"single_transformer_blocks.(\d+).attn.to_out.0": r"single_layers.\1.attn.w1o",
    r"single_transformer_blocks.(\d+).ff.linear_([12])": r"single_layers.\1.mlp.c_fc\2",
    r"single_transformer_blocks.(\d+).ff.out_projection": r"single_layers.\1.mlp.c_proj",
    r"time_step_proj.linear_1": "t_embedder.mlp.0",
    r"time_step_proj.linear_2": "t_embedder.mlp.2",
    r"context_embedder": "cond_seq_linear",
    r"pos_embed.proj": "init_x_linear",
    r"norm_out.linear": "modF.1",
    r"proj_out": "final_linear",
}
WAN: Names = {
    r"blocks.(\d+).attn1.to_([qkv])": r"blocks.\1.self_attn.\2",
    r"blocks.(\d+).attn1.to_out.0": r"blocks.\1.self_attn.o",
    r"blocks.(\d+).attn2.to_([qkv])": r"blocks.\1.cross_attn.\2",
    r"blocks.(\d+).attn2.to_out.0": r"blocks.\1.cross_attn.o",
    r"blocks.(\d+).ffn.net.0.proj": r"blocks.\1.ffn.0",
    r"blocks.(\d+).ffn.net.2": r"blocks.\1.ffn.2",
    r"condition_embedder.(time|text)_embedder.linear_1": r"\1_embedding.0",
    r"condition_embedder.(time|text)_embedder.linear_2": r"\1_embedding.2",
    r"condition_embedder.time_proj": "time_projection.1",
    r"proj_out": "head.head",
}

_BOTH = {
    **dict.fromkeys(("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"), SAME),
    **dict.fromkeys(("FluxPipeline", "FluxKontextPipeline", "Flux2KleinPipeline", "Flux2Pipeline"), FLUX),
    "ChromaPipeline": FLUX,
    "StableDiffusion3Pipeline": STABLE_DIFFUSION_3,
    "Lumina2Pipeline": LUMINA_2,
    "WanPipeline": WAN,
}
NAMES: dict[str, dict[str, Names]] = {
    "comfyui": _BOTH | {"ZImagePipeline": Z_IMAGE, "AuraFlowPipeline": AURA_FLOW},
    # musubi-tuner splits ComfyUI's stacked layers of Z-Image when it reads a checkpoint.
    "kohya": _BOTH | {"ZImagePipeline": SAME},
}
"""Format of a file -> class name of a pipeline -> its rows. Families without rows have no names in that program."""


def formats_of(pipeline_class: str) -> list[str]:
    """The formats in which a LoRA of this family can be exported."""
    return ["diffusers", *(name for name, families in NAMES.items() if pipeline_class in families), "merged"]


def their_name(names: Names, layer: str) -> str:
    """Name of the layer that is ours or stacks it; raises ``ValueError`` where no row has it."""
    for pattern, theirs in names.items():
        found = re.fullmatch(pattern, layer)
        if found:
            return found.expand(theirs)
    raise ValueError(f"--format: it has no name for the layer {layer}; take --format=merged")
