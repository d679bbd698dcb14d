"""Base of the rewards of this package: a network that is loaded and tried before training, and its image encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rewards.clip.config import ScorerConfig
from flowgrpo_rc.rewards.clip.loading import Pixels, find_device, load_network, load_pixels


class Published(NamedTuple):
    """Hub names of a reward's published weights, and of their image processor and tokenizer."""

    model: str
    processor: str


CLIP_L = Published("openai/clip-vit-large-patch14", "openai/clip-vit-large-patch14")
"""The CLIP of flow_grpo's ``clipscore``, of the aesthetic score and of its image similarity."""


class Scorer:
    """A reward of a frozen network, made with its section of the configuration, by default the default one.

    Raises:
        ValueError: a field is wrong, or the network or its processor cannot be loaded or do not fit each other; names
            the field.
    """

    name: ClassVar[str]
    """Of the reward and of its section."""
    published: ClassVar[Published]
    model_types: ClassVar[tuple[str, ...]] = ("clip",)
    """Accepted values of ``model_type`` in a network's ``config.json``."""
    config_class: ClassVar[type[ScorerConfig]] = ScorerConfig

    def __init__(self, config: ScorerConfig | None = None) -> None:
        self.section = f"reward.{self.name}"
        self.config = self.config_class() if config is None else config
        self.config.check(self.section)
        # Before the network is loaded, which takes minutes.
        device = find_device(self.section, self.config.device)
        self.network = self._load_network().to(device)
        self._pixels = self._load_pixels()
        self._prepare()
        # Sizes of images and vocabularies fit or not only in a forward.
        try:
            self._try()
        except Exception as error:
            raise ValueError(
                f"{self.section}.processor_path: what {self._processor_path} makes of images and prompts does not fit "
                f"the network of {self._model_path} ({type(error).__name__}: {one_line(error, 300)}); give the "
                "network's own processor"
            ) from error

    @property
    def _model_path(self) -> str:
        return self.config.model_path or self.published.model

    @property
    def _processor_path(self) -> str:
        return self.config.processor_path or self.config.model_path or self.published.processor

    def _load_network(self) -> Any:
        return load_network(self.section, self._model_path, self.config, self.model_types)

    def _load_pixels(self) -> Pixels:
        return load_pixels(self.section, self._processor_path)

    def _prepare(self) -> None:
        """Load what the reward needs besides the network."""

    def _try(self) -> None:
        """Run a forward, so that parts that do not fit together fail before training."""
        self._encode_images([np.zeros((8, 8, 3), np.uint8)])

    def weights(self) -> list[Tensor]:
        """The tensors that decide the scores; checkpoints record their digest."""
        return list(self.network.state_dict().values())

    @torch.inference_mode()
    def _encode_images(self, images: Sequence[np.ndarray]) -> Tensor:
        """(N, D) float32 embeddings of length 1 of N images, each (H, W, 3) uint8 RGB.

        A network without ``get_image_features``, such as DINOv2, gives its pooled output.
        """
        encode = getattr(self.network, "get_image_features", self.network)
        embeddings = []
        # In micro-batches: the pixels of a whole batch may not fit beside the actor.
        for batch in self._batches(images):
            pixels = self._pixels(batch).to(self.network.device, self.network.dtype)
            embeddings.append(unit(encode(pixel_values=pixels)))
        return torch.cat(embeddings)

    def _batches(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        size = self.config.micro_batch_size
        return [items[start : start + size] for start in range(0, len(items), size)]


def unit(features: Any) -> Tensor:
    """Features divided by their norm, in float32. transformers 4 gives a tensor, 5 an object that holds it."""
    pooled = features if isinstance(features, Tensor) else features.pooler_output
    # The norm of a bfloat16 vector would have two digits.
    pooled = pooled.float()
    return pooled / pooled.norm(dim=-1, keepdim=True)
