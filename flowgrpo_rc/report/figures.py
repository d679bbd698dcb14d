"""Panels as SVG pictures in data URIs: once for light, once for dark pages."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panel import DARK, LIGHT, Panel, Theme
from flowgrpo_rc.report.panels import PANELS

SIZE = (4.3, 2.75)
"""Inches; small, so that the text is still legible when the picture fills a phone's width."""


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    title: str
    alt: str
    """What it shows, in words."""
    caption: str
    light: str
    dark: str
    """Data URIs of the two renderings."""


def figures(history: History) -> list[Figure]:
    """All panels that the run logged something for."""
    found = []
    for panel in PANELS:
        alt = panel.describe(history)
        if alt is not None:
            light, dark = (render(panel, history, theme) for theme in (LIGHT, DARK))
            found.append(Figure(panel.title, f"{panel.title}: {alt}", panel.look_for(history), light, dark))
    return found


def render(panel: Panel, history: History, theme: Theme) -> str:
    """One panel as an SVG data URI; the same bytes for the same run."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    settings: Any = style(theme)
    with matplotlib.rc_context(settings):
        figure = Canvas(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        panel.draw(history, axes, theme)
        legend(figure, axes)
        if axes.get_xlabel() == "step":
            axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return data_uri("image/svg+xml", buffer.getvalue())


def legend(figure: Any, axes: Any) -> None:
    """Above the axes, in as many columns as fit."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1:
        columns = next((n for n in (4, 3, 2) if n <= len(labels) and n * (6 + max(map(len, labels))) < 66), 1)
        figure.legend(loc="outside upper left", ncols=columns, frameon=False, borderaxespad=0.1, columnspacing=1.2)


def style(theme: Theme) -> dict[str, Any]:
    """matplotlib settings of a theme."""
    return {
        "text.color": theme.ink,
        "axes.labelcolor": theme.soft,
        "axes.edgecolor": theme.line,
        "axes.facecolor": "none",
        "xtick.color": theme.line,
        "ytick.color": theme.line,
        "xtick.labelcolor": theme.soft,
        "ytick.labelcolor": theme.soft,
        "axes.grid": True,
        "grid.color": theme.line,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9.5,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "flowgrpo_rc",
        "svg.fonttype": "path",
        "text.parse_math": False,
    }


def data_uri(kind: str, content: bytes) -> str:
    """``data:`` with the content in base64."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture_uri(path: Path) -> str | None:
    """A PNG file as a data URI; None where it cannot be read, as while it is being written."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.verify()
        return data_uri("image/png", path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # as Pillow raises them, by what is damaged
        return None
