"""The cost of drawing batches ahead: the gap study's settings by age of the adapter, a table and a figure.

    python benchmarks/gap_ahead.py             # prints everything; runs nothing
    python benchmarks/gap_ahead.py --report    # writes the table of docs/gap_study.md, and the figure

The runs are ``gap_study.py``'s. Rewards are compared between runs of one precision and one seed. The held-out reward at
the end is that of 240 images. Steadier, if of training prompts and with the rollout's own engine, is the reward in
training of one and the same range of adapters, ``ADAPTERS``: each batch has 96 images.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gap_study import RESULTS, SETTINGS, STALENESS, WITHOUT_A_GAP, Noise
from learning import ROLLOUT
from training_runs import HERE, load, write_table

PAGE = HERE.parent / "docs" / "gap_study.md"
PLOT = HERE.parent / "docs" / "images" / "gap_ahead.png"

PRECISIONS = ("float32", "bfloat16", "fp8")
FIXED = "bypass_1e-3"
AUTO = "bypass_auto"
DECOUPLED = "decoupled_1e-3"
DECOUPLED_AUTO = "decoupled_rs_auto"
MODES = (FIXED, "bypass_1e-2", AUTO, DECOUPLED, DECOUPLED_AUTO)
PAIRS = (
    (AUTO, FIXED),
    (DECOUPLED, FIXED),
    (DECOUPLED, AUTO),
    (DECOUPLED_AUTO, DECOUPLED),
    ("bypass_rs_auto", "bypass_rs_1e-3"),
    ("decoupled_rs_auto", "decoupled_rs_1e-3"),
)
"""Modes that are compared at the same lag; what the first one gains over the second."""
SEEDS = (1, 2, 3)
ADAPTERS = range(36, 56)
"""Batches that the adapters have learned from whose reward in training is compared; every lag draws with these."""
PHASES = (range(2, 11), range(11, 31), range(31, 61))
"""Batches whose gap is averaged, counted from 1; the first one is drawn without a lag in every run."""
ENGINE = "rollout_sync/engine_gap_abs_mean"
STALE = "rollout_sync/staleness_abs_mean"
WIDTH = "actor/clip_ratio_auto_mean"
BOUND = "actor/rollout_rs_auto_mean"

Run = dict[str, Any]
Runs = dict[str, list[Run]]


def name_of(precision: str, lag: int, mode: str) -> str:
    """The study's name of a setting; ``lag`` in batches."""
    (age,) = (age for age, batches in STALENESS.items() if batches == lag)
    return f"{precision}_stale{age}_{mode}"


def lags() -> list[int]:
    """Batches by which adapters are old in the study."""
    return sorted(STALENESS.values())


def of_seeds(runs: Runs, precision: str, lag: int, mode: str) -> dict[int, Run]:
    """A setting's runs by seed, those of ``SEEDS``."""
    return {run["seed"]: run for run in runs.get(name_of(precision, lag, mode), ()) if run["seed"] in SEEDS}


def held_out(run: Run) -> float:
    """Reward of the last validation."""
    return run["final_held_out"]


def in_training(run: Run) -> float:
    """Mean reward in training of the ``ADAPTERS``."""
    lag = SETTINGS[run["setting"]][f"{ROLLOUT}.adapter_lag"]
    # Batch k, counted from 1, is drawn with the adapter that has learned from k - 1 - lag batches.
    return fmean(run["training"][str(learned + lag + 1)] for learned in ADAPTERS)


def differences(better: dict[int, Run], worse: dict[int, Run], reward: Callable[[Run], float]) -> list[float]:
    """The gain of each seed that both have."""
    return [reward(better[seed]) - reward(worse[seed]) for seed in SEEDS if seed in better and seed in worse]


# ---------------------------------------------------------------------- tables


