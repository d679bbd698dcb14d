"""The last steps of a run over time: a lane for the trainer with its stages, and one for each engine elsewhere."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import History, finite
from flowgrpo_rc.report.panel import BLUE, GREEN, INK, ORANGE, RED, SOFT, Panel

# Number of steps shown.
STEPS = 4
# Most lanes of engines.
MOST_ENGINES = 12
# Characters of a lane's name.
LONGEST_NAME = 28
# The stage in which the trainer draws images, or waits for engines elsewhere.
WAIT = "rollout"
# An engine draws images.
DRAW = "draw"
PALE = "#c4ccd6"
PURPLE = "#7b4fa3"
# Legend entries and colours of the trainer's stages, and of an engine's work.
STAGES = {WAIT: (WAIT, BLUE), "reward": ("reward", GREEN), "update": ("update", ORANGE)}
WORK = {"sync": ("takes adapter", PURPLE), "lost": ("lost", RED)}
# Colours of draws, by the version of their adapter in turn.
OF_VERSIONS = (BLUE, "#6fa8dc", "#1d3f66")
# Share of the picture's width below which a bar has no room for a number.
NARROW = 0.025


@dataclass(frozen=True)
class Bar:
    """A stretch of work in a lane, in seconds since the run was ready."""

    what: str
    begin: float
    end: float
    version: int = -1  # Version of the adapter, of a draw


@dataclass(frozen=True)
class Lanes:
    """Consecutive steps."""

    steps: tuple[int, int]  # The first and the last
    begin: float  # Start of the first
    ends: list[float]  # End of each
    trainer: list[Bar]
    engines: dict[str, list[Bar]]
    """By name, at most ``MOST_ENGINES``; empty if images are drawn in the trainer's process."""
    left_out: int  # Engines without a lane

    @property
    def end(self) -> float:
        """End of the last."""
        return self.ends[-1]

    @property
    def seconds(self) -> float:
        """Duration of all."""
        return self.end - self.begin

    def share(self, bars: Sequence[Bar], kind: str) -> float:
        """Share of the time in bars of this kind."""
        found = (min(bar.end, self.end) - max(bar.begin, self.begin) for bar in bars if bar.what == kind)
        return sum(max(0.0, seconds) for seconds in found) / self.seconds


def last_lanes(lines: Sequence[Mapping[str, Any]], steps: int = STEPS) -> Lanes | None:
    """The last steps of ``timeline.jsonl`` since the run was last started; ``None`` if there are none."""
    # A killed run leaves lines without stages.
    usable = [line for line in lines if isinstance(line.get("step"), int) and _bars(line.get("stages"))]
    # Clocks of different starts have different zeros.
    shown = [line for line in usable if line.get("started") == usable[-1].get("started")][-steps:]
    if not shown:
        return None
    stages = [_bars(line["stages"]) for line in shown]
    engines: dict[str, list[Bar]] = {}
    for line in shown:
        for name, done in (line.get("engines") or {}).items():
            engines.setdefault(name, []).extend(_bars(done))
    begin = min(bar.begin for bars in stages for bar in bars)
    # A stage may end after one of the next step has begun, so ends are accumulated.
    ends = list(itertools.accumulate((max(bar.end for bar in bars) for bars in stages), max))
    if ends[-1] <= begin:
        return None
    lanes = dict(itertools.islice(sorted(engines.items()), MOST_ENGINES))
    trainer = list(itertools.chain.from_iterable(stages))
    return Lanes((shown[0]["step"], shown[-1]["step"]), begin, ends, trainer, lanes, len(engines) - len(lanes))


def _bars(listed: Sequence[Any] | None) -> list[Bar]:
    """Bars of ``[what, begin, end]`` or ``[what, begin, end, images, version]`` each."""
    bars = []
    for what, begin, end, *drawn in listed or ():
        # A run that is killed may leave a stage without an end.
        if finite(begin) is not None and finite(end) is not None and begin <= end:
            bars.append(Bar(what, begin, end, drawn[1] if drawn else -1))
    return bars


