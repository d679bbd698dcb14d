"""A panel: a record of metrics, unit and limits that draws a run's values and puts them in words.

``panels`` lists them. ``summary.png``, the closing table and the page share them, so that a metric has one name, one
colour and one unit everywhere.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import WINDOW, History, Series

INK = "#1c2430"
SOFT = "#5a6675"
GRID = "#dde2e9"
BLUE = "#2563a8"
ORANGE = "#c2570c"
GREEN = "#2f855a"
RED = "#b3261e"

# Of matplotlib, for rc_context.
SETTINGS: Any = {
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9.5,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    # The same run gives the same bytes, also on a machine with other fonts and names with a dollar sign.
    "svg.hashsalt": "flowgrpo_rc",
    "svg.fonttype": "path",
    "text.parse_math": False,
}
# Limits are red in every panel.
LIMIT_STYLE: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}


@dataclass(frozen=True)
class Line:
    """One metric over the steps of the run."""

    metrics: tuple[str, ...]  # Its names; the first that the run still logs is shown
    label: str  # The entry in the legend
    color: str = BLUE
    name: str | None = None
    """Its name in sentences and tables, if not the label. A line with an empty name is only drawn."""
    key: bool = False  # Show it as a key number, at the head of the page and in the closing table
    style: Mapping[str, Any] = field(default_factory=dict)  # Keyword arguments of matplotlib's ``plot``
    smooth: bool = False  # Draw the running mean instead of the values

    @property
    def spoken(self) -> str:
        """Its name in sentences and tables."""
        return self.label if self.name is None else self.name

    def series(self, history: History) -> Series | None:
        """The logged values."""
        series = history.series(*self.metrics)
        return running_mean(series) if series is not None and self.smooth else series


def running_mean(series: Series) -> Series:
    """Means over a window that ends at each point."""
    # Long runs scatter over more points, so their window is longer.
    window = max(WINDOW, len(series) // 40)
    sums = [0.0, *itertools.accumulate(series.values)]
    means = ((sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums)))
    return Series(series.metric, series.steps, tuple(means), series.now_from)


@dataclass(frozen=True)
class Level:
    """A horizontal line: a limit if it has a label, else the value of two equal policies."""

    value: float
    label: str = ""
    linestyle: str = "--"

    def draw(self, axes: Any) -> None:
        """Draw it on matplotlib axes."""
        if self.label:
            axes.axhline(self.value, color=RED, label=self.label, **LIMIT_STYLE | {"linestyle": self.linestyle})
        else:
            axes.axhline(self.value, color=SOFT, linewidth=0.8)


Value = TypeVar("Value")
# A value, or a function that returns it for a run.
ByRun: TypeAlias = Value | Callable[[History], Value]


def of_run(value: Any, history: History) -> Any:
    """The value of a ``ByRun`` for this run."""
    return value(history) if callable(value) else value


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Metrics over the steps of the run."""

    title: str
    unit: ByRun[str]  # Label of the axis of the values
    caption: str  # A hint what to look for, in one sentence
    file: str = ""  # Stem of its own picture under ``plots/``. ``summary.png`` shows the panels that have one.
    lines: ByRun[Sequence[Line]] = ()
    levels: ByRun[Sequence[Level]] = ()
    scale: str = "linear"
    """``linear``; ``log``, where no value is negative; or ``share``, from 0 to the next round limit up to 1."""

    def logged(self, history: History) -> list[tuple[Line, Series]]:
        """Its lines, as far as the run logged them."""
        return [(line, series) for line in of_run(self.lines, history) if (series := line.series(history)) is not None]

    def words(self, history: History) -> str:
        """The values in words, for those who cannot see the picture; empty if the run logged none."""
        parts = []
        for line, series in self.logged(history):
            if line.spoken:
                ends = f"from {number(series.values[0])} to {number(series.values[-1])}"
                parts.append(f"{line.spoken} {ends}, steps {series.span[0]}-{series.span[1]}")
        levels = [level.label for level in of_run(self.levels, history) if level.label]
        return "; ".join([*parts, *levels] if parts else [])

    def draw(self, history: History, axes: Any) -> None:
        """Draw it on matplotlib axes, without title and legend."""
        # All lines decide about the scale together.
        logged = self.logged(history)
        values = [value for _, series in logged for value in series.values]
        logarithmic = self.scale == "log" and min(values) >= 0 and max(values) > 0
        for line, series in logged:
            # A logarithmic scale cannot show zeros, and a line of zeros alone needs no legend entry.
            points = {step: v for step, v in zip(series.steps, series.values, strict=True) if v > 0 or not logarithmic}
            if points:
                # A line through one or two points is hard to see without markers.
                style = {"marker": "o" if len(points) < 3 else None, "color": line.color, **line.style}
                axes.plot(list(points), list(points.values()), label=line.label, **style)
        for level in of_run(self.levels, history):
            level.draw(axes)
        if logarithmic:
            _use_log_scale(axes)
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        if self.scale == "share":
            # Limits count too, so that a limit is never outside the picture.
            top = max(value for drawn in axes.get_lines() for value in drawn.get_ydata())
            limit = next((limit for limit in (0.1, 0.25, 0.5) if top <= 0.9 * limit), 1.0)
            axes.set_ylim(-0.02 * limit, 1.02 * limit)
        axes.set(xlabel="step", ylabel=of_run(self.unit, history))


