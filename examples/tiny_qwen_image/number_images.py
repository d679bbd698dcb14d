"""Pictures of two-digit numbers, and the prompts that ask for them.

Every picture is 32x32 pixels: dark grey ink on light grey paper, one of a few fonts, and a little jitter in
size, place and shade. The fonts come inside two wheels (Pillow's own Aileron, and DejaVu from matplotlib), so
the result does not depend on what the operating system has installed.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

IMAGE_SIZE = 32
Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""
NUMBERS = tuple(f"{number:02d}" for number in range(100))
HELD_OUT_NUMBERS = 20

AILERON = "Aileron"
FONTS = (AILERON, "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono-Bold.ttf")
FONT_SIZES = (18, 19, 20, 21)
MAX_SHIFT = 2
PAPER = (215, 256)
INK = (0, 91)
"""Shades of grey, the upper end excluded."""


def prompt_for(number: str) -> str:
    """The prompt that asks for `number`, the target in double quotes as OCR rewards expect it."""
    return f'the text "{number}"'


def split_numbers(seed: int) -> tuple[list[str], list[str]]:
    """80 numbers to train on and 20 held-out ones: a seeded choice, each list in order."""
    held_out = set(random.Random(seed).sample(NUMBERS, HELD_OUT_NUMBERS))
    return [n for n in NUMBERS if n not in held_out], [n for n in NUMBERS if n in held_out]


def write_prompts(folder: Path, seed: int) -> None:
    """Write `train.txt` and `test.txt`, one prompt a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in zip(("train.txt", "test.txt"), split_numbers(seed), strict=True):
        (folder / name).write_text("".join(f"{prompt_for(number)}\n" for number in numbers), encoding="utf-8")


def load_fonts() -> list[ImageFont.FreeTypeFont]:
    """Every font in every size."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = []
    for name in FONTS:
        for size in FONT_SIZES:
            fonts.append(ImageFont.load_default(size) if name == AILERON else ImageFont.truetype(folder / name, size))
    return fonts


def draw_number(number: str, font: ImageFont.FreeTypeFont, rng: np.random.Generator) -> Image.Image:
    """One picture of `number`; place and shades are drawn from `rng`."""
    paper, ink = int(rng.integers(*PAPER)), int(rng.integers(*INK))
    return draw_in_style(number, font, (paper,) * 3, (ink,) * 3, random_shift(rng))


def random_shift(rng: np.random.Generator) -> tuple[int, int]:
    """By how many pixels a number is off the centre, to the right and down."""
    right, down = rng.integers(-MAX_SHIFT, MAX_SHIFT + 1, size=2)
    return int(right), int(down)


def draw_in_style(
    number: str, font: ImageFont.FreeTypeFont, paper: Colour, ink: Colour, shift: tuple[int, int]
) -> Image.Image:
    """The picture of `number` that these decide; `shift` is from the centre, and smaller where a wide font leaves less
    room."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), paper)
    left, top, right, bottom = font.getbbox(number)
    x = (IMAGE_SIZE - (right - left)) / 2 + shift[0]
    y = (IMAGE_SIZE - (bottom - top)) / 2 + shift[1]
    # A wide font leaves less room than MAX_SHIFT: keep the number inside the picture.
    x = min(max(x, 1.0), IMAGE_SIZE - 1.0 - (right - left))
    y = min(max(y, 1.0), IMAGE_SIZE - 1.0 - (bottom - top))
    ImageDraw.Draw(image).text((x - left, y - top), number, font=font, fill=ink)
    return image


def to_tensor(images: Sequence[Image.Image]) -> Float[Tensor, "N 3 height width"]:
    """Pictures as floats in [-1, 1]."""
    stacked = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous() / 127.5 - 1


def make_dataset(count: int, seed: int) -> tuple[Float[Tensor, "N 3 height width"], Int[Tensor, " N"]]:
    """`count` pictures, all numbers equally often, with the index of each picture's number in `NUMBERS`."""
    rng = np.random.default_rng(seed)
    fonts = load_fonts()
    labels = np.arange(count) % len(NUMBERS)
    images = [draw_number(NUMBERS[label], fonts[rng.integers(len(fonts))], rng) for label in labels]
    return to_tensor(images), torch.from_numpy(labels)
