"""Training runs of a study: a process a run, a line of a JSON-lines file a result, resumable. Shared by the studies.

A finished run is one line of the study's file and is not run again; a run that fails leaves
``<setting>_seed<k>.error.txt`` beside that file with the end of its output, the others go on, and the next call tries
it again. The tables in ``docs/`` are made from the file: ``write_table``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from machine import describe

from flowgrpo_rc.trainer.timer import TRAINING_STAGES

HERE = Path(__file__).resolve().parent
CONFIG = "tiny_qwen_image_ocr"
TIMEOUT = 3 * 3600
"""Seconds after which a run is taken to hang; two of the longest runs beside the tests take more than one hour."""

_LOADING = Lock()
"""Models cannot be loaded by two threads of one process: transformers changes torch's global state meanwhile."""
GAPS = ("rollout_corr/logprob_abs_diff_mean", "actor/log_ratio_abs_mean_first")
"""Metrics in which a row has the gap; see ``summarise``."""
CURVES = (
    "rollout_sync/engine_gap_abs_mean",
    "rollout_sync/staleness_abs_mean",
    "rollout_sync/outside_clip",
    "actor/clip_ratio_auto_mean",
    "actor/rollout_rs_auto_mean",
    "actor/pg_clipfrac_first",
)
"""Metrics of which a result has every training step's value, under ``curves``, where the run logs them."""
COMMAND = ("-m", "flowgrpo_rc.cli.main")
"""The command line, as arguments to Python."""
PROGRAM = "program"
"""The key of a setting that trains with another program than the command line's; its arguments to Python."""
THROUGH = "through"
"""The key of a setting whose programs run inside another one; what comes before theirs in the arguments to Python."""

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The runs, and the place of their results."""

    settings: dict[str, Overrides]
    common: Overrides
    """Under every setting."""
    results: Path
    """The JSON-lines file of the results."""
    steps: int
    """Batches of a run; a setting may have its own ``trainer.total_training_steps``."""
    extra: Callable[[Path], dict[str, Any]] | None = None
    """More figures from a finished run's folder."""
    keep: Path | None = None
    """Folder of each run's final adapter, in a folder of the run's name; else it goes with the run's folder."""

    def overrides(self, setting: str, seed: int) -> list[str]:
        """The command line's overrides of one run, without its folder."""
        seeds = {"trainer.seed": seed, "data.seed": seed}
        values = {**self.common, **self.settings[setting], **seeds}
        values.setdefault("trainer.total_training_steps", self.steps)
        return [f"{key}={_hydra(value)}" for key, value in values.items() if key not in (PROGRAM, THROUGH)]

    def program(self, setting: str) -> list[str]:
        """The program, before ``--config-name``."""
        return self.inside(setting, self.settings[setting].get(PROGRAM, [*COMMAND, "train"]))

    def inside(self, setting: str, program: Sequence[str]) -> list[str]:
        """Arguments to Python that run ``program`` the way the setting runs its own."""
        return [*self.settings[setting].get(THROUGH, []), *program]


def study_arguments(description: str | None, settings: Iterable[str]) -> argparse.Namespace:
    """The command line of a study: ``only``, ``seeds``, ``jobs`` and ``report``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(settings), help="settings (%(default)s)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--report", action="store_true", help="write the page's table and figure; run nothing")
    return parser.parse_args()


def names(program: Sequence[str]) -> list[str]:
    """``program`` without the folders of this checkout, as a result records it."""
    return [Path(part).name for part in program]


def _hydra(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_hydra(one)}" for key, one in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def train(program: Sequence[str], overrides: Sequence[str], folder: Path) -> float:
    """Run to the end in a process of its own; returns the wall time.

    Raises:
        RuntimeError: it did not end well; the message ends with the end of its output.
    """
    command = [sys.executable, *program, "--config-name", CONFIG]
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
    lower bound. Its two parts are in ``rollout_sync/``, over the images that the probe rescores; of those figures the
    ones by timestep are left out.
    """
    steps = [r for r in rows if "reward/mean" in r]
    held_out = {int(r["step"]): r["val/reward/mean"] for r in rows if "val/reward/mean" in r}
    names = {name for r in steps for name in r if _is_kept(name)}
    means = {name: fmean(r[name] for r in steps if name in r) for name in sorted(names)}
    curves = {name: [r.get(name) for r in steps] for name in CURVES if name in names}
    seconds = [sum(r.get(f"timing_s/{stage}", 0.0) for stage in TRAINING_STAGES) for r in steps]
    updates = {}
    if "actor/kept_fraction" in means:  # a prompt writer may learn without the image model
        gaps = [next((r[n] for n in GAPS if n in r), None) for r in steps]  # a guarded run changes its mode on the way
        gap = next(n for n in GAPS if n in means)
        rejected = 1 - means["actor/kept_fraction"]
        updates = {
            "gap": fmean(value for value in gaps if value is not None),
            "gap_metric": gap,
            "gap_is_lower_bound": gap.startswith("actor/") and rejected > 0,
            "gap_curve": gaps,
            "clip_fraction": means["actor/pg_clipfrac"],
            "clip_fraction_curve": [r["actor/pg_clipfrac"] for r in steps],
            "rejected": rejected,
        }
    return {
        "held_out": held_out,
        "final_held_out": held_out[max(held_out)],
        "training": {int(r["step"]): r["reward/mean"] for r in steps},
        **updates,
        "step_seconds": fmean(seconds[1:] or seconds),  # the first step warms up
        "validation_seconds": fmean(r["timing_s/validate"] for r in rows if "timing_s/validate" in r),
        "metrics": means,
        "curves": curves,
    }


