"""A reward of the example's own: how near an edited picture is to its reference in the colours of paper and ink."""

from collections.abc import Sequence
from typing import Any

import numpy as np

INK_SHARE = 0.05
"""So much of a picture is ink, and nothing but ink: its darkest pixels."""
WORST = 48
"""Mean difference of a colour's three values, out of 255, from which a picture scores nothing."""


def same_style(images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> np.ndarray:
    """Scores from 0 to 1, one an image; 1 has the reference's colours exactly.

    Args:
        images: `(N, H, W, 3)` uint8.
        prompts: not looked at.
        metadata: the row of each image; the first of its `images` is the reference.
    """
    drawn = np.stack([colours(image) for image in images])
    wanted = np.stack([colours(np.asarray(row["images"][0])) for row in metadata])
    apart = np.abs(drawn - wanted).mean(axis=(1, 2))
    return np.clip(1 - apart / WORST, 0, 1)


def colours(image: np.ndarray) -> np.ndarray:
    """Of a dark number on light paper: the paper's colour and the ink's, `(2, 3)`."""
    pixels = image.reshape(-1, 3).astype(np.float64)
    order = np.argsort(pixels.sum(axis=1), kind="stable")
    return np.stack([np.median(pixels, axis=0), pixels[order[: round(INK_SHARE * len(pixels))]].mean(axis=0)])
