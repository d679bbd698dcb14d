"""Objectives on clean images beside FlowGRPO on another model, another reward and another task than the demo's.

    python benchmarks/tiny_sd3.py                                         # once: the model of ``sd3_...``
    python benchmarks/clean_objectives_models.py --jobs 2 --seeds 1,2,3   # runs what is missing, then prints a table
    python benchmarks/clean_objectives_models.py --report    # writes the table of docs/clean_images.md; runs nothing

``sd3_...`` is the tiny Stable Diffusion 3 with OCR, ``clip_...`` the demo's model with the cosine of the tiny CLIP as
its reward, while OCR looks on, ``edit_...`` the tiny Kontext with OCR and the style of the reference, as in
``cheap_rollouts_models.py``. Objectives have the settings of ``clean_objectives.py``. The last columns are of images
that no reward sees so. Resumable, as ``training_runs.py`` says.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from cheap_rollouts import FULL
from cheap_rollouts_models import EDIT
from clean_objectives import EACH, PAGE, objective
from hacking import HONEST, TINY_CLIP
from learning import COMMON
from sd3_ground import MODEL
from second_ocr import held_out_numbers, second_ocr
from tiny_sd3 import FOLDER, OPTIONS
from training_runs import HERE, Study, by_seed, study_main

RESULTS = HERE / "results" / "clean_objectives_models.jsonl"
STEPS = 60
MODELS = {"sd3": MODEL, "clip": HONEST["clip_cosine"] | TINY_CLIP, "edit": EDIT}
OBJECTIVES = {
    "flow_grpo": FULL,
    "awm": objective("awm"),
    "diffusion_nft": objective("diffusion_nft", mix_beta=0.1),
    "dpo": objective("dpo", dpo_beta=100.0),
}
SETTINGS = {f"{model}_{name}": own | how for model, own in MODELS.items() for name, how in OBJECTIVES.items()}
PARTS = {"sd3": ("ocr",), "clip": ("clip_cosine", "ocr"), "edit": ("ocr", "same_style")}
"""Held-out figures of a model's table."""
STATISTICS = ("luminance", "contrast", "saturation", "sharpness", "diversity")
HEADER = (
    "| setting | held out before and after 30 and 60 batches, by seed | tesseract | velocity norm, last batch "
    f"| {', '.join(STATISTICS)} of held-out images, before; after |\n|---|---|---|---|---|"
)


def after_training(folder: Path) -> dict[str, Any]:
    """Held-out rewards by part, images' statistics before and after, the last velocity norm, and for Stable Diffusion 3
    readings of the final images."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validated = [row for row in rows if "val/reward/mean" in row]
    found = {
        "parts": {
            part: {row["step"]: row[f"val/reward/{part}"] for row in validated}
            for part in sorted({part for parts in PARTS.values() for part in parts})
            if f"val/reward/{part}" in validated[0]
        },
        "statistics": [[row[f"val/images/{name}"] for name in STATISTICS] for row in (validated[0], validated[-1])],
        "velocity_norm": rows[-1]["actor/velocity_norm"],
    }
    if found["parts"].keys() == {"ocr"}:
        found["drawn"] = second_ocr(folder / "lora", held_out_numbers() * EACH, str(FOLDER), OPTIONS)
    return found


def main() -> int:
    study = Study(SETTINGS, COMMON | {"trainer.test_freq": 10}, RESULTS, STEPS, after_training)
    return study_main(__doc__, study, PAGE, table)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        held_out = [
            f"{part}: {by_seed([run['parts'][part][step] for step in ('0', '30', '60')] for run in group)}"
            for part in PARTS[setting.partition("_")[0]]
        ]
        read = [run["drawn"]["tesseract_exact"] for run in group if "drawn" in run]
        before, after = (
            [fmean(values) for values in zip(*(run["statistics"][end] for run in group), strict=True)] for end in (0, 1)
        )
        lines.append(
            f"| `{setting}` | {'<br>'.join(held_out)} | {f'{fmean(read):.2f}' if read else '–'} "
            f"| {fmean(run['velocity_norm'] for run in group):.2f} "
            f"| {' '.join(f'{v:.3f}' for v in before)}; {' '.join(f'{v:.3f}' for v in after)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
