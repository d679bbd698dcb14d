"""Similarity of an image and a reference, for edits: ``clip_similarity``, ``dino_similarity``, ``siglip_similarity``.

The reference is the first image of the prompt file's column ``images``, with which an edit begins, or for a model that
takes no images that of the column ``reference``.
"""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.reference_files import IMAGES_KEY
from flowgrpo_rc.rewards.answer import brief_repr
from flowgrpo_rc.rewards.clip.scorer import CLIP_L, Scorer
from flowgrpo_rc.rewards.registry import Rows

OTHER_COLUMN = "reference"
"""The column with an image that the model does not get; a path is relative to the working folder."""
FORMS = "a path, an image file's bytes, a PIL image or a uint8 array (H, W, 3), or a list that begins with one"


class SimilarityReward(Scorer):
    """The cosine between an image and the reference of its row, in [-1, 1]; the prompt is not used."""

    def __call__(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Score images against ``metadata[i]["images"]``; equal references are embedded once.

        Args:
            images: (N, H, W, 3) uint8, RGB.
            metadata: N dicts with a reference each.

        Returns:
            (N,) float32.

        Raises:
            ValueError: a row has no reference that can be read.
        """
        # The images of a prompt share one reference.
        references: dict[Any, np.ndarray] = {}
        keys = []
        for index, row in enumerate(metadata):
            where = f"sample {index}"
            value = self._reference(row, where)
            keys.append(_key(value))
            if keys[-1] not in references:
                references[keys[-1]] = _read(value, where)
        places = {key: place for place, key in enumerate(references)}
        with torch.inference_mode():
            embeddings = self._encode_images(list(references.values()))[[places[key] for key in keys]]
            cosines = (self._encode_images(list(images)) * embeddings).sum(-1)
        return cosines.cpu().numpy()

    def check_prompts(
        self, prompts: Sequence[str], *, sources: Sequence[str], metadata: Rows = None, **known: Any
    ) -> None:
        """Raise ``ValueError`` for rows of ``metadata`` without a reference; see ``RewardMix.check_prompts``."""
        for row, where in zip(metadata or (), sources, strict=False):
            value = self._reference(row, where)
            # The prompt reader has checked the images of its own column. Only headers of files are read here.
            if not isinstance(value, ReferenceImage):
                _open(value, where)

    def _reference(self, row: Mapping[str, Any], where: str) -> Any:
        """A row's reference, in one of the forms."""
        value = row.get(IMAGES_KEY, row.get(OTHER_COLUMN))
        # An edit may begin with several images; the first one counts.
        if isinstance(value, list | tuple):
            value = next(iter(value), None)
        # The form of images in Hugging Face's datasets.
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if value is None:
            raise ValueError(
                f"{where} has no {IMAGES_KEY!r}, with whose first image the reward {self.name!r} compares; add it as a "
                f"column of a .parquet or .jsonl file ({OTHER_COLUMN!r} where the model takes no images): {FORMS}"
            )
        return value


def _open(value: Any, where: str) -> Image.Image:
    """The image of a reference; the pixels of a file are read later."""
    try:
        if isinstance(value, ReferenceImage):
            return value.open()
        if isinstance(value, Image.Image):
            return value
        if isinstance(value, bytes | str | os.PathLike):
            return Image.open(io.BytesIO(value) if isinstance(value, bytes) else os.path.expanduser(value))
        array = np.asarray(value)
        if array.dtype != np.uint8:
            raise TypeError(f"it is of the type {type(value).__name__}, with values of {array.dtype}")
        return Image.fromarray(array)
    except Exception as error:
        raise ValueError(
            f"{where}: {IMAGES_KEY!r} cannot be read as an image ({type(error).__name__}: {error}); it is "
            f"{brief_repr(value)[:80]}; give {FORMS}"
        ) from error


def _read(value: Any, where: str) -> np.ndarray:
    """The reference as (H, W, 3) uint8 RGB."""
    image = _open(value, where)
    try:
        return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise ValueError(f"{where}: {IMAGES_KEY!r} cannot be decoded: {error}") from error


def _key(value: Any) -> Any:
    """Equal for equal references."""
    if isinstance(value, str | bytes | os.PathLike | ReferenceImage):
        return value
    array = np.asarray(value)
    return array.shape, array.tobytes()


class CLIPSimilarity(SimilarityReward):
    """flow_grpo's ``image_similarity``: the cosine of CLIP's projected image embeddings."""

    name = "clip_similarity"
    published = CLIP_L


class DINOSimilarity(SimilarityReward):
    """The cosine of DINOv2's class tokens, after its last norm."""

    name = "dino_similarity"
    published = "facebook/dinov2-base"
    model_types = ("dinov2", "dinov2_with_registers")


class SigLIPSimilarity(SimilarityReward):
    """The cosine of SigLIP's pooled image embeddings."""

    name = "siglip_similarity"
    published = "google/siglip-base-patch16-224"
    model_types = ("siglip",)
