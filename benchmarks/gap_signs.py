"""Signs of a run's loss to the gap in bypass mode: figures of the probe before it, and metrics of the run.

    python benchmarks/gap_signs.py            # prints the two tables; runs nothing
    python benchmarks/gap_signs.py --report   # writes them into docs/gap_study.md

All settings of ``gap_study.py`` and ``gap_ground.py`` that have a result, a probe with a drift, and a twin without a
gap. For each figure: Spearman's rank correlation with what was lost against the twin, and the errors of the best
threshold on settings that it was not chosen on. One kind of setting after the other is held out (a precision, a kind of
step, a mode); the threshold that makes the fewest errors on the others judges it. An error is a setting that lost more
than ``LOST`` below the threshold, or one that lost less than ``UNHURT`` above it; those in between count for nothing.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import gap_ground
import gap_study
from gap_ground import LOST, PAGE, UNHURT, ground_of, rank_correlation
from learning import ROLLOUT
from machine import describe
from training_runs import HERE, load, write_table

OUTPUT = HERE / "results" / "gap_signs.json"

FEWEST = 5
"""No threshold is chosen on fewer settings."""

PROBED = {"drift": "drift", "share outside the clip": "clipped", "cosine": "cosine"}
"""Figures of the probe by name -> their key in a verdict. A cosine is lower where more is lost."""
LOGGED = {
    "share outside the clip in first mini-batches, which the guard watches": "actor/pg_clipfrac_first",
    "share outside the clip in all mini-batches": "actor/pg_clipfrac",
    "size of the gap": "actor/log_ratio_abs_mean_first",
    "largest ratio": "actor/ratio_max",
    "KL estimate": "actor/ppo_kl",
}
"""Means over a run of what it logs without further work."""


@dataclass(frozen=True)
class Known:
    """A setting with a result, a probe and a twin."""

    setting: str
    lost: float
    probe: dict[str, Any]
    runs: list[dict[str, Any]]
    precision: str
    step: str
    mode: str

    @property
    def counts(self) -> bool:
        """True if it lost enough, or little enough, for an error to be one."""
        return self.lost > LOST or self.lost < UNHURT

    def wrong(self, value: float, threshold: float) -> bool:
        """True if a judge with this threshold would be wrong about it."""
        return self.counts and (value > threshold) != (self.lost > LOST)


def known_settings() -> list[Known]:
    """Of both studies, in bypass mode."""
    found = []
    for study, twin_of in (
        (gap_study, lambda setting: f"float32_{setting.split('_', 1)[1]}"),
        (gap_ground, lambda setting: f"{ground_of(setting)}_{gap_ground.TWIN}"),
    ):
        runs = load(list(study.SETTINGS), study.RESULTS)
        for setting, probe in gap_study.read_verdicts(study.RESULTS).items():
            twin = runs.get(twin_of(setting))
            if "drift" not in probe or twin is None or setting not in runs or setting == twin_of(setting):
                continue
            ended = fmean(run["final_held_out"] for run in runs[setting])
            overrides = study.SETTINGS[setting]
            precision = next(name for name in gap_study.PRECISIONS if name in setting)
            found.append(
                Known(
                    setting,
                    fmean(run["final_held_out"] for run in twin) - ended,
                    probe,
                    runs[setting],
                    precision,
                    overrides.get(f"{ROLLOUT}.algo.sde_type", "sde"),
                    setting.split("bypass")[-1].rpartition("_")[0].strip("_") or "flow_grpo",
                )
            )
    return found


def best_threshold(values: Sequence[float], settings: Sequence[Known]) -> float:
    """Between two neighbouring values, the middle of the thresholds that make the fewest errors."""
    ordered = sorted(set(values))
    middles = [(low + high) / 2 for low, high in pairwise(ordered)]
    errors = [sum(one.wrong(value, middle) for value, one in zip(values, settings, strict=True)) for middle in middles]
    best = [middle for middle, count in zip(middles, errors, strict=True) if count == min(errors)]
    return (best[0] + best[-1]) / 2


def held_out_errors(values: Sequence[float], settings: Sequence[Known], kind: Callable[[Known], str]) -> str:
    """``2 of 40``: errors on each kind of setting by the threshold of the others; ``-`` where those are too few."""
    kinds = sorted({kind(one) for one in settings})
    if any(sum(kind(one) != left_out for one in settings) < FEWEST for left_out in kinds):
        return "-"
    errors = 0
    for left_out in kinds:
        inside = [place for place, one in enumerate(settings) if kind(one) != left_out]
        threshold = best_threshold([values[place] for place in inside], [settings[place] for place in inside])
        errors += sum(
            one.wrong(value, threshold) for value, one in zip(values, settings, strict=True) if kind(one) == left_out
        )
    return f"{errors} of {sum(one.counts for one in settings)}"


def rows(settings: Sequence[Known], figures: dict[str, Callable[[Known], float]]) -> list[dict[str, Any]]:
    """A row a figure: correlation, and errors by each way of holding out."""
    found = []
    for name, figure in figures.items():
        values = [figure(one) for one in settings]
        found.append(
            {
                "figure": name,
                "settings": len(settings),
                "rank correlation": round(rank_correlation(values, [one.lost for one in settings]), 2),
                "by precision": held_out_errors(values, settings, lambda one: one.precision),
                "by kind of step": held_out_errors(values, settings, lambda one: one.step),
                "by mode": held_out_errors(values, settings, lambda one: one.mode),
            }
        )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    heads = list(found[0])
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(str(row[head]) for head in heads)} |" for row in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help=f"write the tables into {PAGE.name}")
    arguments = parser.parse_args()
    settings = known_settings()
    found = rows(settings, {name: _of_probe(key) for name, key in PROBED.items() if key != "cosine"})
    with_cosine = [one for one in settings if "cosine" in one.probe]
    if with_cosine:
        found += rows(
            with_cosine, {f"{name} (where the cosine is kept)": _of_probe(key) for name, key in PROBED.items()}
        )
    found += rows(settings, {name: _of_runs(key) for name, key in LOGGED.items()})
    print(table(found))
    if arguments.report:
        OUTPUT.write_text(json.dumps({"machine": describe(), "figures": found}, indent=1) + "\n")
        write_table(PAGE, OUTPUT, table(found))


def _of_probe(key: str) -> Callable[[Known], float]:
    sign = -1.0 if key == "cosine" else 1.0
    return lambda one: sign * one.probe[key]


def _of_runs(key: str) -> Callable[[Known], float]:
    return lambda one: fmean(run["metrics"][key] for run in one.runs)


if __name__ == "__main__":
    main()
