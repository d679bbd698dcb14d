"""The gap study: rollout precision x staleness x mode x clip, on the demo's model, several seeds.

    python benchmarks/gap_study.py --jobs 2                          # what is missing of the whole grid, seed 1
    python benchmarks/gap_study.py --only fp8_stale0 --seeds 1,2,3   # settings whose name holds one of these texts
    python benchmarks/gap_study.py --verdicts                       # `flowgrpo-rc probe` on all settings with a result
    python benchmarks/gap_study.py --report                        # writes the table and the figure; runs nothing

A setting's name says what it is: ``fp8_stale2_bypass_1e-3`` samples with fp8-rounded weights and an adapter that is two
optimizer steps old, in bypass mode with a clip of 1e-3. Beside the grid stand a few settings of the objectives that
compare transition means. Resumable, as ``training_runs.py`` says. After each run a second OCR engine reads the
adapter's images (``second_ocr.py``; tesseract must be installed).
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from learning import COMMON, LOSS, RC, ROLLOUT, correction
from machine import describe
from training_runs import (
    COMMAND,
    CONFIG,
    HERE,
    PROGRAM,
    THROUGH,
    Overrides,
    Study,
    load,
    names,
    read_results,
    run_missing,
    write_results,
    write_table,
)

RESULTS = HERE / "results" / "gap_study.jsonl"
PAGE = HERE.parent / "docs" / "gap_study.md"
PLOT = HERE.parent / "docs" / "images" / "gap_study.png"
FIXED_BAND = "0.999_1.001"
"""Of the rejection that does not follow the gap; for ``seq_mean_k1``."""
WITHOUT_A_GAP = 1e-3
"""The clip that serves this model best where there is no gap: the lower bound of a calibrated one."""
SECOND_OCR_EACH = 6
"""Images of every held-out number that the second engine reads."""

ALTERNATIVES = str(HERE / "clip_alternatives.py")
FLOAT16 = str(HERE / "float16_on_cpu.py")

PRECISIONS: dict[str, Overrides] = {
    "float32": {f"{ROLLOUT}.dtype": "float32"},
    "bfloat16": {f"{ROLLOUT}.dtype": "bfloat16"},
    "float16": {f"{ROLLOUT}.dtype": "float16", THROUGH: [FLOAT16]},
    "fp8": {f"{ROLLOUT}.dtype": "bfloat16", f"{ROLLOUT}.quantization": "fp8_emulated"},
}
STALENESS: dict[int, int] = {0: 0, 2: 1, 4: 2, 8: 4}
"""Age of the rollout's adapter in optimizer steps, and in batches of two of them."""
GRID = (0, 2, 8)
"""Ages of which the grid has every precision and mode."""
CLIPS = ("1e-4", "1e-3", "1e-2")
DECOUPLED = correction(bypass=False, weights="sequence")
DECOUPLED_RS = {**correction(bypass=False, weights="sequence", band=FIXED_BAND), f"{LOSS}.clip_ratio": WITHOUT_A_GAP}
BYPASS = correction(bypass=True)
BYPASS_RS = correction(bypass=True, band=FIXED_BAND)
CALIBRATED: Overrides = {f"{LOSS}.clip_ratio": "auto", f"{LOSS}.auto_clip_min": WITHOUT_A_GAP}
CALIBRATED_RS: Overrides = {f"{RC}.rollout_rs_threshold": "auto"}
REINFORCE = correction(bypass=True, weights="sequence", loss="reinforce")
REINFORCE_RS = correction(bypass=True, weights="sequence", loss="reinforce", band=FIXED_BAND)

MODES: dict[str, Overrides] = {
    **{f"decoupled_{c}": {**DECOUPLED, f"{LOSS}.clip_ratio": float(c)} for c in CLIPS},
    "decoupled_rs_1e-3": DECOUPLED_RS,
    "decoupled_rs_auto": {**DECOUPLED_RS, **CALIBRATED_RS},
    **{f"bypass_{c}": {**BYPASS, f"{LOSS}.clip_ratio": float(c)} for c in CLIPS},
    "bypass_auto": {**BYPASS, **CALIBRATED},
    **{f"bypass_rs_{c}": {**BYPASS_RS, f"{LOSS}.clip_ratio": float(c)} for c in CLIPS},
    "bypass_rs_auto": {**BYPASS_RS, **CALIBRATED, **CALIBRATED_RS},
    "guarded_1e-3": {**BYPASS, f"{LOSS}.clip_ratio": 1e-3, f"{RC}.guard": "fallback"},
    "centred_1e-3": {**BYPASS, f"{LOSS}.clip_ratio": 1e-3, PROGRAM: [ALTERNATIVES, "centred"]},
    "first_free_1e-3": {**correction(bypass=False), f"{LOSS}.clip_ratio": 1e-3, PROGRAM: [ALTERNATIVES, "first_free"]},
    "reinforce": REINFORCE,
    "reinforce_rs": REINFORCE_RS,
    "reinforce_rs_auto": {**REINFORCE_RS, **CALIBRATED_RS},
}


