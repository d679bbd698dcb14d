"""Sample grids: validation images with their prompt, reward and (from OCR) what was read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowgrpo_rc.run_folder import write_whole

CELL = 96
"""Pixels of an image's side."""
CAPTION = 34
"""Pixels of the two lines under an image."""
TITLE = 26
GAP = 8


@dataclass(frozen=True)
class Sample:
    """One validation image and what became of it."""

    image: np.ndarray
    """``(H, W, 3)`` uint8."""
    prompt: str
    reward: float
    text: str | None = None
    """What an OCR reward read."""


def save_grid(path: Path, title: str, samples: Sequence[Sample], columns: int = 12) -> None:
    """Write one PNG with captioned images under a title."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(11)
    rows = -(-len(samples) // columns)
    width = GAP + columns * (CELL + GAP)
    height = GAP + TITLE + rows * (CELL + CAPTION + GAP)
    canvas = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(canvas)
    pen.text((GAP, GAP), title, fill="black", font=ImageFont.load_default(15))
    for i, sample in enumerate(samples):
        x = GAP + (i % columns) * (CELL + GAP)
        y = GAP + TITLE + (i // columns) * (CELL + CAPTION + GAP)
        picture = Image.fromarray(sample.image)
        # Small images keep their pixels sharp: what the model drew is to be seen, not what smoothing makes of it.
        scale = Image.Resampling.NEAREST if max(picture.size) < CELL else Image.Resampling.LANCZOS
        canvas.paste(picture.resize((CELL, CELL), scale), (x, y))
        prompt = sample.prompt if len(sample.prompt) <= 17 else f"{sample.prompt[:16]}…"
        pen.rectangle((x, y, x + CELL - 1, y + CELL - 1), outline="#bbbbbb")
        pen.text((x, y + CELL + 2), prompt, fill="black", font=font)
        colour = "#0a7d32" if sample.reward >= 0.999 else "#b3261e"
        read = "" if sample.text is None else f' read "{sample.text}"'
        pen.text((x, y + CELL + 16), f"{sample.reward:.2f}{read}"[:20], fill=colour, font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: canvas.save(temporary, format="PNG"))
