"""What the rollout/training gap does to learning, and what each correction does about it: tiny model, several seeds.

    python benchmarks/learning.py --jobs 2 --seeds 1,2,3           # runs what is missing, then prints the table
    python benchmarks/learning.py --table --plot                   # reports what is there; runs nothing

Every setting of ``SETTINGS`` trains the demo's model with the command line's ``train``, a process a run, one thread
each. A finished run is one JSON file in ``benchmarks/results/learning`` and is not run again; a run that fails leaves
``<setting>_seed<k>.error.txt`` with the end of its output, the others go on, and the next call tries it again.
To add a setting, add an entry to ``SETTINGS``; it is laid over ``COMMON``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "learning"
PLOT = HERE.parent / "docs" / "images" / "learning.png"
CONFIG = "tiny_qwen_image_ocr"
TIMEOUT = 3600
REFERENCE = "float32_bypass"
"""The setting without a gap; drawn in grey behind all others."""
STAGES = ("rollout", "probe", "reward", "advantage", "score", "correct", "update", "sync")
"""What counts as a step's time: validation, logging and saving do not."""

Overrides = dict[str, Any]
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
FP8: Overrides = {f"{ROLLOUT}.quantization": "fp8"}
AUTO: Overrides = {f"{LOSS}.clip_ratio": "auto"}
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


# ---------------------------------------------------------------------- running


def overrides_of(setting: str, seed: int, steps: int) -> list[str]:
    """The command line's overrides of one run, without its folder."""
    seeds = {"trainer.seed": seed, "data.seed": seed}
    values = {**COMMON, **SETTINGS[setting], **seeds, "trainer.total_training_steps": steps}
    return [f"{key}={_hydra(value)}" for key, value in values.items()]


def _hydra(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


def train(overrides: Sequence[str], folder: Path) -> float:
    """Run to the end in a process of its own; returns the wall time.

    Raises:
        RuntimeError: it did not end well; the message ends with the end of its output.
    """
    command = [sys.executable, "-m", "flowgrpo_rc.cli.main", "train", "--config-name", CONFIG]
    command += [f"trainer.default_local_dir={folder}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=HERE.parent,  # this checkout's package, wherever the script is called from
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"stopped after {TIMEOUT} s\n{_tail(error.output)}") from error
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{_tail(done.stdout)}")
    return time.perf_counter() - start


def _tail(output: str | bytes | None, lines: int = 40) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.splitlines()[-lines:])


