"""LoRAs beside their base model: scores on the same prompts and noise, differences with intervals, what they drew.

Prompts are the unit. The images of a prompt are no independent samples, so that a prompt counts with their mean. All
models start from the same noise, so that a difference is taken prompt by prompt.
"""

import base64
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowgrpo_rc.evaluation.export import Updates
from flowgrpo_rc.evaluation.image_statistics import spread
from flowgrpo_rc.gap.intervals import mean_interval
from flowgrpo_rc.models.lora import ACTOR_ADAPTER

BASE = "base"
"""Name of the model without a LoRA."""
TOTAL = "mean"
"""Name of the weighted sum of all rewards, as in ``val/reward/mean``."""
SHOWN = 12
"""Prompts in the grid, the first ones."""
SIDES = (128, 256)
"""Least and most pixels of an image's width in the grid."""
TEXT = 200
"""Pixels of the prompts' column."""
MARGIN = 12
FONT = 13
LINE = 17
"""Pixels of a line of text."""


@dataclass(frozen=True)
class Scored:
    """The scores of one model, and the images that the grid shows."""

    name: str
    means: dict[str, float]
    """Mean over all images, by score."""
    prompts: dict[str, list[float]]
    """Mean over the images of each prompt, by score."""
    images: list[np.ndarray]
    """``(H, W, 3)`` uint8: the first image of each of the first prompts."""
    rewards: list[float]
    """The weighted sum of each of them."""


@dataclass(frozen=True)
class Row:
    """One score of one model."""

    score: str
    model: str
    mean: float
    difference: float | None = None
    """To the base: mean over prompts. None for the base."""
    interval: tuple[float, float] | None = None
    """Of the difference, 95 %; None with fewer than two prompts, and for the base."""
    lower_is_better: bool = False
    """A reward with a negative weight."""

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` where the interval does not hold 0; statistics of images have no better side."""
        low, high = self.interval or (0.0, 0.0)
        rises = low > 0
        if not rises and not high < 0:
            return ""
        if self.score.startswith("images/"):
            return "higher" if rises else "lower"
        return "worse" if rises == self.lower_is_better else "better"


def padded_state(updates: Updates, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A LoRA in the names and shapes of ``own``, an adapter whose scale is 1. Rows and columns of zeros make up for a
    lower rank, and zeros for layers without a LoRA; without updates the adapter changes nothing."""
    state = {name: torch.zeros_like(value) for name, value in own.items()}
    for layer, (down, up) in updates.items():
        state[f"{layer}.lora_A.{ACTOR_ADAPTER}.weight"][: len(down)] = down
        state[f"{layer}.lora_B.{ACTOR_ADAPTER}.weight"][:, : up.shape[1]] = up
    return state


def by_prompt(scores: Sequence[Mapping[str, float]], prompts: int) -> dict[str, list[float]]:
    """Mean over the images of each prompt, by score. Image ``k`` of prompt ``i`` has the number ``k * prompts + i``."""
    return {name: np.reshape([one[name] for one in scores], (-1, prompts)).mean(0).tolist() for name in scores[0]}


def diversity(thumbnails: np.ndarray, prompts: int) -> dict[str, list[float]]:
    """``images/diversity`` of each prompt's images; nothing with one image a prompt."""
    each = [spread(thumbnails[i::prompts], np.zeros(len(thumbnails) // prompts)) for i in range(prompts)]
    return {"images/diversity": [one["diversity"] for one in each]} if all(each) else {}


def compare(models: Sequence[Scored], penalties: Collection[str] = ()) -> list[Row]:
    """Every score of every model, score by score; the first model is the base, and of ``penalties`` less is better.

    The interval is Student's t of the paired differences, over prompts.
    """
    base, *others = models
    rows = []
    for score, values in base.prompts.items():
        penalty = score in penalties
        rows.append(Row(score, base.name, base.means[score], lower_is_better=penalty))
        for model in others:
            apart = torch.tensor(model.prompts[score]).double() - torch.tensor(values).double()
            count = len(apart)
            bounds = mean_interval(apart, torch.arange(count)) if count > 1 else None
            interval = None if bounds is None else (bounds.low, bounds.high)
            rows.append(Row(score, model.name, model.means[score], float(apart.mean()), interval, penalty))
    return rows


def beyond(rows: Sequence[Row], tolerances: Mapping[str, float]) -> list[str]:
    """A line for each LoRA that is worse in a named score, in the mean by more than its tolerance."""
    worse = [(row, row.difference if row.lower_is_better else -row.difference) for row in rows if row.difference]
    return [
        f"{row.model} is worse than the base by {by:.4g} in {row.score}; --tolerance is {tolerances[row.score]:g}"
        for row, by in worse
        if row.score in tolerances and by > tolerances[row.score]
    ]


HEADS = ("score", "model", "mean", "difference", "95 % interval", "")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's cells under ``HEADS``; a score is named once."""
    found = []
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:+.4f}"
        interval = "" if row.interval is None else "{:+.4f} to {:+.4f}".format(*row.interval)
        score = row.score if row.difference is None else ""
        found.append((score, row.model, f"{row.mean:.4f}", difference, interval, row.verdict))
    return found


def legend(prompts: int, images: int) -> str:
    """The table's meaning in a sentence or two."""
    text = (
        f"Difference to the base on {prompts} prompts with {images} image{'s' * (images > 1)} each, of the same noise."
    )
    if prompts < 2:
        return f"{text} One prompt gives no interval."
    return f"{text} Interval: Student's t over prompts; better or worse where it does not hold 0."


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [HEADS, *cells(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [zip(line, "<<>>><", widths, strict=True) for line in lines]
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in line).rstrip() for line in aligned)


def content(
    models: Sequence[Scored], rows: Sequence[Row], prompts: Sequence[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as JSON takes it: ``facts``, the table, and each prompt with its scores by model."""
    values = [
        {"prompt": prompt, "scores": {m.name: {score: of[i] for score, of in m.prompts.items()} for m in models}}
        for i, prompt in enumerate(prompts)
    ]
    table = [asdict(row) for row in rows]
    for line in table:
        del line["lower_is_better"]  # the verdict of the printed table alone
    return {**facts, "table": table, "prompts": values}


def draw_grid(
    path: Path, prompts: Sequence[str], models: Sequence[Scored], references: Sequence[Image.Image | None]
) -> None:
    """Write one PNG: a row for each prompt, its text at the left, and a column for each model, the rewards below.

    Args:
        references: the picture before the models' images, for each row; ``None`` in all rows without editing.
    """
    first = models[0].images[0]
    wide = min(max(first.shape[1], SIDES[0]), SIDES[1])
    high = round(wide * first.shape[0] / first.shape[1])
    heads = [*(["reference"] if any(references) else []), *(model.name for model in models)]
    places = [2 * MARGIN + TEXT + i * (wide + MARGIN) for i in range(len(heads))]
    step = high + LINE + MARGIN
    canvas = Image.new("RGB", (places[-1] + wide + MARGIN, LINE + 2 * MARGIN + len(models[0].images) * step), "white")
    pen = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(FONT)
    for x, name in zip(places, heads, strict=True):
        pen.text((x, MARGIN), textwrap.shorten(name, wide // 8, placeholder="…"), fill="black", font=font)
    for row, prompt in enumerate(prompts[: len(models[0].images)]):
        top = LINE + 2 * MARGIN + row * step
        for line, text in enumerate(textwrap.wrap(prompt, TEXT // 7, max_lines=max(1, high // LINE), placeholder=" …")):
            pen.text((MARGIN, top + line * LINE), text, fill="black", font=font)
        pictures = [(Image.fromarray(model.images[row]), f"{model.rewards[row]:.3f}") for model in models]
        if len(heads) > len(models):
            pictures.insert(0, (references[row] or Image.new("RGB", (1, 1), "white"), ""))
        for x, (picture, reward) in zip(places, pictures, strict=True):
            canvas.paste(scaled(picture, (wide, high)), (x, top))
            pen.rectangle((x, top, x + wide - 1, top + high - 1), outline="#bbbbbb")
            pen.text((x, top + high + 1), reward, fill="#555555", font=font)
    canvas.save(path, format="PNG")


def scaled(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize. Small images keep sharp pixels, since smoothing would hide artefacts of the model."""
    small = max(picture.size) < max(size)
    return picture.resize(size, Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)


def build_page(rows: Sequence[Row], explained: str, settings: Mapping[str, str], grid: Path) -> str:
    """One HTML page without requests; everything is escaped but the style."""
    from jinja2 import Environment
    from markupsafe import Markup

    style = resources.files("flowgrpo_rc.report").joinpath("page.css").read_text(encoding="utf-8")
    source = resources.files("flowgrpo_rc.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, keep_trailing_newline=True)
        .from_string(source)
        .render(
            style=Markup(style),
            levels={"better": "ok", "worse": "problem"},
            models=list(dict.fromkeys(row.model for row in rows))[1:],
            heads=HEADS,
            rows=cells(rows),
            legend=explained,
            settings=settings,
            grid=f"data:image/png;base64,{base64.b64encode(grid.read_bytes()).decode()}",
            shown=SHOWN,
        )
    )
