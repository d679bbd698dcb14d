"""Reward ``jpeg_compressibility``: minus the size of an image as a JPEG. Reads no prompt, needs no model."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def jpeg_bytes(image: Image.Image) -> int:
    """Size of an image as a JPEG of quality 95, in bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=95)
    return buffer.tell()


def jpeg_compressibility(
    images: np.ndarray, prompts: Sequence[str] = (), metadata: Sequence[dict[str, Any]] | None = None
) -> tuple[np.ndarray, dict[str, list[float]]]:
    """Minus the JPEG size at quality 95, in units of 500 kB, scaled to 512 x 512 pixels.

        score = -(bytes / 1000) * (512 * 512 / (H * W)) / 500

    At 512 x 512 this is flow_grpo's ``jpeg_compressibility``; the factor for the area gives images of other
    sizes scores of the same magnitude. Prompts and metadata are not used.

    Args:
        images: (N, H, W, 3) uint8, RGB.

    Returns:
        (N,) float32, negative, larger is better compressible; and ``{"jpeg_kilobytes": unscaled sizes}``.
    """
    kilobytes = np.array([jpeg_bytes(Image.fromarray(image)) / 1000.0 for image in images])
    scores = -kilobytes * (512 * 512 / (images.shape[1] * images.shape[2])) / 500.0
    return scores.astype(np.float32), {"jpeg_kilobytes": kilobytes.tolist()}


# An image's size does not depend on the others.
jpeg_compressibility.streams = True  # type: ignore[attr-defined]