@dataclass(frozen=True, kw_only=True)
class TimelinePanel(Panel):
    """The lanes of the last steps."""

    engines_elsewhere: bool = False
    """For runs with engines elsewhere; without, for those that draw in the trainer's process."""

    def lanes(self, history: History) -> Lanes | None:
        """The lanes, if they are of this panel's kind of run."""
        lanes = last_lanes(history.timeline)
        return lanes if lanes is not None and bool(lanes.engines) == self.engines_elsewhere else None

    def words(self, history: History) -> str:
        lanes = self.lanes(history)
        if lanes is None:
            return ""
        first, last = lanes.steps
        verb = "waited for images" if lanes.engines else "was in rollout"
        parts = [
            f"steps {first}-{last} in {number(lanes.seconds)} s",
            f"the trainer {verb} {lanes.share(lanes.trainer, WAIT):.0%} of the time and was in update "
            f"{lanes.share(lanes.trainer, 'update'):.0%}",
        ]
        parts += [f"{_short(name)} drew {lanes.share(bars, DRAW):.0%}" for name, bars in lanes.engines.items()]
        return "; ".join(parts)

    def draw(self, history: History, axes: Any) -> None:
        lanes = self.lanes(history)
        assert lanes is not None
        entries: dict[str, Any] = {}
        for place, bars in enumerate([lanes.trainer, *lanes.engines.values()]):
            for bar in bars:
                label, style = _look(bar, of_engine=place > 0, waits=self.engines_elsewhere)
                # Work for the first step may begin before it.
                begin = max(bar.begin, lanes.begin)
                width = min(bar.end, lanes.end) - begin
                if width > 0:
                    rectangle = axes.broken_barh([(begin - lanes.begin, width)], (place - 0.36, 0.72), **style)
                    entries.setdefault(label, rectangle)
            if place:
                _write_versions(axes, place, bars, lanes)
        for label, rectangle in entries.items():
            rectangle.set_label(label)
        for end in lanes.ends[:-1]:
            axes.axvline(end - lanes.begin, color=INK, linewidth=0.8, linestyle=":")
        names = ["trainer", *map(_short, lanes.engines)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, lanes.seconds)
        axes.grid(visible=False, axis="y")
        more = f"; {lanes.left_out} engine(s) more" if lanes.left_out else ""
        first, last = lanes.steps
        axes.set(xlabel=f"{self.unit}, {f'steps {first} to {last}' if first < last else f'step {first}'}{more}")


def _look(bar: Bar, *, of_engine: bool, waits: bool) -> tuple[str, dict[str, Any]]:
    """Legend entry and style of a stage of the trainer, or of an engine's work."""
    if of_engine and bar.what == DRAW:
        color = OF_VERSIONS[bar.version % len(OF_VERSIONS)]
        return "draws", {"facecolor": color, "edgecolor": "white", "linewidth": 0.2}
    if not of_engine and waits and bar.what == WAIT:
        return "awaits images", {"facecolor": "none", "edgecolor": PALE, "hatch": "////", "linewidth": 0}
    label, color = WORK.get(bar.what, ("starts", PALE)) if of_engine else STAGES.get(bar.what, ("other stages", SOFT))
    return label, {"facecolor": color}


def _write_versions(axes: Any, place: int, bars: Sequence[Bar], lanes: Lanes) -> None:
    """Write the adapter's version on each stretch of draws that has room for it."""
    draws = (bar for bar in bars if bar.what == DRAW)
    for version, stretch in itertools.groupby(draws, key=lambda bar: bar.version):
        drawn = list(stretch)
        begin = max(drawn[0].begin, lanes.begin)
        end = min(drawn[-1].end, lanes.end)
        if end - begin > NARROW * lanes.seconds:
            color = INK if version % len(OF_VERSIONS) == 1 else "white"
            middle = (begin + end) / 2 - lanes.begin
            axes.text(middle, place, str(version), ha="center", va="center", color=color, fontsize=8)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
