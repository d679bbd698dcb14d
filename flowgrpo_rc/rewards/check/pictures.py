"""Pictures whose right prompts are known, drawn when they are needed and the same everywhere."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 256
"""Height and width in pixels."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture, its prompt, and further columns that a row of a prompt file could have."""

    image: np.ndarray
    """(256, 256, 3) uint8, RGB."""
    prompt: str
    metadata: dict[str, Any]
    """Columns that reward servers and functions of other projects read: GenEval's ``tag`` and ``include``, and
    verl-omni's ``data_source`` and ``ground_truth``."""


def numbers() -> list[Picture]:
    """Four two-digit numbers that share no digit, with prompts as the shipped prompt set has them."""
    return [
        Picture(image=_number(text), prompt=f'the text "{text}"', metadata=_row(text, "", None))
        # Without a common digit, so that a half-right reading of one is wrong for all others.
        for text in ("42", "17", "83", "65")
    ]


def scenes() -> list[Picture]:
    """Four things that object detectors and CLIP models know, as plain drawings."""
    return [
        _scene("a picture of a stop sign", "stop sign", None, _stop_sign),
        _scene("a picture of a traffic light", "traffic light", None, _traffic_light),
        _scene("a picture of a clock", "clock", None, _clock),
        _scene("a picture of an umbrella", "umbrella", None, _umbrella),
    ]


def colours() -> list[Picture]:
    """A red and a blue umbrella, which swap their prompts where red and blue are swapped."""
    shades = {"red": (214, 30, 30), "blue": (30, 60, 214)}
    return [
        _scene(f"a picture of a {colour} umbrella", "umbrella", colour, partial(_umbrella, shade=shade))
        for colour, shade in shades.items()
    ]


SETS = {"numbers": numbers, "scenes": scenes}
"""The sets that a reward can be checked with."""


def _number(text: str) -> np.ndarray:
    image = Image.new("RGB", (SIZE, SIZE), (235, 235, 235))
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(160)
    left, top, right, bottom = font.getbbox(text)
    canvas.text(((SIZE - left - right) / 2, (SIZE - top - bottom) / 2), text, font=font, fill=(40, 40, 40))
    return np.asarray(image)


def _scene(prompt: str, name: str, colour: str | None, draw: Callable[[ImageDraw.ImageDraw], None]) -> Picture:
    # Drawn at four times the size and reduced: edges are smooth, as in a photograph.
    image = Image.new("RGB", (4 * SIZE, 4 * SIZE), (200, 222, 240))
    canvas = ImageDraw.Draw(image)
    canvas.rectangle((0, 820, 4 * SIZE, 4 * SIZE), fill=(150, 160, 140))
    draw(canvas)
    small = image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    return Picture(image=np.asarray(small), prompt=prompt, metadata=_row(prompt, name, colour))


def _row(truth: str, name: str, colour: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"data_source": "check-reward", "ground_truth": truth, "extra_info": {}}
    if name:
        required = {"class": name, "count": 1} if colour is None else {"class": name, "count": 1, "color": colour}
        row |= {"tag": "single_object" if colour is None else "colors", "include": [required]}
    return row


def _stop_sign(canvas: ImageDraw.ImageDraw) -> None:
    canvas.rectangle((490, 500, 534, 1024), fill=(110, 110, 115))
    for radius, fill in ((330, (250, 250, 250)), (300, (196, 22, 28))):
        corners = [math.radians(22.5 + 45 * step) for step in range(8)]
        canvas.polygon([(512 + radius * math.cos(a), 400 + radius * math.sin(a)) for a in corners], fill=fill)
    canvas.text((512, 400), "STOP", font=ImageFont.load_default(190), fill=(250, 250, 250), anchor="mm")


def _traffic_light(canvas: ImageDraw.ImageDraw) -> None:
    canvas.rectangle((490, 700, 534, 1024), fill=(70, 70, 72))
    canvas.rounded_rectangle((380, 90, 644, 790), 60, fill=(30, 30, 32))
    for row, fill in enumerate(((236, 32, 36), (250, 196, 20), (40, 190, 70))):
        canvas.ellipse((422, 130 + 215 * row, 602, 310 + 215 * row), fill=fill)


def _clock(canvas: ImageDraw.ImageDraw) -> None:
    canvas.ellipse((152, 152, 872, 872), fill=(60, 40, 30))
    canvas.ellipse((192, 192, 832, 832), fill=(252, 250, 242))
    for hour in range(1, 13):
        angle = math.radians(30 * hour - 90)
        place = (512 + 260 * math.cos(angle), 512 + 260 * math.sin(angle))
        canvas.text(place, str(hour), font=ImageFont.load_default(84), fill=(20, 20, 20), anchor="mm")
    for angle, length, width in ((-60, 160, 26), (-150, 220, 18)):
        end = (512 + length * math.cos(math.radians(angle)), 512 + length * math.sin(math.radians(angle)))
        canvas.line(((512, 512), end), fill=(20, 20, 20), width=width)


def _umbrella(canvas: ImageDraw.ImageDraw, shade: tuple[int, int, int] = (150, 40, 160)) -> None:
    canvas.rectangle((500, 150, 524, 860), fill=(90, 60, 40))
    canvas.arc((500, 790, 640, 930), 0, 180, fill=(90, 60, 40), width=24)
    canvas.pieslice((132, 170, 892, 930), 180, 360, fill=shade)
    # The lower edge hangs in four bows between the ribs.
    for bow in range(4):
        canvas.ellipse((132 + 190 * bow, 505, 322 + 190 * bow, 595), fill=(200, 222, 240))
    canvas.rectangle((500, 505, 524, 860), fill=(90, 60, 40))