def _guard(mode: Overrides, clip: float) -> Overrides:
    return {**mode, f"{LOSS}.loss_mode": "grpo_guard", f"{LOSS}.clip_ratio": clip}


def _dppo(mode: Overrides, threshold: float) -> Overrides:
    return {**mode, f"{LOSS}.loss_mode": DPPO, f"{LOSS}.kl_mask_threshold": threshold}


DPPO = "flow_dppo"
OBJECTIVES: dict[str, dict[str, Overrides]] = {
    "fp8": {
        "decoupled_grpo_guard_1e-4": _guard(DECOUPLED, 1e-4),
        "bypass_grpo_guard_1e-4": _guard(BYPASS, 1e-4),
        "bypass_grpo_guard_1e-2": _guard(BYPASS, 1e-2),
        "decoupled_flow_dppo_1e-5": _dppo(DECOUPLED, 1e-5),
        "bypass_flow_dppo_1e-5": _dppo(BYPASS, 1e-5),
        "bypass_flow_dppo_1e-2": _dppo(BYPASS, 1e-2),
    },
    "bfloat16": {
        "bypass_grpo_guard_1e-4": _guard(BYPASS, 1e-4),
        "bypass_flow_dppo_1e-5": _dppo(BYPASS, 1e-5),
    },
}
"""By precision, without a lag; the number is ``clip_ratio``, or ``flow_dppo``'s ``kl_mask_threshold``."""

BETWEEN: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("float32", "bfloat16", "fp8"),
    ("decoupled_1e-3", "decoupled_rs_auto", "bypass_1e-3", "bypass_auto"),
)
"""Modes by precision at the ages that are not in the grid."""
STEADY: Overrides = {
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
}
"""The mean of the grid's learning rate, which falls from 1e-3 to 0, throughout."""


def modes(precision: str, age: int) -> dict[str, Overrides]:
    """The modes of a precision's settings with an adapter of this age, without precision and lag."""
    if age not in GRID:
        return {mode: MODES[mode] for mode in BETWEEN.get(precision, ())}
    return {**MODES, **(OBJECTIVES.get(precision, {}) if age == 0 else {})}


SETTINGS: dict[str, Overrides] = {
    f"{precision}_stale{age}_{mode}": {**overrides, **PRECISIONS[precision], f"{ROLLOUT}.adapter_lag": lag}
    for age, lag in STALENESS.items()
    for precision in PRECISIONS
    for mode, overrides in modes(precision, age).items()
}
SETTINGS["bfloat16_stale8_bypass_1e-3_steady"] = {**SETTINGS["bfloat16_stale8_bypass_1e-3"], **STEADY}


def second_engine(folder: Path) -> dict[str, Any]:
    """Readings of both OCR engines in the finished run's images, drawn in float32."""
    script = [sys.executable, str(HERE / "second_ocr.py"), "--held-out", "--each", str(SECOND_OCR_EACH)]
    command = [*script, "--lora", str(folder / "lora")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"second_ocr.py: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return {"second_ocr": json.loads(done.stdout.splitlines()[-1])}


# ---------------------------------------------------------------------- reporting

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 15: 2.131, 20: 2.086, 30: 2.042}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; between two entries the lower one's."""


@dataclass(frozen=True)
class Noise:
    """Standard deviation between seeds within a setting, pooled over all settings, with its degrees of freedom."""

    deviation: float
    freedom: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> "Noise":
        """From groups of one value a seed; NaN where no setting has two."""
        several = [group for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in several)
        total = sum(stdev(group) ** 2 * (len(group) - 1) for group in several)
        return cls(math.sqrt(total / freedom) if freedom else math.nan, freedom)

    def half_width(self, count: int) -> float:
        """Of the 95 % confidence interval of a mean over ``count`` seeds."""
        t = T_95[max(known for known in T_95 if known <= self.freedom)]
        return t * self.deviation / math.sqrt(count)

    def interval(self, values: Sequence[float]) -> str:
        """Mean with half the width of its interval: from all settings' deviation, or from its own if that is wider.

        Seeds scatter more where a setting is on the verge of collapsing.
        """
        mean = f"{fmean(values):.2f}"
        if not self.freedom:
            return mean
        own = Noise.of([values])
        widths = [noise.half_width(len(values)) for noise in (self, own) if noise.freedom]
        return f"{mean} ±{max(widths):.2f}"


