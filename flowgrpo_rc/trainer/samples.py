"""Sample grids: validation images with their prompt, reward and (from OCR) what was read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowgrpo_rc.run_folder import write_whole


@dataclass(frozen=True)
class Sample:
    """One validation image and what became of it."""

    image: np.ndarray
    """``(H, W, 3)`` uint8."""
    prompt: str
    reward: float
    text: str | None = None
    """What an OCR reward read."""


def save_grid(path: Path, rows: Sequence[tuple[str, Sequence[Sample]]], columns: int = 12) -> None:
    """Write one PNG with a titled block of captioned images per entry of ``rows``."""
    from PIL import Image, ImageDraw, ImageFont

    cell, caption, title, gap = 96, 34, 26, 8
    font, bold = ImageFont.load_default(11), ImageFont.load_default(15)
    blocks = [(name, list(samples)) for name, samples in rows if samples]
    lines = [-(-len(samples) // columns) for _, samples in blocks]
    width = columns * (cell + gap) + gap
    height = sum(title + n * (cell + caption + gap) for n in lines) + gap
    canvas = Image.new("RGB", (width, max(height, 1)), "white")
    pen, top = ImageDraw.Draw(canvas), gap
    for (name, samples), count in zip(blocks, lines, strict=True):
        pen.text((gap, top), name, fill="black", font=bold)
        for i, sample in enumerate(samples):
            x = gap + (i % columns) * (cell + gap)
            y = top + title + (i // columns) * (cell + caption + gap)
            picture = Image.fromarray(sample.image)
            scale = Image.Resampling.NEAREST if max(picture.size) < cell else Image.Resampling.LANCZOS
            canvas.paste(picture.resize((cell, cell), scale), (x, y))
            pen.rectangle((x, y, x + cell - 1, y + cell - 1), outline="#bbbbbb")
            pen.text((x, y + cell + 2), _short(sample.prompt), fill="black", font=font)
            colour = "#0a7d32" if sample.reward >= 0.999 else "#b3261e"
            read = "" if sample.text is None else f' read "{sample.text}"'
            pen.text((x, y + cell + 16), f"{sample.reward:.2f}{read}"[:20], fill=colour, font=font)
        top += title + count * (cell + caption + gap)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: canvas.save(temporary, format="PNG"))


def stack_pictures(path: Path, pictures: Sequence[Path]) -> None:
    """Write one PNG with ``pictures`` below each other, centred."""
    from PIL import Image

    images = [Image.open(p).convert("RGB") for p in pictures]
    canvas = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    top = 0
    for image in images:
        canvas.paste(image, ((canvas.width - image.width) // 2, top))
        top += image.height
    write_whole(path, lambda temporary: canvas.save(temporary, format="PNG"))


def _short(prompt: str, limit: int = 17) -> str:
    return prompt if len(prompt) <= limit else prompt[: limit - 1] + "…"
