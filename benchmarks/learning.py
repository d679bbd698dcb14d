"""The effect of the rollout/training gap on learning, with and without each correction: tiny model, several seeds.

    python benchmarks/learning.py --jobs 2 --seeds 1,2,3           # runs what is missing, then prints the table
    python benchmarks/learning.py --report     # writes the table and the figure of docs/learning.md; runs nothing

Every setting of ``SETTINGS`` trains the demo's model with the command line's ``train``, a process a run, one thread
each; resumable, as ``training_runs.py`` says. To add a setting, add an entry to ``SETTINGS``; it is laid over
``COMMON``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from training_runs import HERE, Overrides, Study, load, run_missing, write_table

RESULTS = HERE / "results" / "learning.jsonl"
PAGE = HERE.parent / "docs" / "learning.md"
PLOT = HERE.parent / "docs" / "images" / "learning.png"
REFERENCE = "float32_bypass"
"""The setting without a gap; drawn in grey behind all others."""

RC = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS = "actor_rollout_ref.actor.diffusion_loss"

COMMON: Overrides = {
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{LOSS}.clip_ratio": 1e-3,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,  # two optimizer steps a batch: pi_theta leaves pi_old
    f"{ROLLOUT}.val_kwargs.n": 12,
    "trainer.test_freq": 20,
    "trainer.save_freq": -1,
    "trainer.log_val_generations": 0,
    "trainer.resume_mode": "disable",
    "trainer.device": "cpu",
    "reward.ocr.num_threads": 1,
}

# An image's gap, |mean over its two steps of log pi_train/pi_rollout|, measured before each update in the first 25
# batches of seed 1: bfloat16 median 1.4e-4, 80 % below 2.7e-4, 99 % below 6.5e-4; fp8 5e-4, 1.1e-3, 2.5e-3. So each
# band rejects about a fifth of the images for the gap alone; in bypass mode the policy's own movement comes on top.
BF16_BAND = "0.9997_1.0003"
FP8_BAND = "0.999_1.001"


def correction(*, bypass: bool, weights: str | None = None, band: str | None = None, loss: str = "ppo_clip") -> dict:
    """A whole ``rollout_correction`` section, so that nothing of the demo's is left in it.

    ``weights`` is the level of the importance weights (truncated at 2), ``band`` keeps images whose geometric-mean
    ratio train/rollout lies in it.
    """
    return {
        f"{RC}.bypass_mode": bypass,
        f"{RC}.rollout_is": weights,
        f"{RC}.rollout_is_threshold": 2.0,
        f"{RC}.rollout_rs": None if band is None else "seq_mean_k1",
        f"{RC}.rollout_rs_threshold": band,
        f"{RC}.loss_type": loss,
    }


NONE = correction(bypass=False)
DECOUPLED_IS = correction(bypass=False, weights="sequence")
BYPASS = correction(bypass=True)
FP8: Overrides = {f"{ROLLOUT}.quantization": "fp8_emulated"}
AUTO: Overrides = {f"{LOSS}.clip_ratio": "auto", f"{LOSS}.auto_clip_min": 1e-4}
STALE: Overrides = {f"{ROLLOUT}.adapter_lag": 4}

SETTINGS: dict[str, Overrides] = {
    "float32_bypass": {**BYPASS, f"{ROLLOUT}.dtype": "float32"},
    "none": NONE,
    "decoupled_is": DECOUPLED_IS,
    "decoupled_is_rs": correction(bypass=False, weights="sequence", band=BF16_BAND),
    "bypass": BYPASS,
    "bypass_rs": correction(bypass=True, band=BF16_BAND),
    "bypass_reinforce": correction(bypass=True, weights="sequence", loss="reinforce"),
    "grpo_guard": {**NONE, f"{LOSS}.loss_mode": "grpo_guard", f"{LOSS}.clip_ratio": 1e-4},  # its ratios are smaller
    "stale_none": {**NONE, **STALE},
    "stale_decoupled_is": {**DECOUPLED_IS, **STALE},
    "stale_bypass": {**BYPASS, **STALE},
    "fp8_bypass": {**BYPASS, **FP8},
    "fp8_bypass_rs": {**correction(bypass=True, band=FP8_BAND), **FP8},
    "fp8_decoupled_is": {**DECOUPLED_IS, **FP8},
    "float32_bypass_auto": {**BYPASS, **AUTO, f"{ROLLOUT}.dtype": "float32"},
    "bypass_auto": {**BYPASS, **AUTO},
    "fp8_bypass_auto": {**BYPASS, **FP8, **AUTO},
    "fp8_bypass_wide": {**BYPASS, **FP8, f"{LOSS}.clip_ratio": 1e-2},
}


# ---------------------------------------------------------------------- reporting


def table(runs: dict[str, list[dict]]) -> str:
    """Markdown: a row a setting, means over its seeds."""
    seeds = sorted({run["seed"] for group in runs.values() for run in group})
    heads = ["setting", "rollouts", "mode", *(f"seed {s}" for s in seeds), "gap", "outside the clip", "rejected"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for setting, group in runs.items():
        final = {run["seed"]: run["final_held_out"] for run in group}
        cells = [
            f"`{setting}`",
            *words({**COMMON, **SETTINGS[setting]}),
            *(f"{final[s]:.2f}" if s in final else "" for s in seeds),
            mean_gap(group),
            f"{fmean(run['clip_fraction'] for run in group):.2f}",
            f"{fmean(run['rejected'] for run in group):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def words(overrides: Overrides) -> tuple[str, str]:
    """A setting's rollouts, correction and clip, in words."""
    rollouts = "fp8-rounded" if f"{ROLLOUT}.quantization" in overrides else overrides[f"{ROLLOUT}.dtype"]
    if f"{ROLLOUT}.adapter_lag" in overrides:
        rollouts += f", adapter {overrides[f'{ROLLOUT}.adapter_lag']} batches old"
    mode = "bypass" if overrides[f"{RC}.bypass_mode"] else "decoupled"
    if overrides[f"{RC}.loss_type"] == "reinforce":
        mode += ", reinforce"
    elif f"{LOSS}.loss_mode" in overrides:
        mode += f", {overrides[f'{LOSS}.loss_mode']}"
    if overrides[f"{RC}.rollout_is"]:
        mode += f", {overrides[f'{RC}.rollout_is']} weights"
    if overrides[f"{RC}.rollout_rs"]:
        mode += f", rejection {overrides[f'{RC}.rollout_rs_threshold'].replace('_', '-')}"
    if overrides[f"{RC}.loss_type"] == "ppo_clip":
        mode += f", clip {overrides[f'{LOSS}.clip_ratio']}"
    return rollouts, mode


