"""Outputs at the end of a run: ``summary.png``, the pictures under ``plots/`` and the closing table."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import WINDOW, History
from flowgrpo_rc.report.panel import SETTINGS, draw_panel
from flowgrpo_rc.report.panels import logged_panels
from flowgrpo_rc.run_folder import write_whole

# Inches of one panel; two of them stand side by side, as wide as a grid of samples.
PANEL_SIZE = (5.25, 3.3)
DOTS_PER_INCH = 120


@dataclass(frozen=True)
class KeyNumber:
    """First and last value of one of the few metrics that head the page."""

    name: str
    first: float  # Mean over the first third of the steps that logged it, at most ``WINDOW``; of validations the first
    last: float  # Mean over as many of the last steps
    is_share: bool  # It is a share of the samples
    steps: int = 1  # Steps that each of the two is a mean of

    def text(self, value: float) -> str:
        """``first`` or ``last`` as text."""
        return f"{value:.1%}" if self.is_share else number(value)


def key_numbers(history: History) -> list[KeyNumber]:
    """The key numbers that the run still logs, in the panels' order."""
    found = []
    logged = ((panel, *pair) for panel in logged_panels(history) for pair in panel.logged(history))
    for panel, line, series in logged:
        if line.key and series.now_from is not None:
            # Single training batches differ too much to compare; validations repeat their prompts.
            count = 1 if series.metric.startswith("val/") else max(1, min(WINDOW, len(series) // 3))
            first, last = (fmean(values) for values in (series.values[:count], series.values[-count:]))
            found.append(KeyNumber(line.spoken, first, last, panel.scale == "share", count))
    return found


def closing_table(history: History, title: str) -> Any:
    """The key numbers as a table of ``rich``."""
    from rich.table import Column, Table

    table = Table("", Column("first", justify="right"), Column("last", justify="right"), title=title)
    for entry in key_numbers(history):
        mean = f", mean of {entry.steps} steps" if entry.steps > 1 else ""
        table.add_row(f"{entry.name}{mean}", entry.text(entry.first), entry.text(entry.last))
    return table


def write_plots(history: History, folder: Path) -> list[Path]:
    """Write a picture per panel that has a file, and ``overview.png`` with all of them; return the files.

    Raises:
        OSError: a file cannot be written; matplotlib raises errors of its own too.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [panel for panel in logged_panels(history) if panel.file]
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {folder / f"{panel.file}.png": [panel] for panel in panels}
    if panels:
        # The overview is what a run's summary.png shows.
        pictures[folder / "overview.png"] = panels
    for path, shown in pictures.items():
        columns = min(2, len(shown))
        rows = -(-len(shown) // columns)
        with matplotlib.rc_context(SETTINGS | {"figure.facecolor": "white"}):
            layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)
            figure = Figure(figsize=(PANEL_SIZE[0] * columns, PANEL_SIZE[1] * rows), layout=layout)
            places = figure.subfigures(rows, columns, squeeze=False)
            for place, panel in zip(places.flat, shown, strict=False):
                draw_panel(panel, history, place, title=panel.title)
            write_whole(path, partial(figure.savefig, format="png", dpi=DOTS_PER_INCH))
    return list(pictures)


def stack_pictures(path: Path, pictures: Sequence[Path]) -> None:
    """Write one PNG with ``pictures`` below each other, centred: ``summary.png`` of the plots and the samples."""
    from PIL import Image

    images = [Image.open(picture).convert("RGB") for picture in pictures]
    width = max(image.width for image in images)
    canvas = Image.new("RGB", (width, sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        canvas.paste(image, ((width - image.width) // 2, top))
        top += image.height
    write_whole(path, lambda temporary: canvas.save(temporary, format="PNG"))