def page_table(runs: Runs) -> str:
    """Markdown: a row for each precision and lag, with the gap's two parts and the bands."""
    heads = ["rollouts", "ahead", "engine gap", "staleness", "outside the clip of 1e-3", "half width of `auto`"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for precision in PRECISIONS:
        for lag in lags():
            of = {mode: list(of_seeds(runs, precision, lag, mode).values()) for mode in MODES}
            cells = [
                phases_cell(engine_gaps(of, lag), 1e-4),
                phases_cell(staleness(of, precision), 1e-4) if lag else "0",
                phases_cell([run["clip_fraction_curve"] for run in of[FIXED]], 1, digits=2),
                f"{fmean(run['metrics'][WIDTH] for run in of[AUTO]) * 1e3:.1f}",
            ]
            lines.append(f"| {' | '.join([precision, str(lag), *cells])} |")
    return "\n".join(lines)


def engine_gaps(of: dict[str, list[Run]], lag: int) -> list[list[float]]:
    """The engine gap's course: of the rescored images, or without a lag of all images in bypass mode."""
    if lag:
        return [run["curves"][ENGINE] for run in with_curve(of, ENGINE)]
    return [run["gap_curve"] for run in (*of[FIXED], *of[AUTO])]


def staleness(of: dict[str, list[Run]], precision: str) -> list[list[float]]:
    """Its course where the clip is not centred at the engine, or wide: a narrow one there slows the policy down.

    With float32 rollouts it is the whole gap, which is known of all images; else it is that of the rescored images.
    """
    of = {mode: of[mode] for mode in (AUTO, DECOUPLED, DECOUPLED_AUTO)}
    if precision == "float32":
        return [run["gap_curve"] for group in of.values() for run in group]
    return [run["curves"][STALE] for run in with_curve(of, STALE)]


def with_curve(of: dict[str, list[Run]], metric: str) -> list[Run]:
    """The runs of all modes whose result has the course of this metric."""
    return [run for group in of.values() for run in group if metric in run.get("curves", {})]


def phases_cell(curves: Sequence[Sequence[float]], unit: float, digits: int = 1) -> str:
    """``14.9, 6.6, 2.5``: means over runs and the batches of each phase, in ``unit``; empty without a run."""
    if not curves:
        return ""
    means = [fmean(curve[batch - 1] for curve in curves for batch in batches) for batches in PHASES]
    return ", ".join(short(value / unit, digits) for value in means)


def rewards_cell(values: Sequence[float]) -> str:
    """``.78 (.75 to .80)``; of a single seed ``.78``; empty without one."""
    if not values:
        return ""
    mean = short(fmean(values))
    return f"{mean} ({short(min(values))} to {short(max(values))})" if len(values) > 1 else mean


def rewards_table(runs: Runs) -> str:
    """Markdown: held-out rewards of every mode by precision and lag."""
    heads = ["rollouts", "mode", *map(str, lags())]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for precision in PRECISIONS:
        for mode in MODES:
            groups = [of_seeds(runs, precision, lag, mode).values() for lag in lags()]
            cells = [rewards_cell([held_out(run) for run in group]) for group in groups]
            lines.append(f"| {' | '.join([precision, mode, *cells])} |")
    return "\n".join(lines)


def losses_table(runs: Runs) -> str:
    """Markdown: what a lag costs each mode, in all precisions, in those without a large gap, and with fp8."""
    heads = ["lost against no lag", "rollouts", "reward", *(str(lag) for lag in lags() if lag)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for mode in MODES:
        for precisions in (PRECISIONS, ("float32", "bfloat16"), ("fp8",)):
            for reward in (held_out, in_training):
                cells = [mode, ", ".join(precisions), reward.__name__]
                for lag in filter(None, lags()):
                    fresh = {precision: of_seeds(runs, precision, 0, mode) for precision in precisions}
                    aged = {precision: of_seeds(runs, precision, lag, mode) for precision in precisions}
                    lost = [one for p in precisions for one in differences(fresh[p], aged[p], reward)]
                    cells.append(pairs_cell(lost))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gains_table(runs: Runs) -> str:
    """Markdown: what one mode gains over another at the same lag; the second row of each without fp8."""
    heads = ["gained", "rollouts", "reward", *map(str, lags())]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for better, worse in PAIRS:
        for precisions in (PRECISIONS, ("float32", "bfloat16")):
            for reward in (held_out, in_training):
                cells = [f"{better} over {worse}", ", ".join(precisions), reward.__name__]
                for lag in lags():
                    gained = [
                        one
                        for p in precisions
                        for one in differences(of_seeds(runs, p, lag, better), of_seeds(runs, p, lag, worse), reward)
                    ]
                    cells.append(pairs_cell(gained))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pairs_cell(values: Sequence[float]) -> str:
    """``.031 ±.012 (6)``: mean, half the width of its 95 % interval, pairs."""
    if not values:
        return ""
    noise = Noise.of([values])
    width = f" ±{short(noise.half_width(len(values)), 3)}" if noise.freedom else ""
    return f"{short(fmean(values), 3)}{width} ({len(values)})"


def bands_table(runs: Runs) -> str:
    """Markdown: calibrated half widths and rejection bounds in the three phases, in 1e-3, and the share rejected."""
    heads = ["rollouts", "ahead", "half width", "bound", "rejected"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for precision in PRECISIONS:
        for lag in lags():
            of = {mode: list(of_seeds(runs, precision, lag, mode).values()) for mode in (AUTO, DECOUPLED_AUTO)}
            cells = [
                phases_cell([run["curves"][metric] for run in with_curve(of, metric)], 1e-3)
                for metric in (WIDTH, BOUND)
            ]
            rejected = [run["rejected"] for run in of[DECOUPLED_AUTO]]
            cells.append(short(fmean(rejected), 3) if rejected else "")
            lines.append(f"| {' | '.join([precision, str(lag), *cells])} |")
    return "\n".join(lines)


def short(value: float, digits: int = 2) -> str:
    """Without the zero before the point."""
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and digits > 1 else text


# ---------------------------------------------------------------------- figure


def plot(runs: Runs, path: Path) -> None:
    """A column for each precision: above the held-out rewards by lag, below the course of the gap's two parts."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, len(PRECISIONS), figsize=(11, 6.2), sharey="row", layout="constrained")
    for column, precision in enumerate(PRECISIONS):
        draw_rewards(grid[0][column], runs, precision)
        draw_gaps(grid[1][column], runs, precision)
        grid[0][column].set_title(f"{precision} rollouts", fontsize=10)
    grid[0][0].set_ylabel("held-out reward after training", fontsize=9)
    grid[1][0].set_ylabel("mean |log ratio|", fontsize=9)
    grid[0][0].legend(fontsize=8, loc="lower left")
    grid[1][1].legend(fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_rewards(axes: Any, runs: Runs, precision: str) -> None:
    """Every seed by lag, and the means, of the modes of the page's table."""
    for place, (mode, colour) in enumerate({FIXED: "#dd6b20", AUTO: "#2f855a", DECOUPLED: "#2b6cb0"}.items()):
        rewards = {lag: list(map(held_out, of_seeds(runs, precision, lag, mode).values())) for lag in lags()}
        for lag, values in rewards.items():
            axes.plot([lag + (place - 1) * 0.08] * len(values), values, "o", color=colour, markersize=4, alpha=0.6)
        known = [lag for lag, values in rewards.items() if values]
        axes.plot(known, [fmean(rewards[lag]) for lag in known], color=colour, linewidth=2, label=mode)
    axes.set_xlabel("batches ahead", fontsize=9)
    axes.set_xticks(lags())
    axes.grid(alpha=0.3)


def draw_gaps(axes: Any, runs: Runs, precision: str) -> None:
    """Engine gap over all lags, staleness for each."""
    of_lag = {lag: {mode: list(of_seeds(runs, precision, lag, mode).values()) for mode in MODES} for lag in lags()}
    engine = [curve for lag, of in of_lag.items() for curve in engine_gaps(of, lag)]
    draw_course(axes, engine, "#c53030", "engine gap")
    for lag, colour in zip(filter(None, lags()), ("#9ecae1", "#4292c6", "#084594"), strict=True):
        draw_course(axes, staleness(of_lag[lag], precision), colour, f"staleness, {lag} ahead")
    axes.axhline(WITHOUT_A_GAP, color="0.5", linestyle="--", linewidth=1, label=f"clip {WITHOUT_A_GAP:g}")
    axes.set_yscale("log")
    axes.set_xlabel("batch", fontsize=9)
    axes.grid(alpha=0.3)


def draw_course(axes: Any, curves: Iterable[Sequence[float]], colour: str, label: str, over: int = 5) -> None:
    """Mean over runs, smoothed over neighbouring batches; nothing without a run, or where all is 0."""
    means = [fmean(values) for values in zip(*curves, strict=True)]
    if not any(means):
        return
    starts = range(1, len(means) - over + 1)  # the first batch has no lag yet
    smooth = [fmean(means[start : start + over]) for start in starts]
    axes.plot([start + (over + 1) / 2 for start in starts], smooth, color=colour, linewidth=1.8, label=label)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results' JSON-lines file")
    parser.add_argument("--report", action="store_true", help=f"write {PAGE.name}'s table and figure")
    arguments = parser.parse_args()
    runs = load(list(SETTINGS), arguments.results)
    if arguments.report:
        write_table(PAGE, Path(__file__), page_table(runs))
        plot(runs, PLOT)
    else:
        print(*(made(runs) for made in (page_table, rewards_table, losses_table, gains_table, bands_table)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