def verdicts_of(results: Path, *, end: bool = False) -> Path:
    """The JSON-lines file of the probe's verdicts beside one of results, before training or at its end."""
    return results.with_name(f"{results.stem}_verdicts{'_end' if end else ''}.jsonl")


def read_verdicts(results: Path, *, end: bool = False) -> dict[str, dict[str, Any]]:
    """The verdicts by setting; none where there is no file yet."""
    return {verdict["setting"]: verdict for verdict in read_results(verdicts_of(results, end=end))}


def probed(study: Study, settings: Sequence[str], *, end: bool = False) -> dict[str, dict[str, Any]]:
    """What ``flowgrpo-rc probe`` says of each setting before training; none for alternatives, which it cannot know, and
    none with a lag, of which it sees the engine's half alone. With ``end`` it is of the adapter that ``study.keep`` has
    of seed 1, where it has one."""
    found = read_verdicts(study.results, end=end)
    commit = describe()["commit"]
    for setting in settings:
        adapter = study.keep / f"{setting}_seed1" if end and study.keep else None
        if adapter is not None and not adapter.is_dir():
            continue
        trained = [f"actor_rollout_ref.model.lora_adapter_path={adapter}"] if adapter else []
        program = study.inside(setting, [*COMMAND, "probe"])
        overrides = study.overrides(setting, seed=1)
        of = {"program": names(program), "of": overrides}
        known = found.get(setting, {})
        lags = study.settings[setting].get(f"{ROLLOUT}.adapter_lag", 0) > 0
        if lags or PROGRAM in study.settings[setting] or ("verdict" in known and known.items() >= of.items()):
            continue
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run(
                [sys.executable, *program, "--config-name", CONFIG, "--out", out, *overrides, *trained],
                cwd=HERE.parent,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=600,
            )
            if done.returncode not in (0, 3, 4):
                raise RuntimeError(f"probe of {setting}: exit code {done.returncode}\n{done.stderr[-2000:]}")
            probe = json.loads((Path(out) / "probe.json").read_text())
        found[setting] = {"setting": setting, "seed": 1, **verdict_of(probe), **of, "commit": commit}
        write_results(verdicts_of(study.results, end=end), found.values())
        print(f"{setting}: {found[setting]['verdict']}", flush=True)
    return found


def verdict_of(probe: dict[str, Any]) -> dict[str, Any]:
    """The part of a ``probe.json`` that is kept."""
    kept: dict[str, Any] = {"verdict": probe["advice"]["verdict"], "images": probe["images"]}
    for share in ("clipped", "rejected"):
        interval = probe["overall"][f"{share}_interval"]
        kept |= {share: probe["overall"][share], f"{share}_interval": [interval["low"], interval["high"]]}
    if probe["drift"] is not None:
        interval = probe["drift"]["interval"]
        kept |= {"drift": probe["drift"]["value"], "drift_interval": [interval["low"], interval["high"]]}
        kept["cosine"] = probe["drift"]["cosine"]
    return kept


VERDICT_CELLS = {"safe": "safe", "not shown safe": "*not shown safe*", "not safe": "**not safe**", None: ""}
"""The probe's verdicts as tables write them; ``None``: there is none."""


def marked(cell: str, verdict: str | None) -> str:
    """A cell in the type of its verdict: bold where not safe, italic where not shown safe."""
    star = {"not safe": "**", "not shown safe": "*"}.get(verdict or "", "")
    return f"{star}{cell}{star}"


