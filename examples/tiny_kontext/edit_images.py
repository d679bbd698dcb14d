"""Pairs of pictures to learn editing from: a number in some style, and another number in the same style.

A style is the colours of paper and ink, the font with its size, and the place. The prompt names the other number; the
first picture is the reference. References that reinforcement learning uses are stored as PNG files.
"""

import colorsys
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from number_images import NUMBERS, Colour, draw_in_style, load_fonts, random_shift, split_numbers, to_tensor
from PIL import Image, ImageFont
from torch import Tensor

PAPER_SATURATION, PAPER_VALUE = (0.2, 0.7), (0.85, 1.0)
INK_SATURATION, INK_VALUE = (0.3, 1.0), (0.0, 0.4)
"""Light paper and dark ink, of any hue."""
TRAIN_REFERENCES, TEST_REFERENCES = 24, 12


def edit_prompt(number: str) -> str:
    """The prompt that asks for `number` in the reference's place, in double quotes as OCR rewards expect it."""
    return f'make it "{number}"'


@dataclass(frozen=True)
class Style:
    """How a number is drawn."""

    font: ImageFont.FreeTypeFont
    paper: Colour
    ink: Colour
    shift: tuple[int, int]

    def draw(self, number: str) -> Image.Image:
        return draw_in_style(number, self.font, self.paper, self.ink, self.shift)


def random_style(fonts: list[ImageFont.FreeTypeFont], rng: np.random.Generator) -> Style:
    """Everything independent of everything else."""
    font = fonts[rng.integers(len(fonts))]
    paper = random_colour(rng, PAPER_SATURATION, PAPER_VALUE)
    ink = random_colour(rng, INK_SATURATION, INK_VALUE)
    return Style(font, paper, ink, random_shift(rng))


def random_colour(rng: np.random.Generator, saturation: tuple[float, float], value: tuple[float, float]) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(rng.random(), rng.uniform(*saturation), rng.uniform(*value))
    return round(255 * red), round(255 * green), round(255 * blue)


def make_pairs(count: int, seed: int) -> tuple[Float[Tensor, "2 N 3 height width"], Int[Tensor, "2 N"]]:
    """`count` styles with two pictures each, and the index of each picture's number in `NUMBERS`."""
    rng = np.random.default_rng(seed)
    fonts = load_fonts()
    styles = [random_style(fonts, rng) for _ in range(count)]
    labels = np.stack([rng.permutation(np.arange(count) % len(NUMBERS)) for _ in range(2)])
    images = [to_tensor([style.draw(NUMBERS[n]) for style, n in zip(styles, row, strict=True)]) for row in labels]
    return torch.stack(images), torch.from_numpy(labels)


def write_edits(folder: Path, seed: int) -> None:
    """Write `train.jsonl` and `test.jsonl`, a number to draw with its reference a line, and the references."""
    rng = np.random.default_rng([seed, 1])
    fonts = load_fonts()
    names = ("train", "test")
    counts = (TRAIN_REFERENCES, TEST_REFERENCES)
    for name, numbers, count in zip(names, split_numbers(seed), counts, strict=True):
        references = folder / "references"
        references.mkdir(parents=True, exist_ok=True)
        shown = rng.choice(numbers, count, replace=False)
        paths = [references / f"{name}_{i:02d}.png" for i in range(count)]
        for path, number in zip(paths, shown, strict=True):
            random_style(fonts, rng).draw(number).save(path, optimize=True)
        rows = []
        for i, number in enumerate(numbers):
            # Never the number that the reference shows already.
            path = next(paths[k % count] for k in range(i, i + 2) if shown[k % count] != number)
            rows.append({"prompt": edit_prompt(number), "images": path.relative_to(folder).as_posix()})
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
