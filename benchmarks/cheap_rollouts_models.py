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

from cheap_rollouts import CACHE, FULL, PAGE, SHARED, TAIL, drawing, last_means
from clean_objectives import EACH
from hacking import HONEST, TINY_CLIP
from learning import COMMON, ROLLOUT
from sd3_ground import MODEL
from second_ocr import held_out_numbers, second_ocr
from tiny_sd3 import FOLDER, NO_T5_TOKENS
from training_runs import HERE, Study, by_seed, load, run_missing, study_arguments, write_table

RESULTS = HERE / "results" / "cheap_rollouts_models.jsonl"
STEPS = {"sd3": 60, "edit": 150}
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
SETTINGS = {
    model: {f"{model}_{name}": own | sampler for name, sampler in SAMPLERS.items()} for model, own in MODELS.items()
}
del SETTINGS["sd3"]["sd3_cache"]  # its transformer takes no cache
NAMES = [setting for settings in SETTINGS.values() for setting in settings]
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
        options = {"guidance_scale": 1.0, "max_sequence_length": NO_T5_TOKENS}
        found["drawn"] = second_ocr(folder / "lora", held_out_numbers() * EACH, str(FOLDER), options)
    return found


def main() -> int:
    arguments = study_arguments(__doc__, NAMES)
    if arguments.report:
        write_table(PAGE, RESULTS, table(load(NAMES, RESULTS)))
        return 0
    failed = 0
    for model, settings in SETTINGS.items():
        study = Study(settings, COMMON | {"trainer.test_freq": 10}, RESULTS, STEPS[model], after_training)
        failed += run_missing(
            study, [name for name in arguments.only if name in settings], arguments.seeds, arguments.jobs
        )
    print(table(load(NAMES, RESULTS)))
    return 1 if failed else 0


HEADER = (
    "| setting | forwards that draw an image | held out before, half-way and at the end, by seed "
    "| training reward at the end | diversity, training / held out | tesseract |\n|---|---|---|---|---|---|"
)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        model, sampler = setting.split("_")
        end = STEPS[model]
        places = [str(step) for step in (0, end // 20 * 10, end)]
        held_out = [
            f"{part}: {by_seed([run['parts'][part][step] for step in places] for run in group)}"
            for part in group[0]["parts"]
        ]
        last = {name: fmean(run["last"][name] for run in group) for name in group[0]["last"]}
        read = [run["drawn"]["tesseract_exact"] for run in group if "drawn" in run]
        lines.append(
            f"| `{setting}` | {drawing(sampler):.2f} | {'<br>'.join(held_out)} "
            f"| {last['reward/mean']:.2f} | {last['images/diversity']:.3f} / {last['val/images/diversity']:.3f} "
            f"| {f'{fmean(read):.2f}' if read else '–'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
