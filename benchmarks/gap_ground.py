"""The probe on ground that it was not made on: other windows, noise levels, kinds of step and learning rates.

    python benchmarks/gap_ground.py --jobs 2            # trains what is missing of seed 1, two minutes a run and core
    python benchmarks/gap_ground.py --verdicts          # `flowgrpo-rc probe` on every setting with a result
    python benchmarks/gap_ground.py --keep outputs/ends # trains likewise, and keeps the final adapters
    python benchmarks/gap_ground.py --verdicts --from end --keep outputs/ends       # the probe on those
    python benchmarks/gap_ground.py --report            # writes the table of docs/gap_study.md; runs nothing

Each prints every setting with its drift, those whose final adapter was probed with both.

The limits of the drift were chosen on the gap study and on the settings here whose name ends in ``CHOSEN_ON``; no other
run of this file had ended then. Those of the modes ``NEW`` were used for nothing: they tell whether the probe is right
on what it was not made on. How well drift, share and other figures tell what a run lost: ``gap_signs.py``. Each
setting is held against its twin, the same ground with float32 rollouts at a clip of 1e-3: what a run lost is the twin's
final held-out reward minus its own. Resumable, as ``training_runs.py`` says: a setting that has a result is trained
again, to keep its adapter, with another ``--results``.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

from gap_study import BYPASS, DECOUPLED, PRECISIONS, VERDICT_CELLS, marked, probed, read_verdicts
from learning import COMMON, LOSS, ROLLOUT
from training_runs import HERE, Overrides, Study, load, run_missing, write_table

RESULTS = HERE / "results" / "gap_ground.jsonl"
PAGE = HERE.parent / "docs" / "gap_study.md"
STEPS = 60
RATE = 1e-3
"""The learning rate of the gap study."""

GROUNDS: dict[str, Overrides] = {
    f"{sde}_w{window}_n{noise:g}_lr{rate:g}": {
        f"{ROLLOUT}.algo.sde_type": sde,
        f"{ROLLOUT}.algo.sde_window_size": window,
        f"{ROLLOUT}.algo.noise_level": noise,
        "actor_rollout_ref.actor.optim.lr": rate,
    }
    for sde, window, noise, rate in (
        ("sde", 1, 0.7, RATE),
        ("sde", 3, 0.7, RATE),
        ("sde", 4, 0.7, RATE),
        ("sde", 2, 0.4, RATE),
        ("sde", 2, 1.0, RATE),
        ("sde", 2, 1.2, RATE),
        ("sde", 2, 0.7, 5e-4),
        ("sde", 2, 0.7, 2e-3),
        ("dance_sde", 2, 0.4, RATE),
        ("dance_sde", 2, 0.7, RATE),
        ("cps", 2, 0.7, RATE),
        ("cps", 2, 1.0, RATE),
    )
}
"""By kind of step, size of the window, noise level and learning rate."""

TWIN = "float32_bypass_1e-3"
MODES: dict[str, Overrides] = {
    f"{precision}_bypass_{clip}": {**BYPASS, f"{LOSS}.clip_ratio": float(clip), **PRECISIONS[precision]}
    for precision, clip in (
        ("float32", "1e-3"),
        ("fp8", "2e-3"),
        ("bfloat16", "2e-4"),
        ("fp8", "1e-3"),
        ("fp8", "5e-4"),
        ("bfloat16", "3e-4"),
        ("fp8", "3e-3"),
        ("fp8", "1.5e-3"),
        ("bfloat16", "5e-4"),
    )
}
COLUMNS = (
    *(("fp8", clip) for clip in ("3e-3", "2e-3", "1.5e-3", "1e-3", "5e-4")),
    *(("bfloat16", clip) for clip in ("5e-4", "3e-4", "2e-4")),
)
"""Of the page's table: precision and clip in bypass mode."""
DECOUPLED_GROUNDS = ("sde_w4_n0.7_lr0.001", "dance_sde_w2_n0.7_lr0.001", "cps_w2_n0.7_lr0.001")
"""Settings with which decoupled mode is tried too."""

