"""Reward ``aesthetic``: the beauty of an image, whatever its prompt."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.rewards.clip.scorer import CLIP_L, Scorer, explained
from flowgrpo_rc.rewards.config import AestheticConfig

HEAD = "sac+logos+ava1-l14-linearMSE.pth"
REPOSITORY = "https://github.com/christophschuhmann/improved-aesthetic-predictor"


class Aesthetic(Scorer):
    """The predictor of LAION's aesthetic ratings, about 1 to 10: linear layers on CLIP's normalised image embedding."""

    name = "aesthetic"
    published = CLIP_L
    config_class = AestheticConfig
    config: AestheticConfig

    def __call__(
        self,
        images: np.ndarray,
        prompts: Sequence[str] = (),
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> np.ndarray:
        """Score images, (N, H, W, 3) uint8 RGB; prompts and metadata are not used.

        Returns:
            (N,) float32.
        """
        embeddings = self._encode_images(list(images))
        return (embeddings.cpu().double() @ self._weight + self._bias).float().numpy()

    def _load_network(self) -> Any:
        field = f"{self.section}.head_path"
        path = self.config.head_path
        if path is None:
            raise ValueError(f"{field}: is null; download {HEAD} from {REPOSITORY} and give its path")
        with explained(field, path, f"Give the file {HEAD} of {REPOSITORY}", on_hub=False):
            state = torch.load(os.path.expanduser(path), map_location="cpu", weights_only=True)
            self._weight, self._bias = affine(state)
        # The small file first: a mistake in it shows at once.
        network = super()._load_network()
        width = network.config.projection_dim
        if len(self._weight) != width:
            raise ValueError(
                f"{field}: its layers take {len(self._weight)} values, but the embeddings of {self._model_path} have "
                f"{width}; give the CLIP that they were trained with in {self.section}.model_path"
            )
        return network

    def weights(self) -> list[Tensor]:
        """The tensors that decide the scores; checkpoints record their digest."""
        return [*super().weights(), self._weight, self._bias]


def affine(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weight (D,) and bias () in float64 of the linear layers ``layers.N.{weight,bias}`` as one map.

    Only dropout is between them. Raises ``ValueError`` for tensors of other names or shapes.
    """
    numbers = sorted({int(match[1]) for name in state if (match := re.fullmatch(r"layers\.(\d+)\.weight", name))})
    expected = {f"layers.{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not numbers or expected != state.keys():
        raise ValueError(
            f"its tensors are {', '.join(sorted(state))[:200]}; expected layers.N.weight and layers.N.bias"
        )
    first = state[f"layers.{numbers[0]}.weight"].shape[-1]
    weight = torch.eye(first, dtype=torch.float64)
    bias = torch.zeros(first, dtype=torch.float64)
    for number in numbers:
        layer = state[f"layers.{number}.weight"].double()
        weight = layer @ weight
        bias = layer @ bias + state[f"layers.{number}.bias"].double()
    if len(weight) != 1:
        raise ValueError(f"its last layer gives {len(weight)} values; a score is one")
    return weight[0], bias[0]
