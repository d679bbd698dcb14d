"""Statistics of images under honest and under hackable rewards: evidence for the report's limits of hacking.

    python benchmarks/hacking.py              # runs what is missing, then prints the table
    python benchmarks/hacking.py --report     # writes the table of docs/report.md; runs nothing

The tiny Qwen-Image learns from honest rewards (``ocr``, ``clip_cosine``), the tiny FLUX.1-Kontext from another
(``edit``). ``shuffled_ocr`` teaches nothing. ``brightness``, ``jpeg`` and ``lucky_number`` are hacked: they pay for
something else than their prompts ask for. Scorers with no part in training look on. Resumable, a process a run, as
``training_runs.py`` says; of each run the columns stay that the checks read.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from training_runs import HERE, Overrides, Study, load, run_missing, write_table

from flowgrpo_rc.report.check import Check
from flowgrpo_rc.report.checks_images import HACKING_CHECKS
from flowgrpo_rc.report.finding import OK, number
from flowgrpo_rc.report.history import History

RESULTS = HERE / "results" / "hacking.jsonl"
PAGE = HERE.parent / "docs" / "report.md"
STEPS = 150
EARLY = 60
"""By this step a hack should be named; what need not show more ends there."""
LONG = {
    *product(("ocr", "lucky_number"), (1, 2, 3)),
    *product(("clip_cosine", "brightness", "jpeg"), (1,)),
}
"""Runs of 150 steps."""
COLUMNS = ("images/", "reward/", "val/reward/")
"""Beginnings of the metrics that are kept."""
UNUSED = ("reward/std/", "reward/max", "reward/min", "reward/group_std_mean", "reward/zero_std_fraction")
OWN = "reward.custom_reward_function.path"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
LOOKING = "reward.val_functions"

TINY_CLIP: Overrides = {"reward.clip_cosine.model_path": "asset:tiny_clip", "reward.clip_cosine.device": "cpu"}
COMMON: Overrides = {
    "reward.ocr.num_threads": 1,
    **TINY_CLIP,
    f"{ROLLOUT}.val_kwargs.n": 4,
    "trainer.test_freq": 10,
    "trainer.save_freq": -1,
    "trainer.log_val_generations": 0,
    "trainer.resume_mode": "disable",
    "trainer.device": "cpu",
}
LOOK_ON: Overrides = {f"{LOOKING}.ocr": True, f"{LOOKING}.clip_cosine": True, "reward.functions.ocr": 0}
HONEST: dict[str, Overrides] = {
    "ocr": {f"{LOOKING}.clip_cosine": True},
    "clip_cosine": {
        "reward.functions.clip_cosine": 1.0,
        "reward.functions.ocr": 0,
        f"{LOOKING}.ocr": True,
    },
    # As examples/flowgrpo_trainer/run_tiny_kontext_edit.sh.
    "edit": {
        "data.train_files": "asset:tiny_edit/train.jsonl",
        "data.val_files": "asset:tiny_edit/test.jsonl",
        "actor_rollout_ref.model.path": "asset:tiny_kontext",
        f"{ACTOR}.optim.lr": 2e-3,
        f"{ACTOR}.optim.lr_warmup_steps": 10,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        f"{ROLLOUT}.algo.sde_window_size": 4,
        f"{ROLLOUT}.pipeline.reference_area": 1024,
        f"{ROLLOUT}.pipeline.max_sequence_length": 16,
        "reward.functions.ocr": 1.0,
        "reward.reward_functions.same_style.path": "examples/tiny_kontext/style_reward.py",
        "reward.reward_functions.same_style.name": "same_style",
        "reward.reward_functions.same_style.weight": 1.0,
        f"{LOOKING}.clip_cosine": True,
    },
}
SETTINGS: dict[str, Overrides] = {
    **HONEST,
    "shuffled_ocr": {**LOOK_ON, OWN: "benchmarks/shuffled_ocr.py"},
    "brightness": {**LOOK_ON, OWN: "tests/brightness_reward.py"},
    "jpeg": {**LOOK_ON, "reward.functions.jpeg_compressibility": 1.0},
    "lucky_number": {**LOOK_ON, OWN: "benchmarks/lucky_number.py"},
}


def figures(folder: Path) -> dict[str, Any]:
    """The columns that the checks read, to four digits; none of what other studies keep."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {name: float(f"{row[name]:.4g}") if name in row else None for name in _columns(lines)} | {"step": row["step"]}
        for row in lines
    ]
    columns = {name: [row[name] for row in rows] for name in ("step", *_columns(lines))}
    unused = ("metrics", "curves", "training", "gap_curve", "clip_fraction_curve")
    return {"columns": columns, **dict.fromkeys(unused)}


def _columns(lines: list[dict[str, float]]) -> list[str]:
    names = dict.fromkeys(name for line in lines for name in line)
    return [name for name in names if name.startswith(COLUMNS) and not name.startswith(UNUSED)]


def rows_of(run: dict[str, Any]) -> list[dict[str, float]]:
    """The rows of ``metrics.jsonl`` that a result stands for, as far as it has their columns."""
    columns = run["columns"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a reward; of each check the step at which it named each seed's run, and its furthest value."""
    heads = ["reward", "steps", *(f"`{check.name}`" for check in HACKING_CHECKS)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for setting, group in runs.items():
        cells = [setting, ", ".join(str(run["steps"]) for run in group)]
        for check in HACKING_CHECKS:
            named, values = zip(*(judged(check, rows_of(run)) for run in group), strict=True)
            steps = ", ".join("-" if step is None else str(step) for step in named)
            furthest = min(values) if check.sde.high is None else max(values)
            cells.append(f"{steps} ({number(furthest)})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def judged(check: Check, rows: list[dict[str, float]]) -> tuple[int | None, float]:
    """The first step after which the check named the run, and the furthest value after any step."""
    found = [(int(rows[count - 1]["step"]), check.run(History(rows[:count]))) for count in range(1, len(rows) + 1)]
    steps = [step for step, finding in found if finding is not None and finding.level != OK]
    values = [finding.value for _, finding in found if finding is not None]
    return min(steps, default=None), min(values) if check.sde.high is None else max(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated (%(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (%(default)s)")
    parser.add_argument("--report", action="store_true", help=f"write the table of {PAGE.name}; runs nothing")
    arguments = parser.parse_args()
    settings = arguments.settings.split(",")
    failed = 0
    for seed in map(int, arguments.seeds.split(",")):
        for name in settings if not arguments.report else ():
            study = Study(SETTINGS, COMMON, RESULTS, STEPS if (name, seed) in LONG else EARLY, extra=figures)
            failed += run_missing(study, [name], [seed], 1)
    runs = load(settings, RESULTS)
    if arguments.report:
        write_table(PAGE, RESULTS, table(runs))
    elif runs:
        print(table(runs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
