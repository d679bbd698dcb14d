"""The checkpoint of HPSv2, which is one of OpenCLIP, and its preprocessing; ``hpsv2`` and ``open_clip`` not needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.quiet import quiet_loading
from flowgrpo_rc.rewards.clip.loading import HUB_NAME, explained, located
from flowgrpo_rc.rewards.clip.openclip import renamed, sizes

FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
"""The checkpoints in the hub's repository, by version."""


def find_checkpoint(section: str, path: str, version: str) -> Path | None:
    """The checkpoint that ``path`` is or holds, or that of this name on the hub; None for a folder in transformers'
    format.

    Raises:
        ValueError: there is none.
    """
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
    """The ``CLIPModel`` with the weights of an OpenCLIP checkpoint: frozen, in evaluation mode, on the CPU.

    Raises:
        ValueError: the file is no such checkpoint, a tensor is missing, or one is left over.
    """
    from accelerate import init_empty_weights
    from transformers import CLIPConfig, CLIPModel

    with (
        explained(f"{section}.model_path", str(file), "Give a checkpoint of OpenCLIP's ViT"),
        quiet_loading("transformers"),
    ):
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


class PaddedPixels:
    """HPSv2's preprocessing: the longest side becomes ``side`` pixels, and black bars fill the square.

    Resized as torchvision resizes tensors since its version 0.17: bicubic and antialiased, in floating point.
    """

    def __init__(self, side: int) -> None:
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        self._side = side
        self._mean = torch.tensor(OPENAI_CLIP_MEAN).view(3, 1, 1)
        self._std = torch.tensor(OPENAI_CLIP_STD).view(3, 1, 1)

    def __call__(self, images: Sequence[np.ndarray]) -> Tensor:
        """(N, 3, side, side) float32 of N images, each (H, W, 3) uint8 RGB."""
        return (torch.stack([self._square(image) for image in images]) - self._mean) / self._std

    def _square(self, image: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        scale = self._side / max(pixels.shape[1:])
        # Thin images keep at least one row.
        height, width = (max(1, round(length * scale)) for length in pixels.shape[1:])
        if scale != 1:
            pixels = F.interpolate(pixels[None], size=(height, width), mode="bicubic", antialias=True)[0]
        left = (self._side - width) // 2
        top = (self._side - height) // 2
        return F.pad(pixels, (left, self._side - width - left, top, self._side - height - top))
