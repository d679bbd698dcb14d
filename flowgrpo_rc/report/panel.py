"""What a figure of the report is, and what figures share: colours, lines, axes, sentences."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import History, Series


@dataclass(frozen=True)
class Theme:
    """Colours of one rendering."""

    ink: str
    soft: str
    line: str
    blue: str
    orange: str
    green: str
    red: str
    sequence: str
    """A matplotlib colour map."""


LIGHT = Theme("#1c2430", "#5a6675", "#dde2e9", "#2563a8", "#c2570c", "#2f855a", "#b3261e", "viridis_r")
DARK = Theme("#e4e8ee", "#9aa6b5", "#2e3743", "#7db3ee", "#f0995a", "#6fcf9b", "#ff8a80", "viridis")

Draw = Callable[[History, Any, Theme], None]


@dataclass(frozen=True)
class Panel:
    """A figure: its heading, what it says in words (for those who cannot see it), and how to draw it."""

    title: str
    describe: Callable[[History], str | None]
    """None where the run logged nothing to draw."""
    draw: Draw
    caption: str
    """What to look for."""
    beside_the_band: str = ""
    """The same where the clip is centred at the engine, so that the band is drawn."""

    def look_for(self, history: History) -> str:
        """The caption for this run."""
        return self.beside_the_band if self.beside_the_band and band_width(history) else self.caption


def band_width(history: History) -> float | None:
    """The clip band's half width where the gap fills it: where the clip is centred at the engine."""
    return history.clip_width if history.clips_at_the_engine else None


def ends(series: Series | None, name: str) -> str | None:
    """``name from 0.63 to 0.75 over steps 1-60``."""
    if series is None:
        return None
    first, last = (number(series.values[i]) for i in (0, -1))
    return f"{name} from {first} to {last}, steps {series.span[0]}-{series.span[1]}"


def several(*parts: str | None) -> str | None:
    """The parts that there are, as one sentence."""
    there = [part for part in parts if part]
    return "; ".join(there) if there else None


def running_mean(values: tuple[float, ...], window: int) -> list[float]:
    """Mean of the last ``window`` values at each point."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def line(axes: Any, series: Series | None, label: str, color: str, **style: Any) -> None:
    """A series, with its points marked where there are only one or two."""
    if series is not None:
        style.setdefault("marker", "o" if len(series) < 3 else None)
        axes.plot(series.steps, series.values, color=color, label=label, **style)


def logarithmic(axes: Any) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def share_axis(axes: Any) -> None:
    """An axis of shares from 0 to the next round limit."""
    top = max((value for line in axes.get_lines() for value in line.get_ydata()), default=1.0)
    limit = next((t for t in (0.1, 0.25, 0.5) if top <= 0.9 * t), 1.0)
    axes.set_ylim(-0.02 * limit, 1.02 * limit)
    axes.set(xlabel="step", ylabel="share of samples")