SETTINGS: dict[str, Overrides] = {
    f"{ground}_{mode}": {**overrides, **GROUNDS[ground]} for mode, overrides in MODES.items() for ground in GROUNDS
} | {
    f"{ground}_fp8_decoupled_1e-3": {**DECOUPLED, f"{LOSS}.clip_ratio": 1e-3, **PRECISIONS["fp8"], **GROUNDS[ground]}
    for ground in DECOUPLED_GROUNDS
}

CHOSEN_ON = "fp8_bypass_2e-3"
"""The mode whose runs had ended when the limits were chosen."""
NEW = ("fp8_bypass_3e-3", "fp8_bypass_1.5e-3", "bfloat16_bypass_5e-4")
"""The modes of which no run had ended when the judge was settled."""

LOST = 0.08
"""A setting that loses more than this against its twin must not be called safe."""
UNHURT = 0.03
"""One that loses less than this should not be called not safe; it is the noise of a single run."""


def ground_of(setting: str) -> str:
    """The part of a setting's name that its twin shares."""
    return next(ground for ground in GROUNDS if setting.startswith(f"{ground}_"))


def rows(runs: dict[str, list[dict[str, Any]]], verdicts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """``judged_rows`` of this study."""
    return judged_rows(runs, verdicts, lambda setting: f"{ground_of(setting)}_{TWIN}")


def judged_rows(
    runs: dict[str, list[dict[str, Any]]], verdicts: dict[str, dict[str, Any]], twin_of: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Every setting with a result whose twin has one, those that the probe was wrong about first."""
    found = []
    for setting, group in runs.items():
        twin = runs.get(twin_of(setting))
        if setting == twin_of(setting) or twin is None or setting not in verdicts:
            continue
        ended = fmean(run["final_held_out"] for run in group)
        lost = fmean(run["final_held_out"] for run in twin) - ended
        verdict = verdicts[setting]
        wrong = ""
        if verdict["verdict"] == "safe" and lost > LOST:
            wrong = f"lost more than {LOST:g}"
        if verdict["verdict"] == "not safe" and lost < UNHURT:
            wrong = f"lost less than {UNHURT:g}"
        found.append({"setting": setting, "ended": ended, "lost": lost, "wrong": wrong, **verdict})
    return sorted(found, key=lambda row: (not row["wrong"], -row["lost"]))


def tables(found: list[dict[str, Any]]) -> str:
    """Markdown, a table each: settings used for nothing, known when the judge was settled, used for the limits."""
    parts: dict[str, list[dict[str, Any]]] = {
        "Used for nothing": [],
        "Known when the judge was settled, not used to choose the limits": [],
        "Used to choose the limits": [],
    }
    new, known, chosen_on = parts.values()
    for row in found:
        part = new if row["setting"].endswith(NEW) else chosen_on if row["setting"].endswith(CHOSEN_ON) else known
        part.append(row)
    return "\n\n".join(f"{head}:\n\n{table(part)}" for head, part in parts.items())


def page_table(found: list[dict[str, Any]], runs: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a ground, a column a mode; what was lost against the twin, in the type of the verdict."""
    heads = {f"{precision}_bypass_{clip}": f"{precision} {clip}" for precision, clip in COLUMNS}
    heads["fp8_decoupled_1e-3"] = "fp8 decoupled"
    lines = [f"| ground | twin's reward | {' | '.join(heads.values())} |", f"|{'---|' * (2 + len(heads))}"]
    by_name = {row["setting"]: row for row in found}
    for ground in GROUNDS:
        twin = fmean(run["final_held_out"] for run in runs[f"{ground}_{TWIN}"])
        cells = [f"`{ground}`", f"{twin:.2f}"]
        for mode in heads:
            row = by_name.get(f"{ground}_{mode}")
            cells.append(marked(f"{row['lost']:.2f}", row["verdict"]) + " (wrong)" * bool(row["wrong"]) if row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(found: list[dict[str, Any]]) -> str:
    """A row a setting, and the count of wrong ones."""
    heads = ("setting", "ended at", "lost against its twin", "drift", "outside the clip", "probe", "wrong")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in found:
        drift = row.get("drift")
        cells = (
            f"`{row['setting']}`",
            f"{row['ended']:.2f}",
            f"{row['lost']:.2f}",
            "-" if drift is None else f"{drift:.5f}",
            f"{row['clipped']:.2f}",
            VERDICT_CELLS[row["verdict"]],
            row["wrong"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    wrong = sum(bool(row["wrong"]) for row in found)
    return "\n".join([*lines, "", f"{len(found)} settings, {wrong} wrong."])


def feedback(found: list[dict[str, Any]], ends: dict[str, dict[str, Any]]) -> str:
    """Markdown: the drift before training and at its end, for the settings whose final adapter was probed."""
    if not ends:
        return "Not run."
    heads = ("setting", "lost against its twin", "drift before", "after", "outside the clip before", "after")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    pairs = [(row, ends[row["setting"]]) for row in found if row["setting"] in ends and "drift" in row]
    for row, end in sorted(pairs, key=lambda pair: -pair[0]["lost"]):
        shares = f"{row['clipped']:.2f} | {end['clipped']:.2f}"
        lines.append(f"| `{row['setting']}` | {row['lost']:.2f} | {_drift(row)} | {_drift(end)} | {shares} |")
    if len(pairs) > 2:
        lost = [row["lost"] for row, _ in pairs]
        both = [rank_correlation([pair[place]["drift"] for pair in pairs], lost) for place in (0, 1)]
        lines += ["", f"Rank correlation with the loss: {both[0]:.2f} before training, {both[1]:.2f} at its end."]
    return "\n".join(lines)


def _drift(verdict: dict[str, Any]) -> str:
    low, high = verdict["drift_interval"]
    return f"{verdict['drift']:.4f} ({low:.4f} to {high:.4f})"


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's, with mean ranks where values are equal."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]

    return correlation(ranks(x), ranks(y))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this text")
    parser.add_argument("--seeds", default="1", help="comma-separated (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results' JSON-lines file")
    parser.add_argument("--keep", type=Path, help="folder in which the final adapters are kept, or lie")
    parser.add_argument("--from", dest="where", choices=("start", "end"), default="start", help="what is probed")
    parser.add_argument("--verdicts", action="store_true", help="run the probe on every setting with a result")
    parser.add_argument("--report", action="store_true", help=f"write the table of {PAGE.name}; runs nothing")
    arguments = parser.parse_args()
    settings = [name for name in SETTINGS if arguments.only in name]
    if not settings:
        parser.error(f"--only: no setting's name holds {arguments.only}; one is {next(iter(SETTINGS))}")
    end = arguments.where == "end"
    if end and not (arguments.verdicts and arguments.keep):
        parser.error("--from end: goes with --verdicts, and with --keep, where the final adapters lie")
    study = Study(SETTINGS, COMMON, arguments.results, STEPS, keep=arguments.keep and arguments.keep.resolve())
    failed = 0
    if arguments.verdicts:
        probed(study, [name for name in load(settings, arguments.results) if not name.endswith(TWIN)], end=end)
    elif not arguments.report:
        failed = run_missing(study, settings, [int(seed) for seed in arguments.seeds.split(",")], arguments.jobs)
    found = rows(load(settings, arguments.results), read_verdicts(arguments.results))
    ends = read_verdicts(arguments.results, end=True)
    if arguments.report:
        write_table(PAGE, RESULTS, page_table(found, load(settings, RESULTS)))
    print(tables(found), feedback(found, ends), sep="\n\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