def table(runs: dict[str, list[dict]], verdicts: dict[str, dict[str, Any]]) -> str:
    """Markdown: a table of modes and precisions with the ages of the grid in each cell, and one of each further age.

    Rewards are those of the last validation, in the type of their verdict (``marked``), with an interval if there are
    several seeds. Every other figure of a run is in ``RESULTS``.
    """
    rewards = {setting: [run["final_held_out"] for run in group] for setting, group in runs.items()}
    noise = Noise.of(list(rewards.values()))

    def cell(setting: str) -> str:
        values = rewards.get(setting, [])
        if len(values) < 2:
            text = f"{values[0]:.2f}" if values else "-"
        else:
            text = f"{noise.interval(values)} ({len(values)})"
        return marked(text, verdicts.get(setting, {}).get("verdict"))

    lines = []
    for ages in (GRID, *((age,) for age in STALENESS if age not in GRID)):
        known = [setting for setting in runs if any(f"_stale{age}_" in setting for age in ages)]
        lines += ["", f"Adapter {', '.join(map(str, ages))} optimizer steps old:", ""]
        lines += [f"| mode and clip | {' | '.join(PRECISIONS)} |", f"|{'---|' * (1 + len(PRECISIONS))}"]
        for mode in dict.fromkeys(re.sub(r"^[a-z0-9]+_stale\d+_", "", setting) for setting in known):
            cells = [[cell(f"{precision}_stale{age}_{mode}") for age in ages] for precision in PRECISIONS]
            texts = ["" if set(several) == {"-"} else ", ".join(several) for several in cells]
            lines.append(f"| `{mode}` | {' | '.join(texts)} |")
    if noise.freedom:
        deviation = f"Deviation between seeds: {noise.deviation:.3f} ({noise.freedom} degrees of freedom)"
        lines += ["", f"{deviation}; interval of a single seed: ±{noise.half_width(1):.2f}"]
    return "\n".join(lines[1:])


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """A panel for each precision and age of the grid: final held-out reward of every seed by mode, coloured by clip."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    colours = {"1e-4": "#c53030", "1e-3": "#dd6b20", "1e-2": "#2b6cb0", "auto": "#2f855a", "": "#4a5568"}
    names = list(dict.fromkeys(split_mode(mode)[0] for mode in MODES))
    figure, grid = plt.subplots(
        len(PRECISIONS), len(GRID), figsize=(11, 10.5), sharex=True, sharey=True, layout="constrained"
    )
    for row, precision in enumerate(PRECISIONS):
        for column, age in enumerate(GRID):
            axes = grid[row][column]
            prefix = f"{precision}_stale{age}_"
            for setting, group in runs.items():
                if setting.removeprefix(prefix) not in MODES:
                    continue
                mode, clip = split_mode(setting.removeprefix(prefix))
                place = names.index(mode) + (list(colours).index(clip) - 1.5) * 0.17 * (clip != "")
                values = [run["final_held_out"] for run in group]
                axes.plot([place] * len(values), values, "o", color=colours[clip], markersize=4, alpha=0.7)
                axes.plot([place - 0.07, place + 0.07], [fmean(values)] * 2, color=colours[clip], linewidth=2.5)
            start = [run["held_out"]["0"] for s, group in runs.items() if s.startswith(prefix) for run in group]
            if start:
                axes.axhline(fmean(start), color="0.6", linestyle="--", linewidth=1)
            axes.set_title(f"{precision} rollouts, adapter {age} updates old", fontsize=9)
            axes.set_xticks(range(len(names)), names, fontsize=8, rotation=35, ha="right", rotation_mode="anchor")
            if not start:
                axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="0.6")
            axes.set_xlim(-0.6, len(names) - 0.4)
            axes.grid(axis="y", alpha=0.3)
    grid[0][0].set_ylim(0.1, 0.9)
    marks = [plt.Line2D([], [], color=c, marker="o", linewidth=0, label=n or "no clip") for n, c in colours.items()]
    marks.append(plt.Line2D([], [], color="0.6", linestyle="--", label="before training"))
    figure.legend(
        handles=marks, loc="outside lower center", ncols=6, title="clip_ratio (auto: calibrated bands)", fontsize=8
    )
    figure.supylabel("held-out reward after training (ODE, fixed noise)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def split_mode(mode: str) -> tuple[str, str]:
    """``bypass_rs_1e-3`` as ``("bypass_rs", "1e-3")``; without a clip or calibrated band the second is empty."""
    name, _, clip = mode.rpartition("_")
    return (name, clip) if clip in (*CLIPS, "auto") else (mode, "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated texts; settings whose name holds one of them")
    parser.add_argument("--seeds", default="1", help="comma-separated (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results' JSON-lines file")
    parser.add_argument("--verdicts", action="store_true", help="run the probe on every setting with a result")
    parser.add_argument("--report", action="store_true", help=f"write {PAGE.name} and its figure; runs nothing")
    arguments = parser.parse_args()
    texts = [text for text in arguments.only.split(",") if text] or [""]
    arguments.settings = [name for name in SETTINGS if any(text in name for text in texts)]
    if not arguments.settings:
        parser.error(f"--only: no setting's name holds {arguments.only}; one is {next(iter(SETTINGS))}")
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    return arguments


def main() -> int:
    arguments = _arguments()
    failed = 0
    study = Study(SETTINGS, COMMON, arguments.results, arguments.steps, second_engine)
    if arguments.verdicts:
        probed(study, list(load(arguments.settings, arguments.results)))
    elif not arguments.report:
        failed = run_missing(study, arguments.settings, arguments.seeds, arguments.jobs)
    runs = load(arguments.settings, arguments.results)
    verdicts = read_verdicts(arguments.results)
    if arguments.report:
        write_table(PAGE, RESULTS, table(runs, verdicts))
        plot(runs, PLOT)
    elif runs:
        print(table(runs, verdicts))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
