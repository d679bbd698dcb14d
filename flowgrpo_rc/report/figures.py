"""Pictures of the page as data URIs, so that it makes no request: panels as SVG, sample grids as PNG."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panel import SETTINGS, Panel, draw_panel
from flowgrpo_rc.report.panels import logged_panels

# Inches; small, so that the text is still legible if the picture fills a phone's width.
SIZE = (4.3, 2.75)
# Pixels; a larger picture is scaled down, so that the page stays small enough to mail.
LONGEST_SIDE = 4096


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    title: str
    alt: str
    """The values in words."""
    caption: str
    uri: str = ""
    """The picture, for light pages; dark ones invert its colours. Empty if it could not be drawn."""


def figures(history: History) -> list[Figure]:
    """All panels with something to show; one that cannot be drawn has the reason as its caption."""
    found = []
    for panel in logged_panels(history):
        alt = f"{panel.title}: {panel.words(history)}"
        try:
            found.append(Figure(panel.title, alt, panel.caption, render(panel, history)))
        # matplotlib raises errors of many classes, and a missing picture is no reason to lose the page.
        except Exception as error:
            reason = f"This figure cannot be drawn ({type(error).__name__}: {one_line(error, 200)})."
            found.append(Figure(panel.title, alt, reason))
    return found


def render(panel: Panel, history: History) -> str:
    """One panel as an SVG data URI; the same bytes for the same run."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(SETTINGS):
        figure = Canvas(figsize=SIZE, layout="constrained")
        draw_panel(panel, history, figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return data_uri("image/svg+xml", buffer.getvalue())


def data_uri(kind: str, content: bytes) -> str:
    """``data:`` with the content in base64."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture_uri(path: Path) -> tuple[str | None, str]:
    """A PNG file as a data URI, or None and why it is not shown, in words that follow the file's name."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            buffer = io.BytesIO()
            image.save(buffer, format="PNG")
    # Pillow raises these for a file that is cut off, as one that is being written.
    except (OSError, SyntaxError, ValueError):
        return None, "cannot be read; it may be being written"
    return data_uri("image/png", buffer.getvalue()), ""
