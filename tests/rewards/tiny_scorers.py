"""Random networks of a few thousand weights, saved as real scorers are: the rewards load them by their own code."""

import string
from pathlib import Path
from typing import Any

import torch

SIDE = 32
PATCH = 8
TOKENS = 77
WIDTH = 32
"""Of both towers: with the 16 heads of OpenCLIP's ViT-H each head has two values."""
PROJECTION = 24


def tokenizer() -> Any:
    """A token a character; the last one ends a prompt, as in CLIP's vocabulary."""
    from transformers import CLIPTokenizer

    characters = string.printable.strip()
    tokens = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=TOKENS)


def towers(**more: Any) -> dict[str, Any]:
    """The arguments of ``CLIPConfig``."""
    layers = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "projection_dim": PROJECTION,
        "num_attention_heads": 16,
        **more,
    }
    ends = tokenizer()
    text = {"vocab_size": len(ends), "max_position_embeddings": TOKENS}
    text |= {name: getattr(ends, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "text_config": layers | text,
        "vision_config": layers | {"image_size": SIDE, "patch_size": PATCH},
        "projection_dim": PROJECTION,
    }


def _seeded(network_class: Any, config: Any) -> Any:
    """The network with weights of a wide normal distribution, so that images differ in what it makes of them. They do
    not depend on what the class begins with."""
    with torch.random.fork_rng():
        network = network_class(config)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in sorted(network.named_parameters()):
        if parameter.ndim > 1 or "embedding" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=rng)
    return network.eval()


def image_processor(name: str, **sizes: Any) -> Any:
    """The image processor of that class, by Pillow."""
    import transformers

    return (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name))(**sizes)


def clip(folder: Path, **more: Any) -> Path:
    """A ``CLIPModel`` with its processor."""
    from transformers import CLIPConfig, CLIPModel

    _seeded(CLIPModel, CLIPConfig(**towers(**more))).save_pretrained(folder)
    square = {"height": SIDE, "width": SIDE}
    image_processor("CLIPImageProcessor", size={"shortest_edge": SIDE}, crop_size=square).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def dino(folder: Path) -> Path:
    """A ``Dinov2Model`` with its processor."""
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    _seeded(Dinov2Model, Dinov2Config(**sizes, image_size=SIDE, patch_size=PATCH)).save_pretrained(folder)
    square = {"height": SIDE, "width": SIDE}
    image_processor("BitImageProcessor", size={"shortest_edge": 40}, crop_size=square).save_pretrained(folder)
    return folder


def siglip(folder: Path) -> Path:
    """A ``SiglipModel`` with its image processor."""
    from transformers import SiglipConfig, SiglipModel

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**sizes, "vocab_size": 50, "max_position_embeddings": 8},
        vision_config={**sizes, "image_size": SIDE, "patch_size": PATCH},
    )
    _seeded(SiglipModel, config).save_pretrained(folder)
    image_processor("SiglipImageProcessor", size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder
