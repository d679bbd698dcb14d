"""What the READMEs of the built models have in common."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from number_images import FONT_SIZES, FONTS, IMAGE_SIZE, MAX_SHIFT


def write_card(folder: Path, card: str, settings: Any, **fields: Any) -> None:
    """Write `README.md` into `folder`, which holds the saved model: `card` with its `fields` filled in, among them
    `{megabytes}` of the folder, the pictures' `{size}` and a table of the `{settings}`."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    text = card.format(
        megabytes=size / 1e6,
        size=IMAGE_SIZE,
        settings=table(["setting", "value"], asdict(settings).items()),
        **fields,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    rows = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def parts_table(pipeline: Any, sizes: Mapping[str, str]) -> str:
    """The networks of a pipeline, each with its size in words."""
    rows = []
    for name, size in sizes.items():
        part = getattr(pipeline, name)
        rows.append((f"`{name}`", f"`{type(part).__name__}`", f"{count(part) / 1e6:.2f} M", size))
    return table(["part", "class", "parameters", "size"], rows)


def count(network: Any) -> int:
    """How many parameters it has."""
    return sum(parameter.numel() for parameter in network.parameters())


def data_table(number: tuple[str, int], *shades: tuple[str, str]) -> str:
    """What the pictures are drawn from: how many they are, fonts and places, and their `shades`."""
    rows = [
        number,
        ("fonts", ", ".join(font.removesuffix(".ttf") for font in FONTS)),
        ("font sizes", ", ".join(map(str, FONT_SIZES))),
        ("largest shift from the centre", f"{MAX_SHIFT} pixels"),
        *shades,
    ]
    return table(["property", "value"], rows)
