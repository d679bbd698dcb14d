"""What it costs to draw batches ahead: the gap study's settings by age of the adapter, its tables and its figure.

    python benchmarks/gap_ahead.py             # prints the tables; runs nothing
    python benchmarks/gap_ahead.py --report    # writes them into docs/gap_study.md, and the figure

The runs are ``gap_study.py``'s. Rewards are compared with those of the same precision, mode and seed without a lag.
The held-out reward at the end is of 240 images. Steadier, if of the training prompts, is the reward in training of the
same adapters: those after ``ADAPTERS`` batches, which draw the batch after next with a lag of one, and so on.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gap_study import RESULTS, SETTINGS, STALENESS, WITHOUT_A_GAP, Noise
from training_runs import HERE, load, write_table

PAGE = HERE.parent / "docs" / "gap_study.md"
PLOT = HERE.parent / "docs" / "images" / "gap_ahead.png"

PRECISIONS = ("float32", "bfloat16", "fp8")
MODES = ("bypass_1e-3", "bypass_1e-2", "bypass_auto", "decoupled_1e-3", "decoupled_rs_auto")
SEEDS = (1, 2, 3)
ADAPTERS = range(36, 56)
"""Numbers of the batches after which an adapter stands in the reward in training; all lags have drawn with these."""
PHASES = (range(2, 11), range(11, 31), range(31, 61))
"""Batches whose gap is averaged, counted from 1; the first one is drawn without a lag in every run."""
ENGINE = "rollout_sync/engine_gap_abs_mean"
STALE = "rollout_sync/staleness_abs_mean"
OUTSIDE = "rollout_sync/outside_clip"
WIDTH = "actor/clip_ratio_auto_mean"
BOUND = "actor/rollout_rs_auto_mean"

Run = dict[str, Any]


def name_of(precision: str, lag: int, mode: str) -> str:
    """The study's name of a setting; ``lag`` in batches."""
    (age,) = (age for age, batches in STALENESS.items() if batches == lag)
    return f"{precision}_stale{age}_{mode}"


def lags() -> list[int]:
    """Batches by which adapters are old in the study."""
    return sorted(STALENESS.values())


def of_seeds(runs: Iterable[Run]) -> dict[int, Run]:
    """By seed, those of ``SEEDS``."""
    return {run["seed"]: run for run in runs if run["seed"] in SEEDS}


def held_out(run: Run) -> float:
    """Reward of the last validation."""
    return run["final_held_out"]


def in_training(run: Run) -> float:
    """Mean reward in training of the adapters after ``ADAPTERS`` batches."""
    lag = SETTINGS[run["setting"]]["actor_rollout_ref.rollout.adapter_lag"]
    # Batch k, counted from 1, is drawn with the adapter after k - 1 - lag batches.
    return fmean(run["training"][str(after + lag + 1)] for after in ADAPTERS)


def losses(runs: dict[str, list[Run]], mode: str, lag: int, reward: Callable[[Run], float]) -> dict[str, list[float]]:
    """By precision, what each seed lost against its run without a lag."""
    found = {}
    for precision in PRECISIONS:
        fresh = of_seeds(runs.get(name_of(precision, 0, mode), ()))
        aged = of_seeds(runs.get(name_of(precision, lag, mode), ()))
        found[precision] = [
            reward(fresh[seed]) - reward(aged[seed]) for seed in SEEDS if seed in fresh and seed in aged
        ]
    return found


# ---------------------------------------------------------------------- tables


def rewards_table(runs: dict[str, list[Run]]) -> str:
    """Markdown: held-out rewards by precision, mode and lag."""
    heads = ["rollouts", "mode", *(f"{lag} ahead" if lag else "in turns" for lag in lags())]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for precision in PRECISIONS:
        for mode in MODES:
            groups = [of_seeds(runs.get(name_of(precision, lag, mode), ())).values() for lag in lags()]
            if any(groups):
                cells = [rewards_cell([held_out(run) for run in group]) for group in groups]
                lines.append(f"| {' | '.join([precision, f'`{mode}`', *cells])} |")
    return "\n".join(lines)


def rewards_cell(values: Sequence[float]) -> str:
    """``.78 (.75 to .80)``; of a single seed ``.78``; empty without one."""
    if not values:
        return ""
    mean = short(fmean(values))
    return f"{mean} ({short(min(values))} to {short(max(values))})" if len(values) > 1 else mean


