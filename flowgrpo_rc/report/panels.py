"""The figures' contents: one function a panel, which draws on matplotlib axes and says what it shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.report.checks_correction import is_bound
from flowgrpo_rc.report.checks_gap import GAP
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import REWARD, WINDOW, History, Series


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


def _line(axes: Any, series: Series | None, label: str, color: str, **style: Any) -> None:
    if series is not None:
        style.setdefault("marker", "o" if len(series) < 3 else None)
        axes.plot(series.steps, series.values, color=color, label=label, **style)


# ---------------------------------------------------------------------- reward


STATISTICS = ("mean", "std", "min", "max", "group_std_mean", "zero_std_fraction")
"""What is logged as ``reward/...`` beside the rewards that make up a sum of several."""


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
        _line(axes, train, "training", theme.blue, alpha=0.35, linewidth=1)
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
    _line(axes, held, "held out", theme.orange, marker="o", markersize=4)
    axes.set(xlabel="step", ylabel="reward")


def describe_reward(history: History) -> str | None:
    """In words."""
    held = ends(history.series("val/reward/mean"), "held-out reward")
    parts = (ends(part, part.metric.removeprefix("reward/")) for part in reward_parts(history))
    return several(ends(history.series(*REWARD), "training reward"), *parts, held)


# ---------------------------------------------------------------------- the gap


def draw_gap(history: History, axes: Any, theme: Theme) -> None:
    """Gap, its largest value, staleness, and the clip band."""
    _line(axes, history.series("rollout_corr/logprob_abs_diff_max"), "largest", theme.blue, alpha=0.4, linewidth=1)
    _line(axes, history.series(GAP[0]), "probe, equal weights", theme.green, linewidth=1)
    _line(axes, _seen(history), "mean", theme.blue)
    stale = history.series("rollout_sync/staleness_abs_mean")
    if stale is not None and max(stale.values) > 0:
        _line(axes, _positive(stale), "staleness", theme.orange)
    _clip_line(history, axes, theme)
    if any(value > 0 for line in axes.get_lines() for value in line.get_ydata()):
        _logarithmic(axes)
    axes.set(xlabel="step", ylabel="|log ratio| per dimension" if history.sde else "|log ratio|")


def _logarithmic(axes: Any) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


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
        _line(axes, auto, "clip band (auto)", theme.red, linestyle="--", linewidth=1.2)
    elif width:
        axes.axhline(width, color=theme.red, linestyle="--", linewidth=1.2, label=f"clip band {number(width)}")


def per_dimension(history: History) -> dict[str, dict[float, Series]]:
    """Per-timestep metrics in the log-probs' own unit, those in nats left out; only what has two timesteps."""
    return {m: s for m, s in history.by_timestep().items() if "nats" not in m and len(s) > 1 and _any(s)}


def per_dimension_now(history: History) -> dict[str, dict[float, Series]]:
    """``per_dimension`` over the last steps, with the timesteps that are still trained."""
    recent = ((metric, history.now_by_timestep(steps)) for metric, steps in per_dimension(history).items())
    return {metric: steps for metric, steps in recent if len(steps) > 1 and _any(steps)}


def _any(steps: dict[float, Series]) -> bool:
    return any(value > 0 for series in steps.values() for value in series.values)


def draw_timesteps(history: History, axes: Any, theme: Theme) -> None:
    """The recent mean of every per-timestep metric, from noise to image."""
    colors = (theme.blue, theme.green, theme.orange, theme.soft, theme.ink)
    for i, (metric, steps) in enumerate(per_dimension_now(history).items()):
        values = [series.mean for series in steps.values()]
        label = metric.removeprefix("actor/").removeprefix("rollout_corr/").removeprefix("rollout_sync/")
        axes.plot(list(steps), values, "o-", color=colors[i % len(colors)], label=label, markersize=4)
    _clip_level(history, axes, theme)
    axes.invert_xaxis()
    _logarithmic(axes)
    axes.set(xlabel="timestep, from noise to image", ylabel="|log ratio| per dimension")


def _clip_level(history: History, axes: Any, theme: Theme) -> None:
    if width := band_width(history):
        axes.axhline(width, color=theme.red, linestyle="--", linewidth=1.2, label=f"clip band {number(width)}")


