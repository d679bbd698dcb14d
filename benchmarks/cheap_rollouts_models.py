"""Rollouts with fewer transformer forwards on other models than the demo's: the tiny Stable Diffusion 3 and editing.

    python benchmarks/tiny_sd3.py                                       # once: the model
    python benchmarks/cheap_rollouts_models.py --jobs 2 --seeds 1,2,3   # runs what is missing, then prints a table
    python benchmarks/cheap_rollouts_models.py --report    # writes the table of docs/cheap_rollouts.md; runs nothing

Settings are those of ``cheap_rollouts.py``. ``edit_...`` has rewards, batches and optimizer of the example script
``run_tiny_kontext_edit.sh``, and steps and window of the demo: the script's own window begins at the first step, where
one starting noise saves nothing. Validation draws with the full sampler in every run. Resumable, as
``training_runs.py`` says.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from cheap_rollouts import CACHE, FULL, PAGE, SHARED, TAIL, drawing, forwards, last_means
from clean_objectives import EACH
from hacking import HONEST, TINY_CLIP
from learning import COMMON, ROLLOUT
from sd3_ground import MODEL
from second_ocr import held_out_numbers, second_ocr
from tiny_sd3 import FOLDER, OPTIONS
from training_runs import HERE, Study, by_seed, study_main

RESULTS = HERE / "results" / "cheap_rollouts_models.jsonl"
STEPS = 150
HALF_WAY = 70
"""A batch with a validation."""
EDIT = HONEST["edit"] | TINY_CLIP | {f"{ROLLOUT}.algo.sde_window_size": 2}
MODELS = {"sd3": MODEL, "edit": EDIT}
"""Name -> settings over those of the demo."""
SAMPLERS = {
    "full": FULL,
    "shared": FULL | SHARED,
    "tail": FULL | TAIL,
    "both": FULL | SHARED | TAIL,
    "cache": FULL | CACHE,
}
SETTINGS = {f"{model}_{name}": own | sampler for model, own in MODELS.items() for name, sampler in SAMPLERS.items()}
del SETTINGS["sd3_cache"]  # its transformer takes no cache
PARTS = ("ocr", "same_style")


def after_training(folder: Path) -> dict[str, Any]:
    """Held-out rewards by part, means of the last batches, and for Stable Diffusion 3 readings of the final images."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = {
        part: {row["step"]: row[f"val/reward/{part}"] for row in rows if f"val/reward/{part}" in row} for part in PARTS
    }
    found = {
        "parts": {part: curve for part, curve in parts.items() if curve},
        "last": last_means(rows, rows[-1]["step"]),
    }
    if found["parts"].keys() == {"ocr"}:
        found["drawn"] = second_ocr(folder / "lora", held_out_numbers() * EACH, str(FOLDER), OPTIONS)
    return found


def main() -> int:
    study = Study(SETTINGS, COMMON | {"trainer.test_freq": 10}, RESULTS, STEPS, after_training)
    return study_main(__doc__, study, PAGE, table)


HEADER = (
    "| setting | forwards that draw an image | held out before, half-way and at the end, by seed "
    f"| after the full sampler's forwards of {HALF_WAY} batches | training reward at the end "
    "| diversity, training / held out | tesseract |\n|---|---|---|---|---|---|---|"
)


def after_forwards(curve: dict[str, float], sampler: str) -> float:
    """A held-out curve, by batches, where it has cost as many forwards as the full sampler half-way."""
    batches = HALF_WAY * forwards("full") / forwards(sampler)
    return float(np.interp(batches, [int(step) for step in curve], list(curve.values())))


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        sampler = setting.split("_")[1]
        places = [str(step) for step in (0, HALF_WAY, STEPS)]
        curves = {part: [run["parts"][part] for run in group] for part in group[0]["parts"]}
        held_out = [f"{part}: {by_seed([curve[step] for step in places] for curve in curves[part])}" for part in curves]
        equal = [f"{part}: {by_seed([after_forwards(curve, sampler)] for curve in curves[part])}" for part in curves]
        last = {name: fmean(run["last"][name] for run in group) for name in group[0]["last"]}
        read = [run["drawn"]["tesseract_exact"] for run in group if "drawn" in run]
        lines.append(
            f"| `{setting}` | {drawing(sampler):.2f} | {'<br>'.join(held_out)} | {'<br>'.join(equal)} "
            f"| {last['reward/mean']:.2f} | {last['images/diversity']:.3f} / {last['val/images/diversity']:.3f} "
            f"| {f'{fmean(read):.2f}' if read else '–'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