def summarise(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A run's figures from its ``metrics.jsonl``; means are over its training steps.

    ``gap`` is the mean of ``|log pi_train - log pi_rollout|``: of the recomputed old policy (decoupled), or of the
    first mini-step, before the adapter has moved (bypass). Rejected steps count as 0 in the latter, which makes it a
    lower bound.
    """
    steps = [r for r in rows if "reward/mean" in r]
    held_out = {int(r["step"]): r["val/reward/mean"] for r in rows if "val/reward/mean" in r}
    names = {name for r in steps for name in r if name.startswith(("actor/", "rollout_corr/"))}
    means = {name: fmean(r[name] for r in steps if name in r) for name in sorted(names)}
    seconds = [sum(r.get(f"timing_s/{stage}", 0.0) for stage in STAGES) for r in steps]
    gap = next(n for n in ("rollout_corr/logprob_abs_diff_mean", "actor/log_ratio_abs_mean_first") if n in means)
    rejected = 1 - means["actor/kept_fraction"]
    return {
        "held_out": held_out,
        "final_held_out": held_out[max(held_out)],
        "training": {int(r["step"]): r["reward/mean"] for r in steps},
        "gap": means[gap],
        "gap_metric": gap,
        "gap_is_lower_bound": gap.startswith("actor/") and rejected > 0,
        "gap_curve": [r[gap] for r in steps],
        "clip_fraction": means["actor/pg_clipfrac"],
        "clip_fraction_curve": [r["actor/pg_clipfrac"] for r in steps],
        "rejected": rejected,
        "step_seconds": fmean(seconds[1:] or seconds),  # the first step warms up
        "validation_seconds": fmean(r["timing_s/validate"] for r in rows if "timing_s/validate" in r),
        "metrics": means,
    }


def run_one(setting: str, seed: int, steps: int, results: Path, machine: dict) -> str:
    """Train, summarise, write; returns a line to print. Failures are written down, not raised."""
    name = f"{setting}_seed{seed}"
    error_file = results / f"{name}.error.txt"
    overrides = overrides_of(setting, seed, steps)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            seconds = train(overrides, Path(scratch) / "run")
            lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
        figures = summarise([json.loads(line) for line in lines])
    except Exception as error:  # whatever one run died of, the others go on
        error_file.write_text(f"{name}: {type(error).__name__}: {error}\noverrides: {' '.join(overrides)}\n")
        return f"FAILED {name}; see {error_file}"
    head = {"setting": setting, "seed": seed, "steps": steps, "overrides": overrides}
    _write(results / f"{name}.json", {**head, **figures, "wall_seconds": seconds, "machine": machine})
    error_file.unlink(missing_ok=True)
    return f"{name}: held out {_curve(figures['held_out'])}  gap {figures['gap']:.1e}  {seconds:.0f} s"


def _write(path: Path, content: dict) -> None:
    """Whole or not at all: an interrupted run must not look finished."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)


def _curve(held_out: dict[int, float]) -> str:
    return " ".join(f"{value:.2f}" for value in held_out.values())


def pending(settings: Iterable[str], seeds: Sequence[int], steps: int, results: Path) -> list[tuple[str, int]]:
    """The runs that have no result yet, seed by seed so that an interrupted study covers all settings.

    Raises:
        ValueError: a result was made with other overrides, so it must not stand for this study.
    """
    todo = []
    for seed, setting in ((seed, setting) for seed in seeds for setting in settings):
        path = results / f"{setting}_seed{seed}.json"
        if not path.is_file():
            todo.append((setting, seed))
        elif json.loads(path.read_text())["overrides"] != overrides_of(setting, seed, steps):
            raise ValueError(f"{path}: was made with other overrides; remove it, or give another --results")
    return todo


def run_all(todo: Sequence[tuple[str, int]], steps: int, jobs: int, results: Path) -> int:
    """Run ``jobs`` at a time; returns how many failed."""
    from machine import describe

    results.mkdir(parents=True, exist_ok=True)
    machine, failed = {**describe(), "jobs": jobs, "threads_per_job": 1}, 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_one, setting, seed, steps, results, machine) for setting, seed in todo]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                line = future.result()
                failed += line.startswith("FAILED")
                print(f"[{count}/{len(todo)}] {line}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


# ---------------------------------------------------------------------- reporting


def load(settings: Iterable[str], results: Path) -> dict[str, list[dict]]:
    """Finished runs by setting, in the given order, by seed; settings without one are left out."""
    files = {s: sorted(results.glob(f"{s}_seed*.json")) for s in settings}
    runs = {s: [json.loads(f.read_text()) for f in paths] for s, paths in files.items() if paths}
    return {s: sorted(group, key=lambda run: run["seed"]) for s, group in runs.items()}


def table(runs: dict[str, list[dict]]) -> str:
    """Markdown: a row a setting, means over its seeds."""
    seeds = sorted({run["seed"] for group in runs.values() for run in group})
    heads = ["setting", *(f"seed {s}" for s in seeds), "mean", "gap", "clip fraction", "rejected", "s/step"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for setting, group in runs.items():
        final = {run["seed"]: run["final_held_out"] for run in group}
        mean = {key: fmean(run[key] for run in group) for key in ("clip_fraction", "rejected", "step_seconds")}
        cells = [
            f"`{setting}`",
            *(f"{final[s]:.3f}" if s in final else "" for s in seeds),
            f"**{fmean(final.values()):.3f}**",
            _gap(group),
            f"{mean['clip_fraction']:.2f}",
            f"{mean['rejected']:.2f}",
            f"{mean['step_seconds']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gap(group: Sequence[dict]) -> str:
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
        axes.set_title(f"{setting}\ngap {_gap(group)}", fontsize=9)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower left")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out reward (ODE, fixed noise)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated; all of them if left out")
    parser.add_argument("--seeds", default="1,2", help="comma-separated (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--table", action="store_true", help="print the Markdown table; runs nothing")
    parser.add_argument("--plot", type=Path, nargs="?", const=PLOT, help="draw the curves (%(const)s); runs nothing")
    arguments = parser.parse_args()
    arguments.settings = [name.strip() for name in arguments.settings.split(",") if name.strip()]
    if unknown := [name for name in arguments.settings if name not in SETTINGS]:
        parser.error(f"--settings: got {', '.join(unknown)}; choose from {', '.join(SETTINGS)}")
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    return arguments


def main() -> int:
    arguments = _arguments()
    failed = 0
    if not (arguments.table or arguments.plot):
        try:
            todo = pending(arguments.settings, arguments.seeds, arguments.steps, arguments.results)
        except ValueError as error:
            sys.exit(f"error: {error}")
        total = len(arguments.settings) * len(arguments.seeds)
        print(f"{len(todo)} of {total} runs to do, {arguments.jobs} at a time", flush=True)
        failed = run_all(todo, arguments.steps, arguments.jobs, arguments.results) if todo else 0
    runs = load(arguments.settings, arguments.results)
    if runs and (arguments.table or not arguments.plot):
        print(table(runs))
    if runs and arguments.plot:
        plot(runs, arguments.plot)
        print(arguments.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