def _is_kept(name: str) -> bool:
    """True if a result has the mean of this metric over the run."""
    by_timestep = "/ts_" in name
    return name.startswith(("actor/", "rollout_corr/", "writer/")) or (
        name.startswith("rollout_sync/") and not by_timestep
    )


def run_one(study: Study, setting: str, seed: int, machine: dict) -> tuple[dict[str, Any] | None, str]:
    """Train and summarise; returns the result and a line to print.

    A run that fails has no result: what it died of is written down beside the results, not raised.
    """
    name = f"{setting}_seed{seed}"
    error_file = study.results.with_name(f"{name}.error.txt")
    overrides = study.overrides(setting, seed)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            seconds = train(study.program(setting), overrides, folder)
            figures = summarise([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
            if study.extra:
                with _LOADING:
                    figures |= study.extra(folder)
            if study.keep:
                shutil.copytree(folder / "lora", study.keep / name, dirs_exist_ok=True)
    except Exception as error:  # whatever one run died of, the others go on
        error_file.write_text(f"{name}: {type(error).__name__}: {error}\noverrides: {' '.join(overrides)}\n")
        return None, f"FAILED {name}; see {error_file}"
    program = names(study.program(setting))
    head = {"setting": setting, "seed": seed, "steps": study.steps, "program": program, "overrides": overrides}
    error_file.unlink(missing_ok=True)
    curve = " ".join(f"{value:.2f}" for value in figures["held_out"].values())
    result = {**head, **figures, "wall_seconds": seconds, "machine": machine}
    gap = f"  gap {figures['gap']:.1e}" if "gap" in figures else ""
    return result, f"{name}: held out {curve}{gap}  {seconds:.0f} s"


def write_results(path: Path, results: Iterable[dict[str, Any]]) -> None:
    """Write the whole file, sorted by setting and seed: an interruption leaves the file as it was."""
    ordered = sorted(results, key=lambda result: (result["setting"], result["seed"]))
    lines = [json.dumps(result) + "\n" for result in ordered]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines))
    partial.replace(path)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Every finished run of a study's file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def pending(study: Study, settings: Iterable[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """The runs that have no result yet, seed by seed so that an interrupted study covers all settings.

    Raises:
        ValueError: a result was made with other overrides, so it must not stand for this study.
    """
    done = {(result["setting"], result["seed"]): result for result in read_results(study.results)}
    todo = []
    for seed, setting in ((seed, setting) for seed in seeds for setting in settings):
        if (setting, seed) not in done:
            todo.append((setting, seed))
        elif done[setting, seed]["overrides"] != study.overrides(setting, seed):
            raise ValueError(
                f"{study.results}: {setting} with seed {seed} was made with other overrides; remove its line, or give "
                "another --results"
            )
    return todo


def run_missing(study: Study, settings: Sequence[str], seeds: Sequence[int], jobs: int) -> int:
    """Run what has no result yet; returns how many failed. Ends the program where a result is not of this study."""
    try:
        todo = pending(study, settings, seeds)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{len(todo)} of {len(settings) * len(seeds)} runs to do, {jobs} at a time", flush=True)
    return run_all(study, todo, jobs) if todo else 0


def run_all(study: Study, todo: Sequence[tuple[str, int]], jobs: int) -> int:
    """Run ``jobs`` at a time; returns how many failed."""
    study.results.parent.mkdir(parents=True, exist_ok=True)
    machine = {**describe(), "jobs": jobs, "threads_per_job": 1}
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_one, study, setting, seed, machine) for setting, seed in todo]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                result, line = future.result()
                if result is None:
                    failed += 1
                else:
                    write_results(study.results, [*read_results(study.results), result])
                print(f"[{count}/{len(todo)}] {line}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def load(settings: Iterable[str], results: Path) -> dict[str, list[dict]]:
    """Finished runs by setting, in the given order, by seed; settings without one are left out."""
    finished = read_results(results)
    runs = {setting: [run for run in finished if run["setting"] == setting] for setting in settings}
    return {setting: sorted(group, key=lambda run: run["seed"]) for setting, group in runs.items() if group}


def by_seed(curves: Iterable[Iterable[float]]) -> str:
    """A curve for each seed, as ``.75 .81; .74 .82``."""
    return "; ".join(" ".join(f"{value:.2f}".lstrip("0") for value in curve) for curve in curves)


def study_main(description: str | None, study: Study, page: Path, table: Callable[[dict[str, list[dict]]], str]) -> int:
    """The command line of a study with one table: runs what is missing and prints it, or writes it into the page.

    Returns the exit code.
    """
    arguments = study_arguments(description, study.settings)
    if arguments.report:
        write_table(page, study.results, table(load(study.settings, study.results)))
        return 0
    failed = run_missing(study, arguments.only, arguments.seeds, arguments.jobs)
    print(table(load(study.settings, study.results)))
    return 1 if failed else 0


TABLE_BEGINS = "<!-- table of {} -->\n"
TABLE_ENDS = "<!-- end of the table -->"
"""Comments around a generated table in a page; the name is that of the results' file."""


def write_table(page: Path, results: Path, table: str) -> None:
    """Put ``table`` in the place of the page's table of ``results`` (or of a script that makes another one of them).

    Raises:
        ValueError: the page has no such place.
    """
    begins = TABLE_BEGINS.format(results.name)
    text = page.read_text()
    if begins not in text:
        raise ValueError(f"{page} has no line {begins.strip()!r}, after which the table would stand")
    before, _, rest = text.partition(begins)
    after = rest[rest.index(TABLE_ENDS) :]
    page.write_text(f"{before}{begins}\n{table}\n\n{after}")
