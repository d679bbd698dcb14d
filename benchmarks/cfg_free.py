"""Training without guidance for use with it: the tiny Stable Diffusion 3, with and without a KL on velocities.

    python benchmarks/tiny_sd3.py --out outputs/tiny_sd3_guided --flow-steps 900 --empty-share 0.15    # once: the model
    python benchmarks/cfg_free.py --seeds 1,2,3   # trains what is missing, some minutes a run and core
    python benchmarks/cfg_free.py --report        # writes the table of docs/training.md; runs nothing

``guided`` trains and validates with guidance 3; the others train at ``true_cfg_scale=1``, with half the transformer's
rows, and validate with guidance 3. Each final adapter then draws the held-out numbers in plain diffusers, with and
without guidance, for two OCR engines: the reward's and tesseract (must be installed). Resumable, as
``training_runs.py`` says.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from learning import BYPASS, COMMON, ROLLOUT
from machine import describe
from second_ocr import held_out_numbers, read_by_both
from tiny_sd3 import NO_T5_TOKENS, SCORES
from training_runs import HERE, Overrides, Study, load, read_results, run_missing, write_results, write_table

FOLDER = HERE.parent / "outputs" / "tiny_sd3_guided"
RESULTS = HERE / "results" / "cfg_free.jsonl"
PAGE = HERE.parent / "docs" / "training.md"
STEPS = 100
SCALE = 3.0
SCALES = (1.0, SCALE)
EACH = 10
"""Images of every held-out number, at each scale."""
TAIL = 10
"""Last steps that a velocity's norm is averaged over."""

ACTOR = "actor_rollout_ref.actor"
FREE: Overrides = {f"{ROLLOUT}.val_kwargs.pipeline.true_cfg_scale": SCALE}


def velocity_kl(coefficient: float) -> Overrides:
    """Training without guidance, with a KL on velocities to the base."""
    kl = {"use_kl_loss": True, "kl_loss_type": "velocity", "kl_loss_coef": coefficient}
    return FREE | {f"{ACTOR}.{key}": value for key, value in kl.items()}


SETTINGS: dict[str, Overrides] = {
    "guided": {f"{ROLLOUT}.pipeline.true_cfg_scale": SCALE},
    "free": FREE,
    **{f"velocity_{c:g}": velocity_kl(c) for c in (0.01, 0.1, 1.0)},
}
PARTS: Overrides = {
    **BYPASS,
    # Relative to the checkout, where runs are started: results are the same settings on every machine.
    "actor_rollout_ref.model.path": str(FOLDER.relative_to(HERE.parent)),
    f"{ROLLOUT}.pipeline.max_sequence_length": NO_T5_TOKENS,
    f"{ROLLOUT}.dtype": "float32",
    "trainer.test_freq": 25,
}


def drawn(lora: Path | None) -> dict[str, Any]:
    """Both engines' readings of an adapter's images at each scale, and two figures of sharpness."""
    from flowgrpo_rc.models import load_model

    pipe = load_model(str(FOLDER)).pipe
    if lora is not None:
        pipe.load_lora_weights(str(lora))
    pipe.set_progress_bar_config(disable=True)
    targets = held_out_numbers() * EACH
    found = {}
    for scale in SCALES:
        images = []
        for start in range(0, len(targets), 50):
            prompts = [f'the text "{target}"' for target in targets[start : start + 50]]
            images += pipe(
                prompts,
                height=32,
                width=32,
                num_inference_steps=6,
                guidance_scale=scale,
                max_sequence_length=NO_T5_TOKENS,
                generator=[torch.Generator().manual_seed(10_000 + start + i) for i in range(len(prompts))],
            ).images
        pixels = np.stack([np.asarray(image, dtype=np.float32) / 255 for image in images])
        found[f"scale {scale:g}"] = read_by_both(images, targets) | {
            "gradient": float(np.abs(np.diff(pixels, axis=2)).mean()),
            "clipped": float(((pixels == 0) | (pixels == 1)).mean()),
        }
    return found


def after_training(folder: Path) -> dict[str, Any]:
    """Readings of the final adapter's images, and what became of the velocity's norm in training."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    norms = {}
    for name in ("velocity_norm", "ref_velocity_norm"):
        values = [row[f"actor/{name}"] for row in rows if f"actor/{name}" in row]
        if values:
            norms |= {f"{name}_first": values[0], f"{name}_last": fmean(values[-TAIL:])}
    return {"drawn": drawn(folder / "lora"), **norms}


def base_result() -> dict[str, Any]:
    """The images of the model before training, as a result."""
    return {"setting": "base", "seed": 0, "overrides": [], "drawn": drawn(None), "machine": describe()}


def rows_per_image(setting: str) -> tuple[int, int]:
    """Rows of the transformer for one image: those without gradients (drawing, reference), and those of the update."""
    halves = 2 if setting == "guided" else 1
    reference = 2 if setting.startswith("velocity") else 0
    return 6 * halves + reference, 2 * halves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), help="settings (%(default)s)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--report", action="store_true", help=f"write the table of {PAGE.name}; runs nothing")
    arguments = parser.parse_args()
    failed = 0
    if not arguments.report:
        if not (FOLDER / SCORES).is_file():
            parser.error(f"{FOLDER} has no finished model; run benchmarks/tiny_sd3.py first, as above")
        study = Study(SETTINGS, COMMON | PARTS, RESULTS, STEPS, after_training)
        if not load(["base"], RESULTS):
            write_results(RESULTS, [*read_results(RESULTS), base_result()])
        failed = run_missing(study, arguments.only, arguments.seeds, arguments.jobs)
    found = table(load(["base", *SETTINGS], RESULTS))
    if arguments.report:
        write_table(PAGE, RESULTS, found)
    else:
        print(found)
    return 1 if failed else 0


HEADER = (
    "| training | validation reward by seed | read right without guidance | read right with guidance | sharpness | "
    "velocity | rows |\n|---|---|---|---|---|---|---|"
)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting: the reward of each seed, and means over the seeds."""
    lines = [HEADER]
    for setting, group in runs.items():
        held_out = ", ".join(f"{run['final_held_out']:.2f}" for run in group if "final_held_out" in run)
        first = next((run["held_out"]["0"] for others in runs.values() for run in others if "held_out" in run), 0.0)
        read = [
            " / ".join(
                f"{fmean(run['drawn'][f'scale {scale:g}'][name] for run in group):.2f}"
                for name in ("reward_engine_exact", "tesseract_exact")
            )
            for scale in SCALES
        ]
        sharpness = fmean(run["drawn"][f"scale {SCALE:g}"]["gradient"] for run in group)
        moved = [run["velocity_norm_last"] / run["velocity_norm_first"] for run in group if "velocity_norm_last" in run]
        without, with_gradient = rows_per_image(setting)
        cells = [
            f"`{setting}`",
            held_out or f"{first:.2f}",
            *read,
            f"{sharpness:.4f}",
            f"{fmean(moved):.3f}" if moved else "",
            f"{without} + {with_gradient}" if moved else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
