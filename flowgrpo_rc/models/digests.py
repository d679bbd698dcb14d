"""Digests that tell text encoders and tokenizers apart, from their files alone: no network is loaded. The prompt store
compares them before it reads embeddings, and a checkpoint before it resumes."""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from flowgrpo_rc.models.parts import Part, PipelineFiles
from flowgrpo_rc.quiet import TOKENIZATION, only_errors

VALUES_A_TENSOR = 64
"""Values of every tensor that count, evenly spread: reading all of a text encoder takes as long as loading it."""
_TEXTS = ("a photo of a cat", 'A neon sign that says "OPEN 24/7"', "Zwölf Boxkämpfer, 12,345.67 (über) 東京")
"""Their tokens depend on a vocabulary's merges and normalisation besides its entries."""
_ACT_ON_NOTHING = ("transformers_version", "torch_dtype", "dtype")
"""Entries of a ``config.json`` that change no output, such as the version that saved it."""


def short_digest(content: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def values_digest(samples: list[Tensor]) -> str:
    """Digest of values rounded to bfloat16, so that the dtype of the weights does not matter."""
    # One transfer to the host for all samples.
    values = torch.cat([sample.float() for sample in samples])
    return short_digest(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())


def spread(tensor: Tensor) -> Tensor:
    """``VALUES_A_TENSOR`` values evenly over ``tensor``, all of them where it has fewer."""
    count = min(VALUES_A_TENSOR, tensor.numel())
    places = torch.arange(count, device=tensor.device) * tensor.numel() // max(count, 1)
    # Picked by index these are a copy, so that whoever keeps them does not keep the whole tensor.
    return tensor.flatten()[places]


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of the vocabulary, of the tokens of some texts, and of the chat template, if any."""
    with only_errors(TOKENIZATION):
        tokens = [tokenizer(text).input_ids for text in _TEXTS]
    content = [sorted(tokenizer.get_vocab().items()), tokens]
    if tokenizer.chat_template is not None:
        content.append(tokenizer.chat_template)
    return short_digest(json.dumps(content).encode())


def processor_digest(processor: Any) -> str:
    """Digest of a processor's preparation of texts and images. The class of its image processor is part of it: with
    torchvision installed it is another, which resizes differently."""
    settings = {k: v for k, v in processor.image_processor.to_dict().items() if k not in _ACT_ON_NOTHING}
    content = [type(processor.image_processor).__name__, settings, tokenizer_digest(processor.tokenizer)]
    return short_digest(json.dumps(content, sort_keys=True, default=str).encode())


def stored_network_digest(files: PipelineFiles, part: Part) -> str:
    """Digest of a network's configuration and of some values of each of its tensors, from its files. The division of
    tensors into files does not matter. Every byte of pickled files counts."""
    config = files.read_json(f"{part.name}/config.json")
    acting = {key: value for key, value in config.items() if key not in _ACT_ON_NOTHING and not key.startswith("_")}
    names = files.weight_files(part)
    if all(name.endswith(".safetensors") for name in names):
        tensors: dict[str, Tensor] = {}
        for name in names:
            with safe_open(files.folder / name, "pt") as file:
                # The file is mapped, so that only the pages that are sampled are read.
                tensors |= {key: spread(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        # Sorted by name, so that shards and one file give the same digest.
        weights = values_digest([tensors[name] for name in sorted(tensors)])
    else:
        # A pickle cannot be sampled without loading it.
        digest = hashlib.sha256()
        for name in names:
            digest.update(np.memmap(files.folder / name, mode="r").data)
        weights = digest.hexdigest()
    return short_digest(f"{json.dumps(acting, sort_keys=True)} {weights}".encode())
