"""Load networks, image processors and tokenizers of scorers from a folder or the hub, with errors of one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.paths import ASSET_PREFIX, resolve_asset
from flowgrpo_rc.quiet import quiet_loading
from flowgrpo_rc.rewards.clip.config import ScorerConfig

Pixels = Callable[[Sequence[np.ndarray]], Tensor]
"""Images, each (H, W, 3) uint8 RGB, as a network takes them: (N, 3, height, width) float32."""

HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"
LISTED = 3
"""Most tensors that a message names."""
_FOLDER = "Give a folder with {}, as save_pretrained writes it"


def find_device(section: str, name: str) -> torch.device:
    """The device of the configuration's ``device``. Each process of a launch has the GPU of its local rank, modulo the
    number of GPUs, as accelerate assigns them.

    Raises:
        ValueError: there is no such GPU.
    """
    # No call that would open a CUDA context on another process's GPU.
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # Rewards are made before the processes of a launch have chosen their GPUs.
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, count)}"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"{section}.device: got {name}, but torch sees {count} GPUs here; give cpu or auto")
    return device


def load_network(section: str, path: str, config: ScorerConfig, model_types: Sequence[str]) -> Any:
    """The network in transformers' format at ``path``: frozen, in evaluation mode, in the section's dtype, on the CPU.

    Raises:
        ValueError: there is none, it is not one of ``model_types``, or some of its weights are missing.
    """
    from transformers import AutoConfig, AutoModel

    field = f"{section}.model_path"
    with explained(field, path, _FOLDER.format("config.json and the weights")), quiet_loading("transformers"):
        # ``AutoModel`` would load any network, and fail much later.
        kind = AutoConfig.from_pretrained(located(path)).model_type
        if kind not in model_types:
            raise ValueError(f"it holds a network of the kind {kind!r}, but this reward takes {', '.join(model_types)}")
        network, found = AutoModel.from_pretrained(
            located(path), dtype=torch_dtype(config.dtype), output_loading_info=True
        )
        # transformers would leave these at random.
        if missing := sorted(found["missing_keys"]):
            listed = ", ".join(missing[:LISTED]) + (", ..." if len(missing) > LISTED else "")
            raise ValueError(f"{len(missing)} tensors are missing ({listed})")
    return network.requires_grad_(False).eval()


def load_pixels(section: str, path: str) -> Pixels:
    """The preprocessing of the image processor at ``path``.

    Always by Pillow: transformers would by itself resize with torchvision where that is installed, which changes scores
    in the third digit.

    Raises:
        ValueError: there is none.
    """
    # ``transformers.AutoImageProcessor`` itself is a placeholder that refuses, unless torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with (
        explained(f"{section}.processor_path", path, _FOLDER.format("preprocessor_config.json")),
        quiet_loading("transformers"),
    ):
        # One choice under its two names: ``use_fast`` up to transformers 5.3, ``backend`` from 5.4 on.
        processor = AutoImageProcessor.from_pretrained(located(path), use_fast=False, backend="pil")

    def pixels(images: Sequence[np.ndarray]) -> Tensor:
        return processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")["pixel_values"]

    return pixels


def load_tokenizer(section: str, path: str, vocabulary: int) -> Any:
    """The tokenizer at ``path``, for a network with ``vocabulary`` embeddings.

    Raises:
        ValueError: there is none, or its vocabulary is missing or larger than the network's.
    """
    from transformers import AutoTokenizer

    with (
        explained(f"{section}.processor_path", path, _FOLDER.format("tokenizer.json, or vocab.json and merges.txt")),
        quiet_loading("transformers"),
    ):
        tokenizer = AutoTokenizer.from_pretrained(located(path))
        # transformers loads a tokenizer without its files, and every prompt is then the same.
        if len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:
            raise ValueError("its vocabulary is missing")
        # A GPU would stop with a failed assertion at the first such token.
        if len(tokenizer) > vocabulary:
            raise ValueError(f"it has {len(tokenizer)} tokens, but the network knows {vocabulary}")
    return tokenizer


def located(path: str) -> str:
    """The folder or file that ``path`` names, with ``asset:`` and ``~`` resolved; a hub name stays as it is.

    Raises:
        FileNotFoundError: there is no such asset.
    """
    return resolve_asset(os.path.expanduser(path))


@contextmanager
def explained(field: str, path: str, remedy: str, *, on_hub: bool = True) -> Iterator[None]:
    """Raise every error inside as a ``ValueError`` of one line with the field and the remedy.

    Args:
        remedy: the last sentence of the message.
        on_hub: the path may be a name on the hub.
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        # The hub's own message is about the network; a wrong folder name is the likelier reason.
        advice = _hub_advice(field, path) if on_hub and _is_absent(path) else remedy
        raise ValueError(f"{field}: {path} cannot be used: {kind}{one_line(error, 300)}. {advice}") from error


def _is_absent(path: str) -> bool:
    return not path.startswith(ASSET_PREFIX) and not os.path.exists(located(path))


def _hub_advice(field: str, path: str) -> str:
    if not re.fullmatch(HUB_NAME, path):
        return "There is no such folder, and it is not the name of a repository on the hub (owner/name)"
    return (
        "It is no folder here and could not be had from the hub. On a machine with a network: hf download "
        f"{path} --local-dir FOLDER; then {field}=FOLDER"
    )
