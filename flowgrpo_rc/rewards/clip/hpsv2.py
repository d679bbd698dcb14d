"""The checkpoint of HPSv2, which is one of OpenCLIP, and its preprocessing; ``hpsv2`` and ``open_clip`` not needed.

transformers' ``CLIPModel`` computes the same as OpenCLIP's: only names differ, the projections are transposed, and
query, key and value are one tensor there.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.rewards.clip.scorer import HUB_NAME, explained, located

FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
"""The checkpoints in the hub's repository, by version."""


def find_checkpoint(section: str, path: str, version: str) -> Path | None:
    """The checkpoint that ``path`` is or holds, here or on the hub; None for a folder in transformers' format."""
    file = FILES[version]
    with explained(f"{section}.model_path", path, f"Give the file {file}, or a folder that holds it"):
        where = Path(located(path))
        # A file is meant as it is, whatever its name and the version.
        if where.is_file():
            return where
        if (where / "config.json").is_file():
            return None
        if where.is_dir() or not re.fullmatch(HUB_NAME, path):
            if not (where / file).is_file():
                raise ValueError(f"there is no {where / file}")
            return where / file
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(path, file))


def load_checkpoint(section: str, file: Path, dtype: str) -> Any:
    """The ``CLIPModel`` with the weights of an OpenCLIP checkpoint: frozen, in evaluation mode, on the CPU."""
    from accelerate import init_empty_weights
    from transformers import CLIPConfig, CLIPModel

    with explained(f"{section}.model_path", str(file), "Give a checkpoint of OpenCLIP's ViT"):
        # ``weights_only``: the file can run no code.
        content = torch.load(file, map_location="cpu", weights_only=True)
        state = content.get("state_dict", content)
        try:
            config = CLIPConfig(**sizes(state))
        except KeyError as error:
            raise ValueError(f"it has no tensor {error.args[0]!r}") from error
        with init_empty_weights(include_buffers=False):  # a billion random numbers would be drawn in vain
            network = CLIPModel(config)
        weights = {name: tensor.to(torch_dtype(dtype)) for name, tensor in renamed(state).items()}
        # Assigned and not copied, since the network's own tensors are empty ones.
        network.load_state_dict(weights, strict=True, assign=True)
    return network.requires_grad_(False).eval()


def padded_pixels(images: Sequence[np.ndarray], side: int) -> Tensor:
    """HPSv2's preprocessing: N images, each (H, W, 3) uint8 RGB, as (N, 3, side, side) float32.

    The longest side becomes ``side`` pixels, and black bars fill the square. Resized as torchvision resizes tensors
    since its version 0.17: bicubic and antialiased, in floating point.
    """
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    squares = []
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        scale = side / max(pixels.shape[1:])
        # Thin images keep at least one row.
        height, width = (max(1, round(length * scale)) for length in pixels.shape[1:])
        if scale != 1:
            pixels = F.interpolate(pixels[None], size=(height, width), mode="bicubic", antialias=True)[0]
        left = (side - width) // 2
        top = (side - height) // 2
        squares.append(F.pad(pixels, (left, side - width - left, top, side - height - top)))
    return (torch.stack(squares) - mean) / std


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


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of OpenCLIP as one of ``CLIPModel``; raises ``ValueError`` for a tensor of another name."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _LAYER.fullmatch(name)
        tower, number, part, kind = match.groups() if match else ("", "", "", "")
        layer = f"{'vision' if tower else 'text'}_model.encoder.layers.{number}"
        if name in _NAMES:
            found[_NAMES[name]] = tensor
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = tensor.T.contiguous()
        elif part in _IN_LAYERS:
            found[f"{layer}.{_IN_LAYERS[part]}.{kind}"] = tensor
        elif part == "attn.in_proj":
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                # Cloned: parameters that share one storage cannot be saved.
                found[f"{layer}.self_attn.{letter}_proj.{kind}"] = third.clone()
        # Some versions of OpenCLIP write a constant, the causal mask, among the weights.
        elif name != "attn_mask":
            # A tensor that is left out would change the scores in silence.
            raise ValueError(f"{name!r} is not the name of a tensor of OpenCLIP's ViT")
    return found


def sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of ``CLIPConfig``, from the shapes of OpenCLIP's weights; ``KeyError`` where one is missing."""
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
