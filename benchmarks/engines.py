"""The same training run with either rollout engine, in float32 and in bfloat16: tiny model, CPU.

    nice .venv-vllm/bin/python benchmarks/engines.py       # writes results/engines.json and docs/images/engines.png
    python benchmarks/engines.py --plot                    # draws what is there; runs nothing

In the environment of ``make vllm``. The demo's settings, its rewards read by OCR; each run is a process of its own
with one thread, one after the other, so what differs between two runs of a precision is the engine.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from machine import describe
from training_runs import train

from flowgrpo_rc.trainer.timer import TRAINING_STAGES

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "engines.json"
PLOT = HERE.parent / "docs" / "images" / "engines.png"
ENGINES = ("diffusers", "vllm_omni")
DTYPES = ("float32", "bfloat16")
PROGRAM = ("-m", "flowgrpo_rc.cli.main", "train")
CURVES = {
    "reward": "reward/mean",
    "gap": "rollout_sync/engine_gap_abs_mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
}
"""Metrics that are kept of every step; the gap is between engine and actor under the same weights."""
COMMON = (
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.log_val_generations=0",
    "trainer.resume_mode=disable",
    "trainer.device=cpu",
    "reward.ocr.num_threads=1",
)


def overrides_of(engine: str, dtype: str, seed: int, steps: int) -> list[str]:
    """The command line's overrides of one run, without its folder."""
    own = (f"actor_rollout_ref.rollout.name={engine}", f"actor_rollout_ref.rollout.dtype={dtype}")
    return [*COMMON, *own, f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.total_training_steps={steps}"]


def run(engine: str, dtype: str, seed: int, steps: int) -> dict[str, Any]:
    """Train; the curves, a step's time and the command's overrides.

    Raises:
        RuntimeError: the run did not end well.
    """
    overrides = overrides_of(engine, dtype, seed, steps)
    with tempfile.TemporaryDirectory() as scratch:
        seconds = train(PROGRAM, overrides, Path(scratch) / "run")
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward/mean" in row]
    times = [sum(row.get(f"timing_s/{stage}", 0.0) for stage in TRAINING_STAGES) for row in rows]
    curves = {name: [row[metric] for row in rows] for name, metric in CURVES.items()}
    timing = {
        "step_seconds_median": median(times),
        "rollout_seconds_median": median(row["timing_s/rollout"] for row in rows),
        "wall_seconds": seconds,
    }
    return {"engine": engine, "dtype": dtype, "overrides": overrides, **curves, **timing}


def compare(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per precision: how far apart the two engines' curves are, and what they vary by on their own."""
    found = {}
    for dtype in DTYPES:
        one, other = (next(r for r in runs if (r["engine"], r["dtype"]) == (engine, dtype)) for engine in ENGINES)
        differences = {
            f"{name}_largest_difference": max(abs(a - b) for a, b in zip(one[name], other[name], strict=True))
            for name in CURVES
        }
        own = {f"gap_mean_{r['engine']}": fmean(r["gap"]) for r in (one, other)}
        means = {f"reward_mean_{r['engine']}": fmean(r["reward"]) for r in (one, other)}
        found[dtype] = {**differences, "reward_std_over_steps": pstdev(one["reward"]), **own, **means}
    return found


def table(comparisons: dict[str, dict[str, float]]) -> str:
    """Markdown: a row a figure, a column a precision."""
    lines = [f"| figure | {' | '.join(DTYPES)} |", f"|{'---|' * (len(DTYPES) + 1)}"]
    for name in comparisons[DTYPES[0]]:
        lines.append(f"| {name} | {' | '.join(f'{comparisons[dtype][name]:.2g}' for dtype in DTYPES)} |")
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Rewards above, gaps below; a column a precision, both engines in each panel."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, len(DTYPES), figsize=(8, 5), sharex=True, sharey="row", layout="constrained")
    styles = {
        "diffusers": {"color": "#9ecae1", "linewidth": 5.0},
        "vllm_omni": {"color": "#d94801", "linewidth": 1.5, "marker": "."},
    }
    for column, dtype in enumerate(DTYPES):
        for run_of in (r for r in runs if r["dtype"] == dtype):
            steps = range(1, len(run_of["reward"]) + 1)
            for row, name in enumerate(("reward", "gap")):
                grid[row, column].plot(steps, run_of[name], label=run_of["engine"], **styles[run_of["engine"]])
        grid[0, column].set_title(f"rollouts in {dtype}", fontsize=10)
        grid[1, column].set_xlabel("step", fontsize=9)
    grid[0, 0].set_ylabel("training reward", fontsize=9)
    grid[1, 0].set_ylabel("engine gap, mean |log ratio|", fontsize=9)
    grid[1, 0].set_yscale("symlog", linthresh=1e-8)  # in float32 the gap may be 0
    grid[1, 0].set_ylim(bottom=-2e-9)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    grid[0, 0].legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--image", type=Path, default=PLOT)
    parser.add_argument("--plot", action="store_true", help="draw the results that are there")
    return parser.parse_args()


def main() -> None:
    """Run, write, compare, draw."""
    arguments = _arguments()
    if not arguments.plot:
        runs = []
        for dtype in DTYPES:
            for engine in ENGINES:
                runs.append(run(engine, dtype, arguments.seed, arguments.steps))
                seconds = runs[-1]["step_seconds_median"]
                print(f"{engine} {dtype}: reward {fmean(runs[-1]['reward']):.3f}  {seconds:.2f} s a step", flush=True)
        content = {"machine": describe(), "seed": arguments.seed, "comparisons": compare(runs), "runs": runs}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    content = json.loads(arguments.out.read_text())
    print(table(content["comparisons"]))
    plot(content["runs"], arguments.image)


if __name__ == "__main__":
    main()
