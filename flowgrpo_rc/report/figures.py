"""Pictures as data URIs, for a page that asks for nothing: panels as SVG, sample grids as PNG."""

import base64
import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panel import SETTINGS, Panel, draw_panel
from flowgrpo_rc.report.panels import panels_of

SIZE = (4.3, 2.75)
"""Inches; small, so that the text is still legible when the picture fills a phone's width."""


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    title: str
    alt: str
    """What it shows, in words."""
    caption: str
    uri: str = ""
    """The picture; empty where it could not be drawn. It is for light pages, dark ones turn its colours round."""


def figures(history: History) -> list[Figure]:
    """All panels that the run logged something for; one that cannot be drawn has no picture, and says why."""
    found = []
    for panel in panels_of(history):
        alt = f"{panel.title}: {panel.words(history)}"
        try:
            found.append(Figure(panel.title, alt, panel.caption, render(panel, history)))
        # matplotlib refuses values and texts in ways of its own; a picture less is no reason to lose the page.
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0][:200]
            reason = f"This figure cannot be drawn ({type(error).__name__}: {first_line})."
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


LARGEST_PICTURE = 50_000_000
"""Pixels; a larger picture is not opened, as decoding it would take hundreds of megabytes."""
LONGEST_SIDE = 4096
"""Pixels of a picture's side on the page; a larger one is shown smaller."""


def picture_uri(path: Path) -> tuple[str | None, str]:
    """A PNG file as a data URI, or None and why it is not shown, in words that follow the file's name."""
    from PIL import Image

    too_large = f"is too large to show (more than {LARGEST_PICTURE:,} pixels); open the file itself"
    unreadable = "cannot be read; it may be being written"
    if not path.is_file():
        return None, unreadable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.width * image.height > LARGEST_PICTURE:
                    return None, too_large
                # Also one of another format, and one that is cut off: decoding finds what a glance at it does not.
                image.load()
                image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
                buffer = io.BytesIO()
                image.save(buffer, format="PNG")
                return data_uri("image/png", buffer.getvalue()), ""
    except Image.DecompressionBombError:
        return None, too_large
    # As Pillow and its decoders raise them, by what is damaged.
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, struct.error, zlib.error, MemoryError):
        return None, unreadable
