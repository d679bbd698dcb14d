"""The last steps of a run over time: a lane for the trainer with its stages, and one for each engine elsewhere."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import History, finite
from flowgrpo_rc.report.panel import BLUE, GREEN, INK, ORANGE, RED, SOFT, Panel

STEPS = 4
"""So many of the last steps are shown."""
MOST_ENGINES = 12
"""So many lanes of engines."""
LONGEST_NAME = 28
"""Characters of a lane's name."""
WAIT = "rollout"
"""The stage in which the trainer has images drawn, or waits for those that engines elsewhere draw."""
DRAW, SYNC, START, LOST = "draw", "sync", "start", "lost"
PALE = "#c4ccd6"
PURPLE = "#7b4fa3"
OF_VERSIONS = (BLUE, "#6fa8dc", "#1d3f66")
"""Colours of draws, by the version of their adapter in turn."""
NARROW = 0.025
"""Share of the picture's width below which a bar has no room for a number."""


@dataclass(frozen=True)
class Bar:
    """Something that went on in a lane."""

    what: str
    begin: float
    """Seconds since the run stood ready."""
    end: float
    """Likewise."""
    version: int = -1
    """Of a draw: the version of its adapter."""


@dataclass(frozen=True)
class Lanes:
    """Some steps that follow each other."""

    steps: tuple[int, int]
    """The first and the last."""
    begin: float
    """When the first began."""
    ends: list[float]
    """When each ended."""
    trainer: list[Bar]
    engines: dict[str, list[Bar]]
    """By their names; empty where images are drawn in the trainer's process."""

    @property
    def end(self) -> float:
        """When the last ended."""
        return self.ends[-1]

    @property
    def seconds(self) -> float:
        """How long they took."""
        return self.end - self.begin

    def share(self, bars: Sequence[Bar], *kinds: str) -> float:
        """Share of the time that bars of these kinds take."""
        found = (min(bar.end, self.end) - max(bar.begin, self.begin) for bar in bars if bar.what in kinds)
        return sum(max(0.0, seconds) for seconds in found) / self.seconds


def last_lanes(lines: Sequence[Mapping[str, Any]], steps: int = STEPS) -> Lanes | None:
    """The last steps of ``timeline.jsonl``, of those since the run was last started; ``None`` where there are none.

    What is not as a run writes it is left out.
    """
    usable = [line for line in lines if isinstance(line.get("step"), int) and _bars(line.get("stages"))]
    shown = [line for line in usable if line.get("started") == usable[-1].get("started")][-steps:]
    trainer = [bar for line in shown for bar in _bars(line["stages"])]
    if not trainer:
        return None
    engines: dict[str, list[Bar]] = {}
    for line in shown:
        told = line.get("engines")
        for name, done in told.items() if isinstance(told, Mapping) else ():
            engines.setdefault(str(name), []).extend(_bars(done))
    begin = min(bar.begin for bar in trainer)
    ends = list(itertools.accumulate((max(bar.end for bar in _bars(line["stages"])) for line in shown), max))
    return Lanes((shown[0]["step"], shown[-1]["step"]), begin, ends, trainer, engines) if ends[-1] > begin else None


def _bars(listed: Any) -> list[Bar]:
    """Of ``[what, begin, end]`` or ``[what, begin, end, images, version]`` each."""
    return [bar for one in listed if (bar := _bar(one)) is not None] if isinstance(listed, list) else []


def _bar(one: Any) -> Bar | None:
    if not isinstance(one, list) or len(one) not in (3, 5) or not isinstance(one[0], str):
        return None
    begin = finite(one[1])
    end = finite(one[2])
    if begin is None or end is None or end < begin:
        return None
    version = one[4] if len(one) == 5 and isinstance(one[4], int) else -1
    return Bar(one[0], begin, end, version)


