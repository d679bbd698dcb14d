"""The figures' contents: one function a panel, which draws on matplotlib axes and says what it shows."""

from collections.abc import Iterator
from typing import Any

from flowgrpo_rc.report.checks_gap import GAP
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import REWARD, WINDOW, History, Series
from flowgrpo_rc.report.panel import (
    Panel,
    Theme,
    band_width,
    ends,
    line,
    logarithmic,
    running_mean,
    several,
    share_axis,
)
from flowgrpo_rc.report.panels_correction import CORRECTION_PANELS, REJECTION_PANEL
from flowgrpo_rc.rewards.config import STATISTICS

# ---------------------------------------------------------------------- reward


PART_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 3, 1, 3)))
"""Line styles of so many of them; the sentence under the figure names all."""


def reward_parts(history: History) -> list[Series]:
    """The rewards that the total is made of; none where it is one reward alone."""
    names = [n for n in history.names if n.startswith("reward/") and n.removeprefix("reward/") not in STATISTICS]
    found = [series for name in names if (series := history.series(name)) is not None]
    return found if len(found) > 1 else []


def draw_reward(history: History, axes: Any, theme: Theme) -> None:
    """Training reward with its running mean, what it is made of, and the held-out reward."""
    train = history.series(*REWARD)
    if train is not None:
        line(axes, train, "training", theme.blue, alpha=0.35, linewidth=1)
        window = max(WINDOW, len(train) // 40)
        axes.plot(train.steps, running_mean(train.values, window), color=theme.blue, label=f"mean of {window}")
    for part, style in zip(reward_parts(history), PART_STYLES, strict=False):
        axes.plot(
            part.steps,
            running_mean(part.values, max(WINDOW, len(part) // 40)),
            color=theme.green,
            linestyle=style,
            linewidth=1,
            label=part.metric.removeprefix("reward/"),
        )
    held = history.series("val/reward/mean")
    line(axes, held, "held out", theme.orange, marker="o", markersize=4)
    axes.set(xlabel="step", ylabel="reward")


def describe_reward(history: History) -> str | None:
    """In words."""
    held = ends(history.series("val/reward/mean"), "held-out reward")
    parts = (ends(part, part.metric.removeprefix("reward/")) for part in reward_parts(history))
    return several(ends(history.series(*REWARD), "training reward"), *parts, held)


# ---------------------------------------------------------------------- the gap


def draw_gap(history: History, axes: Any, theme: Theme) -> None:
    """Gap, its largest value, staleness, and the clip band."""
    line(axes, history.series("rollout_corr/logprob_abs_diff_max"), "largest", theme.blue, alpha=0.4, linewidth=1)
    line(axes, history.series(GAP[0]), "probe, equal weights", theme.green, linewidth=1)
    line(axes, _seen(history), "mean", theme.blue)
    stale = history.series("rollout_sync/staleness_abs_mean")
    if stale is not None and max(stale.values) > 0:
        line(axes, _positive(stale), "staleness", theme.orange)
    _clip_line(history, axes, theme)
    if any(value > 0 for line in axes.get_lines() for value in line.get_ydata()):
        logarithmic(axes)
    axes.set(xlabel="step", ylabel=_unit(history))


def _unit(history: History) -> str:
    return "|log ratio| per dimension" if history.sde and not history.cps else "|log ratio|"


def describe_gap(history: History) -> str | None:
    """In words."""
    gap, width = ends(history.series(*GAP), "gap"), band_width(history)
    return several(gap, f"clip band {number(width)}" if width else None) if gap else None


def _seen(history: History) -> Series | None:
    """The gap that training meets: before an update where the clip is centred at the engine, else as corrected."""
    names = GAP[1:] if history.clips_at_the_engine else GAP[:0:-1]
    series = history.series(*names)
    return series if series is not None and max(series.values) > 0 else None


def _positive(series: Series) -> Series:
    kept = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v > 0]
    return Series(series.metric, tuple(s for s, _ in kept), tuple(v for _, v in kept))


def _clip_line(history: History, axes: Any, theme: Theme) -> None:
    width, auto = band_width(history), history.series("actor/clip_ratio_auto_mean")
    if width and auto is not None:
        line(axes, auto, "clip band (auto)", theme.red, linestyle="--", linewidth=1.2)
    elif width:
        axes.axhline(width, color=theme.red, linestyle="--", linewidth=1.2, label=f"clip band {number(width)}")


def sizes(history: History, *, nats: bool = False) -> dict[str, dict[float, Series]]:
    """Per-timestep sizes in the log-probs' own unit, or those in nats; only what has two timesteps."""
    found = {m: s for m, s in history.by_timestep().items() if not m.endswith("gap_mean") and ("nats" in m) == nats}
    return {metric: steps for metric, steps in found.items() if len(steps) > 1 and _any(steps)}


def sizes_now(history: History, *, nats: bool = False) -> dict[str, dict[float, Series]]:
    """``sizes`` over the last steps, with the timesteps that are still trained."""
    recent = ((metric, history.now_by_timestep(steps)) for metric, steps in sizes(history, nats=nats).items())
    return {metric: steps for metric, steps in recent if len(steps) > 1 and _any(steps)}


def _any(steps: dict[float, Series]) -> bool:
    return any(value > 0 for series in steps.values() for value in series.values)


def draw_timesteps(history: History, axes: Any, theme: Theme) -> None:
    """The recent mean of every per-timestep size, from noise to image."""
    _by_timestep(sizes_now(history), axes, theme)
    if width := band_width(history):
        axes.axhline(width, color=theme.red, linestyle="--", linewidth=1.2, label=f"clip band {number(width)}")
    logarithmic(axes)
    axes.set(ylabel=_unit(history))


def draw_nats(history: History, axes: Any, theme: Theme) -> None:
    """The same of the whole step, in nats."""
    _by_timestep(sizes_now(history, nats=True), axes, theme)
    logarithmic(axes)
    axes.set(ylabel="nats of the whole step")


def _by_timestep(metrics: dict[str, dict[float, Series]], axes: Any, theme: Theme) -> None:
    colors = (theme.blue, theme.green, theme.orange, theme.soft, theme.ink)
    for i, (metric, steps) in enumerate(metrics.items()):
        values = [series.mean for series in steps.values()]
        label = metric.removeprefix("actor/").removeprefix("rollout_corr/").removeprefix("rollout_sync/")
        axes.plot(list(steps), values, "o-", color=colors[i % len(colors)], label=label, markersize=4)
    axes.invert_xaxis()
    axes.set(xlabel="timestep, from noise to image")


def describe_timesteps(history: History) -> str | None:
    """In words."""
    return next(_timesteps_in_words(sizes_now(history)), None)


def describe_nats(history: History) -> str | None:
    """In words."""
    return several(*_timesteps_in_words(sizes_now(history, nats=True)))


def _timesteps_in_words(metrics: dict[str, dict[float, Series]]) -> Iterator[str]:
    for metric, steps in metrics.items():
        values = ", ".join(f"{number(s.mean)} at {t:g}" for t, s in steps.items())
        yield f"{metric} over the last {WINDOW} steps: {values}"


def draw_heat(history: History, axes: Any, theme: Theme) -> None:
    """The first per-timestep metric over the run: a row a timestep, colour its size."""
    from matplotlib.colors import LogNorm

    steps = next(iter(sizes(history).values()))
    columns = sorted({step for series in steps.values() for step in series.steps})
    place = {step: i for i, step in enumerate(columns)}
    table = [[float("nan")] * len(columns) for _ in steps]
    for row, series in zip(table, steps.values(), strict=True):
        for step, value in zip(series.steps, series.values, strict=True):
            row[place[step]] = value if value > 0 else float("nan")
    edges = (columns[0] - 0.5, columns[-1] + 0.5, len(steps) - 0.5, -0.5)
    image = axes.imshow(table, aspect="auto", extent=edges, cmap=theme.sequence, norm=LogNorm(), interpolation="none")
    axes.grid(False)
    places = range(0, len(steps), -(-len(steps) // 10))
    axes.set_yticks(places, [f"{list(steps)[i]:.0f}" for i in places])
    axes.set(xlabel="step", ylabel="timestep")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    logarithmic(bar.ax)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0, colors=theme.soft, labelsize=8)


def describe_heat(history: History) -> str | None:
    """In words."""
    found = sizes(history)
    return f"{next(iter(found))} at {len(next(iter(found.values())))} timesteps over the run" if found else None


# ---------------------------------------------------------------------- what the update leaves out


CLIP_LINES = (
    ("actor/pg_clipfrac_first", "before learning"),
    ("actor/pg_clipfrac", "all mini-steps"),
    ("actor/pg_clipfrac_inert", "no gradient"),
)


def draw_clip(history: History, axes: Any, theme: Theme) -> None:
    """Shares outside the clip band."""
    for (name, label), color in zip(CLIP_LINES, (theme.red, theme.blue, theme.soft), strict=True):
        line(axes, history.series(name), label, color)
    share_axis(axes)


def describe_clip(history: History) -> str | None:
    """In words."""
    if not history.clips:
        return None
    return several(*(ends(history.series(name), f"clipped, {label},") for name, label in CLIP_LINES))


# ---------------------------------------------------------------------- where the time goes


def stage_seconds(history: History) -> dict[str, float]:
    """Median seconds of a stage over the steps that had it, longest first; without those under a thousandth."""
    from statistics import median

    found = {}
    for name in history.names:
        series = history.series(name) if name.startswith("timing_s/") and name != "timing_s/step" else None
        if series is not None:
            found[name.removeprefix("timing_s/")] = median(series.values)
    total = sum(found.values())
    return dict(sorted(((k, v) for k, v in found.items() if v > 1e-3 * total), key=lambda item: -item[1]))


def draw_time(history: History, axes: Any, theme: Theme) -> None:
    """A bar a stage."""
    stages = stage_seconds(history)
    bars = axes.barh(list(stages), list(stages.values()), color=theme.blue, height=0.62)
    axes.bar_label(bars, [f"{number(v)} s" for v in stages.values()], padding=4, color=theme.ink, fontsize=9)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.margins(x=0.18)
    axes.set(xlabel="seconds, median of the steps that had it")


def describe_time(history: History) -> str | None:
    """In words."""
    return several(*(f"{stage} {number(seconds)} s" for stage, seconds in stage_seconds(history).items()))


PANELS = (
    Panel(
        "Reward", describe_reward, draw_reward, "Both should climb; only held out falling: the reward is being gamed."
    ),
    Panel("Clipped samples", describe_clip, draw_clip, "Before learning: what the gap alone puts outside the band."),
    Panel("Gap between engine and actor", describe_gap, draw_gap, "Steady.", "Steady, and well below the clip band."),
    Panel(
        "Gap by timestep",
        describe_timesteps,
        draw_timesteps,
        f"Last {WINDOW} steps; smooth.",
        f"Last {WINDOW} steps; smooth, and below the band.",
    ),
    Panel("Gap by timestep over the run", describe_heat, draw_heat, "Rows keep their colour while nothing changes."),
    Panel("Gap in nats by timestep", describe_nats, draw_nats, "What the whole step's densities differ by; smooth."),
    *CORRECTION_PANELS,
    REJECTION_PANEL,
    Panel("Where the time goes", describe_time, draw_time, "Validation and saving happen in some steps only."),
)