def mean_gap(group: Sequence[dict]) -> str:
    """As a table writes it, over the seeds of a setting."""
    bound = "≥ " if any(run["gap_is_lower_bound"] for run in group) else ""
    return f"{bound}{fmean(run['gap'] for run in group):.1e}"


def mean_curve(group: Sequence[dict]) -> tuple[list[int], list[float]]:
    """Held-out reward over the seeds, at the steps that all of them have."""
    curves = [{int(step): value for step, value in run["held_out"].items()} for run in group]
    steps = sorted(set.intersection(*(set(c) for c in curves)))
    return steps, [fmean(c[step] for c in curves) for step in steps]


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """A panel a setting: seeds thin, their mean thick, the reference's mean in grey."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    columns = min(4, len(runs))
    lines = -(-len(runs) // columns)
    size = (3.1 * columns, 2.4 * lines + 0.4)
    figure, grid = plt.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in list(grid.flat)[len(runs) :]:
        axes.axis("off")
    for axes, (setting, group) in zip(grid.flat, runs.items(), strict=False):
        if REFERENCE in runs and setting != REFERENCE:
            axes.plot(*mean_curve(runs[REFERENCE]), color="0.7", linewidth=2, linestyle="--", label=REFERENCE)
        for run in group:
            axes.plot([int(s) for s in run["held_out"]], list(run["held_out"].values()), color="#6baed6", linewidth=0.8)
        axes.plot(*mean_curve(group), color="#08519c", linewidth=2.4, label=f"mean of {len(group)}")
        axes.set_title(f"{setting}\ngap {mean_gap(group)}", fontsize=9)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower left")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out reward (ODE, fixed noise)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


FINDING = {
    "fp8_bypass": ("bypass, fixed clip band", "#b2182b"),
    "fp8_decoupled_is": ("decoupled, scored again", "#4d4d4d"),
    "fp8_bypass_auto": ("bypass, clip_ratio=auto", "#08519c"),
}
"""Settings of the README's figure: the same rollouts rounded through float8, in three modes."""


def plot_curves(
    runs: dict[str, list[dict]],
    shown: dict[str, tuple[str, str]],
    path: Path,
    *,
    unit: str = "step",
    per_step: Callable[[str], float] = lambda setting: 1,
) -> None:
    """Held-out reward of the settings of ``shown``, with their labels and colours: each seed thin, the mean of the
    seeds thick, over ``per_step(setting)`` units a step."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for setting, (label, colour) in shown.items():
        each = per_step(setting)
        for run in runs[setting]:
            places = [int(s) * each for s in run["held_out"]]
            axes.plot(places, list(run["held_out"].values()), color=colour, linewidth=0.7)
        steps, means = mean_curve(runs[setting])
        places = [step * each for step in steps]
        axes.plot(places, means, color=colour, linewidth=2.4, label=f"{label}: {means[-1]:.2f}")
    axes.set_xlabel(unit)
    axes.set_ylabel("held-out reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated; all of them if left out")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results' JSON-lines file")
    parser.add_argument("--report", action="store_true", help=f"write {PAGE.name}'s table and figure; runs nothing")
    arguments = parser.parse_args()
    arguments.settings = [name.strip() for name in arguments.settings.split(",") if name.strip()]
    if unknown := [name for name in arguments.settings if name not in SETTINGS]:
        parser.error(f"--settings: got {', '.join(unknown)}; choose from {', '.join(SETTINGS)}")
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    return arguments


def main() -> int:
    arguments = _arguments()
    study = Study(SETTINGS, COMMON, arguments.results, arguments.steps)
    failed = 0
    if not arguments.report:
        failed = run_missing(study, arguments.settings, arguments.seeds, arguments.jobs)
    runs = load(arguments.settings, arguments.results)
    if arguments.report:
        write_table(PAGE, RESULTS, table(runs))
        plot(runs, PLOT)
        if FINDING.keys() <= runs.keys():
            plot_curves(runs, FINDING, PLOT.with_name("finding.png"))
    elif runs:
        print(table(runs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
