"""A learned reward from end to end: the tiny Qwen-Image learns from the tiny CLIP alone, and OCR looks on.

    python benchmarks/tiny_clip_reward.py              # runs what is missing, then prints the table
    python benchmarks/tiny_clip_reward.py --report     # writes the table of docs/rewards/clip.md; runs nothing

The demo with another reward, by the code that PickScore takes: ``clip_cosine`` with ``asset:tiny_clip``. OCR had no
part in making that model and has none in training here, so that a reward which is hacked shows: the cosine rises and
what OCR reads does not. ``shuffled`` is the control: the same cosines, dealt to the wrong images. Resumable, a process
a run, as ``training_runs.py`` says.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from training_runs import HERE, Overrides, Study, load, run_missing, write_table

RESULTS = HERE / "results" / "tiny_clip_reward.jsonl"
PAGE = HERE.parent / "docs" / "rewards" / "clip.md"
LOOKS_ON = 1e-6
"""The weight of a reward that is there to be logged: beside a reward of weight 1 it changes an advantage by less than
the rounding of bfloat16 rollouts changes a score."""
WATCHED = {"clip_cosine": "cosine", "ocr": "OCR"}

COMMON: Overrides = {
    "reward.clip_cosine.model_path": "asset:tiny_clip",
    "reward.clip_cosine.device": "cpu",
    "reward.ocr.num_threads": 1,
    "reward.functions.ocr": LOOKS_ON,
    "trainer.test_freq": 20,
    "trainer.save_freq": -1,
    "trainer.log_val_generations": 0,
    "trainer.resume_mode": "disable",
    "trainer.device": "cpu",
}
SETTINGS: dict[str, Overrides] = {
    "clip_cosine": {"reward.functions.clip_cosine": 1.0},
    "shuffled": {
        "reward.functions.clip_cosine": LOOKS_ON,
        "reward.custom_reward_function.path": "benchmarks/shuffled_clip.py",
    },
}


def figures(folder: Path) -> dict[str, Any]:
    """Both scores of the held-out images by step, and how far the rewards of a prompt's images lay apart."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "val/reward/mean" in row]
    steps = [row for row in rows if "reward/mean" in row]
    return {
        "watched": {name: {row["step"]: row[f"val/reward/{name}"] for row in held_out} for name in WATCHED},
        "group_std": fmean(row["reward/group_std_mean"] for row in steps),
        "zero_std_fraction": fmean(row["reward/zero_std_fraction"] for row in steps),
    }


def table(runs: dict[str, list[dict]]) -> str:
    """Markdown: a row a run, each score of the held-out images by step."""
    steps = sorted({int(step) for group in runs.values() for run in group for step in run["watched"]["ocr"]})
    heads = ["reward", "seed", *(f"{word}, step {step}" for word in WATCHED.values() for step in steps)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for setting, group in runs.items():
        for run in group:
            scores = [{int(s): v for s, v in run["watched"][name].items()} for name in WATCHED]
            cells = [f"`{setting}`", str(run["seed"]), *(f"{score[step]:.3f}" for score in scores for step in steps)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results' JSON-lines file")
    parser.add_argument("--report", action="store_true", help=f"write {PAGE.name}'s table; runs nothing")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    study = Study(SETTINGS, COMMON, arguments.results, arguments.steps, extra=figures)
    failed = 0 if arguments.report else run_missing(study, list(SETTINGS), seeds, arguments.jobs)
    runs = load(SETTINGS, arguments.results)
    if arguments.report:
        write_table(PAGE, RESULTS, table(runs))
    elif runs:
        print(table(runs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