def losses_table(runs: dict[str, list[Run]]) -> str:
    """Markdown: what was lost against no lag, with half the width of its 95 % interval; fp8 by itself."""
    heads = ["mode", "rollouts", "reward", *(f"{lag} ahead" for lag in lags() if lag)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for mode in MODES:
        for precisions in (("float32", "bfloat16"), ("fp8",)):
            for title, reward in (("held-out", held_out), ("in training", in_training)):
                cells = []
                for lag in lags():
                    if lag:
                        lost = losses(runs, mode, lag, reward)
                        cells.append(losses_cell([value for precision in precisions for value in lost[precision]]))
                lines.append(f"| {' | '.join([f'`{mode}`', ', '.join(precisions), title, *cells])} |")
    return "\n".join(lines)


def losses_cell(values: Sequence[float]) -> str:
    """``.031 ±.012 (6)``: mean, half the width of its interval, pairs."""
    if not values:
        return ""
    noise = Noise.of([values])
    width = f" ±{short(noise.half_width(len(values)), 3)}" if noise.freedom else ""
    return f"{short(fmean(values), 3)}{width} ({len(values)})"


def short(value: float, digits: int = 2) -> str:
    """Without the zero before the point."""
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def phases(runs: Sequence[Run], metric: str) -> list[float | None]:
    """Mean over runs and the batches of each phase; ``None`` where no run has the metric."""
    curves = [run["curves"][metric] for run in runs if metric in run.get("curves", {})]
    means: list[float | None] = []
    for batches in PHASES:
        values = [curve[batch - 1] for curve in curves for batch in batches if curve[batch - 1] is not None]
        means.append(fmean(values) if values else None)
    return means


def gaps_table(runs: dict[str, list[Run]]) -> str:
    """Markdown: the two parts of the gap, the share outside a fixed clip and the calibrated bands, in three phases."""
    heads = [
        "rollouts",
        "ahead",
        "engine gap",
        "staleness",
        f"outside {WITHOUT_A_GAP:g}",
        "`auto` clip",
        "`auto` bound",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for precision in PRECISIONS:
        for lag in lags():
            groups = {mode: runs.get(name_of(precision, lag, mode), []) for mode in MODES}
            everything = [run for group in groups.values() for run in group]
            cells = [
                gaps_cell(phases(everything, ENGINE), 1e-4),
                gaps_cell(phases(everything, STALE), 1e-4),
                gaps_cell(phases(groups["bypass_1e-3"], OUTSIDE), 0.01),
                gaps_cell(phases(groups["bypass_auto"], WIDTH), 1e-3),
                gaps_cell(phases(groups["decoupled_rs_auto"], BOUND), 1e-3),
            ]
            if any(cells):
                lines.append(f"| {' | '.join([precision, str(lag), *cells])} |")
    return "\n".join(lines)


def gaps_cell(values: Sequence[float | None], unit: float) -> str:
    """``12, 8, 3``: the phases in ``unit``; empty where nothing is known."""
    known = [value for value in values if value is not None]
    return ", ".join(f"{value / unit:.1f}" for value in known)


# ---------------------------------------------------------------------- figure


def plot(runs: dict[str, list[Run]], path: Path) -> None:
    """A column for each precision; above rewards by lag, below the course of staleness, engine gap and auto clip."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    colours = {"bypass_1e-3": "#dd6b20", "bypass_auto": "#2f855a", "decoupled_1e-3": "#2b6cb0"}
    shades = {1: "#9ecae1", 2: "#4292c6", 4: "#084594"}
    figure, grid = plt.subplots(2, len(PRECISIONS), figsize=(11, 6.2), sharey="row", layout="constrained")
    for column, precision in enumerate(PRECISIONS):
        axes = grid[0][column]
        for place, (mode, colour) in enumerate(colours.items()):
            means = {}
            for lag in lags():
                values = [held_out(run) for run in of_seeds(runs.get(name_of(precision, lag, mode), ())).values()]
                if values:
                    means[lag] = fmean(values)
                    axes.plot(
                        [lag + (place - 1) * 0.08] * len(values), values, "o", color=colour, markersize=4, alpha=0.6
                    )
            axes.plot(list(means), list(means.values()), color=colour, linewidth=2, label=mode)
        axes.set_title(f"{precision} rollouts", fontsize=10)
        axes.set_xlabel("batches ahead", fontsize=9)
        axes.set_xticks(lags())
        axes.grid(alpha=0.3)
        axes = grid[1][column]
        every = [run for lag in lags() for mode in MODES for run in runs.get(name_of(precision, lag, mode), [])]
        draw_course(axes, every, ENGINE, "#c53030", "engine gap")
        for lag, colour in shades.items():
            of_lag = [run for mode in MODES for run in runs.get(name_of(precision, lag, mode), [])]
            draw_course(axes, of_lag, STALE, colour, f"staleness, {lag} ahead")
        axes.axhline(WITHOUT_A_GAP, color="0.5", linestyle="--", linewidth=1, label=f"clip {WITHOUT_A_GAP:g}")
        axes.set_yscale("log")
        axes.set_xlabel("batch", fontsize=9)
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("held-out reward after training", fontsize=9)
    grid[1][0].set_ylabel("mean |log ratio|", fontsize=9)
    grid[0][0].legend(fontsize=8, loc="lower left")
    grid[1][-1].legend(fontsize=8, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_course(axes: Any, runs: Sequence[Run], metric: str, colour: str, label: str, over: int = 5) -> None:
    """Mean over runs, smoothed over neighbouring batches."""
    curves = [run["curves"][metric] for run in runs if metric in run.get("curves", {})]
    if not curves or not any(any(curve) for curve in curves):
        return
    means = [fmean(values) for values in zip(*curves, strict=True)]
    starts = range(1, len(means) - over + 1)  # the first batch has no lag yet
    smooth = [fmean(means[start : start + over]) for start in starts]
    axes.plot([start + (over + 1) / 2 for start in starts], smooth, color=colour, linewidth=1.8, label=label)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results' JSON-lines file")
    parser.add_argument("--report", action="store_true", help=f"write {PAGE.name}'s tables and figure")
    arguments = parser.parse_args()
    runs = load(list(SETTINGS), arguments.results)
    if arguments.report:
        write_table(PAGE, RESULTS, f"{rewards_table(runs)}\n\n{gaps_table(runs)}")
        plot(runs, PLOT)
    else:
        print(rewards_table(runs), losses_table(runs), gaps_table(runs), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
