"""Rollouts with fewer transformer forwards: the demo's model and engine, several seeds, a second OCR engine.

    python benchmarks/cheap_rollouts.py --jobs 2 --seeds 1,2,3    # runs what is missing, then prints a table
    python benchmarks/cheap_rollouts.py --report    # writes table and figure of docs/cheap_rollouts.md; runs nothing

``full`` is the demo in bypass mode. ``shared`` starts the images of a prompt from one noise, ``tail`` takes half of the
steps after the window, ``both`` does both. ``cache`` computes attention and feed-forward of every second step before
and after the window, and extrapolates them between. ``awm...`` learn from clean images with the settings of
``clean_objectives.py``; there the tail is the whole rollout. Validation draws with the full sampler in every run. Each
final adapter then draws the held-out numbers as in ``clean_objectives.py``. Resumable, as ``training_runs.py`` says.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from clean_objectives import EACH, STEPS, batches_to, objective
from learning import COMMON, RC, ROLLOUT, plot_curves
from second_ocr import held_out_numbers, second_ocr
from training_runs import CONFIG, HERE, Overrides, Study, by_seed, load, run_missing, study_arguments, write_table

RESULTS = HERE / "results" / "cheap_rollouts.jsonl"
PAGE = HERE.parent / "docs" / "cheap_rollouts.md"
PLOT = HERE.parent / "docs" / "images" / "cheap_rollouts.png"

SHARED: Overrides = {f"{ROLLOUT}.algo.init_same_noise": True}
TAIL: Overrides = {f"{ROLLOUT}.tail.steps": 0.5}
CACHE: Overrides = {
    f"{ROLLOUT}.cache.name": "taylorseer",
    f"{ROLLOUT}.cache.options": {"cache_interval": 2, "disable_cache_before_step": 1},
}
FULL: Overrides = {f"{RC}.bypass_mode": True}
SETTINGS: dict[str, Overrides] = {
    "full": FULL,
    "shared": FULL | SHARED,
    "tail": FULL | TAIL,
    "both": FULL | SHARED | TAIL,
    "awm": objective("awm"),
    "cache": FULL | CACHE,
    "awm_tail": objective("awm") | TAIL,
    "awm_cache": objective("awm") | CACHE,
    "awm_dpm": objective("awm") | TAIL | {f"{ROLLOUT}.tail.solver": "dpm++2m"},
}
SHOWN = {
    "full": ("all steps", "#b2182b"),
    "shared": ("one starting noise", "#4d4d4d"),
    "tail": ("half of the tail", "#74add1"),
    "both": ("both", "#08519c"),
}
"""Settings of the figure, with their labels and colours."""
UPDATE = 4
"""Forwards of an image in the update: forward and backward of two rows."""
LAST = 20
"""Batches at the end whose training reward and diversity are shown."""
MEASURED = ("reward/mean", "reward/std", "images/diversity", "val/images/diversity")


def after_training(folder: Path) -> dict[str, Any]:
    """Readings of the final adapter's images, and means of the last batches."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"drawn": second_ocr(folder / "lora", held_out_numbers() * EACH), "last": last_means(rows, STEPS)}


def last_means(rows: Sequence[dict[str, float]], steps: int) -> dict[str, float]:
    """Means over the last batches of a run of this many."""
    last = [row for row in rows if row["step"] > steps - LAST]
    return {name: fmean(row[name] for row in last if name in row) for name in MEASURED}


@cache
def drawing(setting: str) -> float:
    """Transformer forwards that draw an image."""
    from flowgrpo_rc.cli.compose import compose

    config = compose(CONFIG, study().overrides(setting, 1)).actor_rollout_ref
    return sum(config.rollout.forwards_per_image(clean=config.actor.diffusion_loss.objective.clean))


def forwards(setting: str) -> float:
    """Transformer forwards of an image and batch, a backward counting as one."""
    return drawing(setting) + UPDATE


def study() -> Study:
    return Study(SETTINGS, COMMON | {"trainer.test_freq": 10}, RESULTS, STEPS, after_training)


def main() -> int:
    arguments = study_arguments(__doc__, SETTINGS)
    if arguments.report:
        runs = load(SETTINGS, RESULTS)
        write_table(PAGE, RESULTS, table(runs))
        unit = "transformer forwards an image, added up over the batches"
        plot_curves(runs, SHOWN, PLOT, unit=unit, per_step=forwards)
        return 0
    failed = run_missing(study(), arguments.only, arguments.seeds, arguments.jobs)
    print(table(load(SETTINGS, RESULTS)))
    return 1 if failed else 0


HEADER = (
    "| setting | forwards that draw an image | held out after 30, 60, 150 batches, by seed | batches to .85 "
    "| forwards to .85 | training reward at the end | diversity, training / held out "
    "| read right (own OCR / tesseract) |\n|---|---|---|---|---|---|---|---|"
)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        held_out = by_seed([run["held_out"][step] for step in ("30", "60", "150")] for run in group)
        reached = [batches_to(run, 0.85) for run in group]
        shown = ", ".join("never" if number is None else f"{number:.0f}" for number in reached)
        whole = [number for number in reached if number is not None]
        last = {name: fmean(run["last"][name] for run in group) for name in MEASURED}
        read = {name: fmean(run["drawn"][f"{name}_exact"] for run in group) for name in ("reward_engine", "tesseract")}
        cells = [
            f"{drawing(setting):.2f}",
            held_out,
            shown,
            f"{fmean(whole) * forwards(setting):.0f}" if whole else "",
            f"{last['reward/mean']:.2f}",
            f"{last['images/diversity']:.3f} / {last['val/images/diversity']:.3f}",
            f"{read['reward_engine']:.2f} / {read['tesseract']:.2f}",
        ]
        lines.append(f"| `{setting}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