def describe_timesteps(history: History) -> str | None:
    """In words."""
    found = per_dimension_now(history)
    if not found:
        return None
    metric, steps = next(iter(found.items()))
    values = ", ".join(f"{number(s.mean)} at {t:g}" for t, s in steps.items())
    return f"{metric} over the last {WINDOW} steps: {values}"


def draw_heat(history: History, axes: Any, theme: Theme) -> None:
    """The first per-timestep metric over the run: a row a timestep, colour its size."""
    from matplotlib.colors import LogNorm

    steps = next(iter(per_dimension(history).values()))
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
    _logarithmic(bar.ax)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0, colors=theme.soft, labelsize=8)


def describe_heat(history: History) -> str | None:
    """In words."""
    found = per_dimension(history)
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
        _line(axes, history.series(name), label, color)
    _share(axes)


def describe_clip(history: History) -> str | None:
    """In words."""
    if not history.clips:
        return None
    return several(*(ends(history.series(name), f"clipped, {label},") for name, label in CLIP_LINES))


REJECTION_LINES = (
    ("rollout_corr/rollout_rs_masked_fraction", "rejected steps"),
    ("rollout_corr/rollout_rs_seq_masked_fraction", "rejected rows"),
    ("rollout_corr/rollout_is_veto_fraction", "vetoed rows"),
    ("reward/zero_std_fraction", "groups with equal rewards"),
)


def draw_rejection(history: History, axes: Any, theme: Theme) -> None:
    """Shares that teach nothing."""
    styles = ((theme.blue, "-"), (theme.blue, ":"), (theme.red, "-"), (theme.orange, "-"))
    drawn: list[tuple[float, ...]] = []
    for (name, label), (color, style) in zip(REJECTION_LINES, styles, strict=True):
        series = history.series(name)
        if series is not None and (series.values not in drawn or name.startswith("reward/")):
            drawn.append(series.values)
            _line(axes, series, label, color, linestyle=style)
    _share(axes)


def describe_rejection(history: History) -> str | None:
    """In words."""
    return several(*(ends(history.series(name), label) for name, label in REJECTION_LINES))


def _share(axes: Any) -> None:
    top = max((value for line in axes.get_lines() for value in line.get_ydata()), default=1.0)
    limit = next((t for t in (0.1, 0.25, 0.5) if top <= 0.9 * t), 1.0)
    axes.set_ylim(-0.02 * limit, 1.02 * limit)
    axes.set(xlabel="step", ylabel="share of samples")


def draw_weights(history: History, axes: Any, theme: Theme) -> None:
    """Mean weight in the range from smallest to largest, and the upper bound where it is near."""
    mean, low, high = (history.series(f"rollout_corr/rollout_is_{kind}") for kind in ("mean", "min", "max"))
    if low is not None and high is not None and low.steps == high.steps:
        band = {"color": theme.blue, "alpha": 0.2, "linewidth": 0, "label": "smallest to largest"}
        axes.fill_between(low.steps, low.values, high.values, **band)
    _line(axes, mean, "mean", theme.blue)
    axes.axhline(1, color=theme.soft, linewidth=0.8)
    bound = is_bound(history)
    if bound is not None and high is not None and max(high.values) > 0.5 * (1 + bound):
        axes.axhline(bound, color=theme.red, linestyle="--", linewidth=1.2, label=f"bound {number(bound)}")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel="step", ylabel="importance weight")


def describe_weights(history: History) -> str | None:
    """In words."""
    return several(
        *(ends(history.series(f"rollout_corr/rollout_is_{k}"), f"weight, {k},") for k in ("mean", "min", "max"))
    )


def draw_ess(history: History, axes: Any, theme: Theme) -> None:
    """Effective sample size."""
    _line(axes, history.series("rollout_corr/rollout_is_eff_sample_size"), "effective sample size", theme.blue)
    axes.set_ylim(-0.02, 1.05)
    axes.set(xlabel="step", ylabel="share of the batch")


def describe_ess(history: History) -> str | None:
    """In words."""
    return ends(history.series("rollout_corr/rollout_is_eff_sample_size"), "effective sample size")


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
    Panel("Importance weights", describe_weights, draw_weights, "Around 1; far from the bound."),
    Panel("Effective sample size", describe_ess, draw_ess, "1: every sample counts alike; below .3 a few carry all."),
    Panel("Samples that teach nothing", describe_rejection, draw_rejection, "Low; rejection should be for outliers."),
    Panel("Where the time goes", describe_time, draw_time, "Validation and saving happen in some steps only."),
)