class TimestepPanel(Panel):
    """The recent means of every gap that is logged by timestep, from noise to image."""

    def recent(self, history: History) -> dict[str, dict[float, Series]]:
        """Recent values by metric and timestep, without signed means, which a logarithmic scale cannot show. Metrics in
        nats are left out too; they repeat the others in another unit."""
        return {
            metric: steps
            for metric, steps in history.by_timestep().items()
            if not metric.endswith("gap_mean")
            and "nats" not in metric
            and len(steps) > 1
            and any(max(series.values) > 0 for series in steps.values())
        }

    def words(self, history: History) -> str:
        found = []
        for metric, steps in self.recent(history).items():
            values = ", ".join(f"{number(series.mean)} at {timestep:g}" for timestep, series in steps.items())
            found.append(f"{metric} over the last {WINDOW} steps: {values}")
        return "; ".join(found)

    def draw(self, history: History, axes: Any) -> None:
        colors = itertools.cycle((BLUE, GREEN, ORANGE, SOFT, INK))
        for (metric, steps), color in zip(self.recent(history).items(), colors, strict=False):
            label = metric.removeprefix("actor/").removeprefix("rollout_corr/").removeprefix("rollout_sync/")
            means = [series.mean for series in steps.values()]
            axes.plot(list(steps), means, "o-", color=color, label=label, markersize=4)
        for level in of_run(self.levels, history):
            level.draw(axes)
        # Sampling runs from large timesteps to small ones.
        axes.invert_xaxis()
        _use_log_scale(axes)
        axes.set(xlabel="timestep, from noise to image", ylabel=of_run(self.unit, history))


def draw_panel(panel: Panel, history: History, figure: Any, title: str | None = None) -> None:
    """Draw a panel on a matplotlib figure or subfigure of its own, with its legend above the axes. Call it with
    ``SETTINGS`` in force. A ``title`` heads the legend; without one, a single line has no legend."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    panel.draw(history, axes)
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1 or (labels and title):
        style = {"frameon": False, "borderaxespad": 0.1, "columnspacing": 1.2, "alignment": "left"}
        heading = {"title": title, "title_fontproperties": {"weight": "bold", "size": 11}}
        # As many columns as fit; 66 characters are about the width of a small figure.
        columns = max(1, min(4, len(labels), 65 // (6 + max(map(len, labels)))))
        figure.legend(loc="outside upper left", ncols=columns, **style, **heading)
    if axes.get_xlabel() == "step":
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))


def _use_log_scale(axes: Any) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)