@dataclass(frozen=True, kw_only=True)
class TimelinePanel(Panel):
    """The lanes of the last steps."""

    lanes: Lanes | None
    """``None``: there is nothing to show."""

    def words(self, history: History) -> str:
        lanes = self.lanes
        if lanes is None:
            return ""
        first, last = lanes.steps
        verb = "waited for images" if lanes.engines else "was in rollout"
        said = [
            f"steps {first}-{last} in {number(lanes.seconds)} s",
            f"the trainer {verb} {lanes.share(lanes.trainer, WAIT):.0%} of the time and was in update "
            f"{lanes.share(lanes.trainer, 'update'):.0%}",
        ]
        said += [f"{_short(name)} drew {lanes.share(bars, DRAW):.0%}" for name, bars in _shown(lanes)]
        return "; ".join(said)

    def draw(self, history: History, axes: Any) -> None:
        lanes = self.lanes
        assert lanes is not None
        entries: dict[str, Any] = {}
        for place, bars in enumerate([lanes.trainer, *(bars for _, bars in _shown(lanes))]):
            looks = (self._of_stage(bar) if place == 0 else self._of_work(bar) for bar in bars)
            for bar, (label, style) in zip(bars, looks, strict=True):
                begin = max(bar.begin, lanes.begin)
                width = min(bar.end, lanes.end) - begin
                if width > 0:
                    rectangle = axes.broken_barh([(begin - lanes.begin, width)], (place - 0.36, 0.72), **style)
                    entries.setdefault(label, rectangle)
            self._number(axes, place, bars)
        for label, rectangle in entries.items():
            rectangle.set_label(label)
        for end in lanes.ends[:-1]:
            axes.axvline(end - lanes.begin, color=INK, linewidth=0.8, linestyle=":")
        names = ["trainer", *(_short(name) for name, _ in _shown(lanes))]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, lanes.seconds)
        axes.grid(visible=False, axis="y")
        left_out = len(lanes.engines) - MOST_ENGINES
        more = f"; {left_out} engine(s) more" if left_out > 0 else ""
        first, last = lanes.steps
        axes.set(xlabel=f"{self.unit}, {f'steps {first} to {last}' if first < last else f'step {first}'}{more}")

    def _of_stage(self, bar: Bar) -> tuple[str, dict[str, Any]]:
        """Entry in the legend and style of a stage of the trainer."""
        assert self.lanes is not None
        if bar.what == WAIT and self.lanes.engines:
            return WAITS, {"facecolor": "none", "edgecolor": PALE, "hatch": "////", "linewidth": 0}
        color = {WAIT: BLUE, "reward": GREEN, "update": ORANGE}.get(bar.what)
        return (OTHER, {"facecolor": SOFT}) if color is None else (bar.what, {"facecolor": color})

    def _of_work(self, bar: Bar) -> tuple[str, dict[str, Any]]:
        """The same of an engine's work."""
        if bar.what == DRAW:
            color = OF_VERSIONS[bar.version % len(OF_VERSIONS)]
            return DRAWS, {"facecolor": color, "edgecolor": "white", "linewidth": 0.2}
        entries = {SYNC: ("takes adapter", PURPLE), LOST: ("lost", RED)}
        label, color = entries.get(bar.what, ("starts", PALE))
        return label, {"facecolor": color}

    def _number(self, axes: Any, place: int, bars: Sequence[Bar]) -> None:
        """Write the version of its adapter on each stretch of draws that has room for it."""
        assert self.lanes is not None
        draws = (bar for bar in bars if bar.what == DRAW)
        for version, stretch in itertools.groupby(draws, key=lambda bar: bar.version):
            drawn = list(stretch)
            begin = max(drawn[0].begin, self.lanes.begin)
            end = min(drawn[-1].end, self.lanes.end)
            if place and end - begin > NARROW * self.lanes.seconds:
                color = INK if version % len(OF_VERSIONS) == 1 else "white"
                middle = (begin + end) / 2 - self.lanes.begin
                axes.text(middle, place, str(version), ha="center", va="center", color=color, fontsize=8)


WAITS = "awaits images"
OTHER = "other stages"
DRAWS = "draws"


def _shown(lanes: Lanes) -> Iterator[tuple[str, list[Bar]]]:
    """The engines that have lanes, in the order of their names."""
    return itertools.islice(sorted(lanes.engines.items()), MOST_ENGINES)


def _short(name: str) -> str:
    printed = "".join(c if c.isprintable() else "?" for c in name)
    return printed if len(printed) <= LONGEST_NAME else f"{printed[: LONGEST_NAME - 3]}..."
