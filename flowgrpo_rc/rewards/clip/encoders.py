"""Images and prompts as vectors of length 1, by a network that is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.rewards.clip.loading import Pixels


class ImageEncoder:
    """Embeds images, ``micro_batch_size`` at a time.

    Args:
        network: one with ``get_image_features``, such as CLIP and SigLIP; of any other (DINOv2) the pooled output is
            taken.
        pixels: the network's preprocessing.
    """

    def __init__(self, network: Any, pixels: Pixels, micro_batch_size: int) -> None:
        self._network = network
        self._pixels = pixels
        self._size = micro_batch_size

    @torch.inference_mode()
    def __call__(self, images: Sequence[np.ndarray]) -> Tensor:
        """(N, D) float32 of N images, each (H, W, 3) uint8 RGB."""
        return torch.cat(
            [self._embed(images[start : start + self._size]) for start in range(0, len(images), self._size)]
        )

    def _embed(self, images: Sequence[np.ndarray]) -> Tensor:
        # In micro-batches: the pixels of a whole batch may not fit beside the actor.
        pixels = self._pixels(images).to(self._network.device, self._network.dtype)
        encode = getattr(self._network, "get_image_features", self._network)
        return _unit(encode(pixel_values=pixels))


class TextEncoder:
    """Embeds prompts, each distinct one once, ``micro_batch_size`` at a time.

    Prompts are padded to the network's longest, so that a prompt's embedding does not depend on those beside it, and
    cut there.
    """

    def __init__(self, network: Any, tokenizer: Any, micro_batch_size: int) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._longest = network.config.text_config.max_position_embeddings
        self._size = micro_batch_size

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """(N, D) float32 of N prompts."""
        # A group of images has one prompt.
        distinct = list(dict.fromkeys(prompts))
        embeddings = [
            self._embed(distinct[start : start + self._size]) for start in range(0, len(distinct), self._size)
        ]
        places = {prompt: place for place, prompt in enumerate(distinct)}
        return torch.cat(embeddings)[[places[prompt] for prompt in prompts]]

    def _embed(self, prompts: list[str]) -> Tensor:
        tokens = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=self._longest, return_tensors="pt"
        ).to(self._network.device)
        return _unit(
            self._network.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        )


def _unit(features: Any) -> Tensor:
    """Features divided by their norm, in float32. transformers 4 gives a tensor, 5 an object that holds it."""
    pooled = features if isinstance(features, Tensor) else features.pooler_output
    # The norm of a bfloat16 vector would have two digits.
    pooled = pooled.float()
    return pooled / pooled.norm(dim=-1, keepdim=True)
