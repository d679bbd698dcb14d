"""The weights of an OpenCLIP model under the names that transformers' ``CLIPModel`` gives them.

Both compute the same: only names differ, the projections are transposed, and query, key and value are one tensor there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

HEADS = 16
"""Attention heads of both towers of ViT-H/14, which the weights' shapes do not show."""

_NAMES = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_IN_LAYERS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)")
# A constant that some versions of OpenCLIP write among the weights.
_CAUSAL_MASK = "attn_mask"


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of OpenCLIP as one of ``CLIPModel``.

    Raises:
        ValueError: a name is not one of an OpenCLIP with two transformers.
    """
    return {
        name: tensor for key, value in state.items() if key != _CAUSAL_MASK for name, tensor in _renamed(key, value)
    }


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    match = _LAYER.fullmatch(name)
    if name in _NAMES:
        yield _NAMES[name], tensor
    elif name in _TRANSPOSED:
        yield _TRANSPOSED[name], tensor.T.contiguous()
    elif match is not None and match[3] in ("attn.in_proj", *_IN_LAYERS):
        tower, number, part, kind = match.groups()
        layer = f"{'vision' if tower else 'text'}_model.encoder.layers.{number}"
        if part in _IN_LAYERS:
            yield f"{layer}.{_IN_LAYERS[part]}.{kind}", tensor
            return
        for letter, third in zip("qkv", tensor.chunk(3), strict=True):
            # Cloned: parameters that share one storage cannot be saved.
            yield f"{layer}.self_attn.{letter}_proj.{kind}", third.clone()
    else:
        # A tensor that is left out would change the scores in silence.
        raise ValueError(f"{name!r} is not the name of a tensor of OpenCLIP's ViT")


def sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of ``CLIPConfig``, from the shapes of OpenCLIP's weights.

    Raises:
        KeyError: one of the weights is missing.
    """
    patch = state["visual.conv1.weight"].shape[-1]
    patches = len(state["visual.positional_embedding"]) - 1
    projection = state["text_projection"].shape[1]
    vocabulary = len(state["token_embedding.weight"])
    text = {
        **_tower(state, "transformer"),
        "vocab_size": vocabulary,
        "max_position_embeddings": len(state["positional_embedding"]),
        "projection_dim": projection,
        # OpenCLIP takes a prompt's embedding where its largest token is: the last of the vocabulary, which ends it.
        "eos_token_id": vocabulary - 1,
        "bos_token_id": vocabulary - 2,
    }
    vision = {
        **_tower(state, "visual.transformer"),
        "patch_size": patch,
        "image_size": patch * math.isqrt(patches),
        "projection_dim": projection,
    }
    return {"text_config": text, "vision_config": vision, "projection_dim": projection}


def _tower(state: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    layers = {match[1] for name in state if (match := re.match(rf"{re.escape(prefix)}\.resblocks\.(\d+)\.", name))}
    inner, width = state[f"{prefix}.resblocks.0.mlp.c_fc.weight"].shape
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": len(layers),
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
    }
