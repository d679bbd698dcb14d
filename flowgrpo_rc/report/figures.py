"""Panels as SVG pictures in data URIs: once for light, once for dark pages."""

import base64
import io
import struct
import warnings
import zlib
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
    """All panels that the run logged something for; one that cannot be drawn has no picture, and says why."""
    found = []
    for panel in PANELS:
        alt = panel.describe(history)
        if alt is None:
            continue
        try:
            light, dark = (render(panel, history, theme) for theme in (LIGHT, DARK))
        # matplotlib refuses values and texts in ways of its own; a picture less is no reason to lose the page.
        except Exception as error:
            reason = (
                f"This figure cannot be drawn ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})."
            )
            found.append(Figure(panel.title, f"{panel.title}: {alt}", reason, "", ""))
            continue
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


LARGEST_PICTURE = 50_000_000
"""Pixels; a larger picture is not opened, as decoding it would take hundreds of megabytes."""
LONGEST_SIDE = 4096
"""Pixels of a picture's side on the page; a larger one is shown smaller."""


def picture_uri(path: Path) -> tuple[str | None, str]:
    """A PNG file as a data URI, or None and why it is not shown, in words that follow the file's name."""
    from PIL import Image

    unreadable = "cannot be read; it may be being written"
    if not path.is_file():
        return None, unreadable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                width, height = image.size
                if width * height > LARGEST_PICTURE:
                    return None, too_large(width, height)
                # Also one of another format, and one that is cut off: decoding finds what a glance at it does not.
                image.load()
                if max(width, height) <= LONGEST_SIDE and image.format == "PNG":
                    return data_uri("image/png", path.read_bytes()), ""
                image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
                buffer = io.BytesIO()
                image.save(buffer, format="PNG")
                return data_uri("image/png", buffer.getvalue()), ""
    except Image.DecompressionBombError:
        return None, too_large(None, None)
    # As Pillow and its decoders raise them, by what is damaged.
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, struct.error, zlib.error, MemoryError):
        return None, unreadable


def too_large(width: int | None, height: int | None) -> str:
    """Why a picture is not shown, and what to do."""
    size = "" if width is None else f" ({width} x {height} pixels)"
    return f"is too large to show{size}; open the file itself"
