"""Objectives on clean images beside FlowGRPO: the demo's model and engine, several seeds, a control, a second OCR.

    python benchmarks/clean_objectives.py --jobs 2 --seeds 1,2,3    # runs what is missing, then prints a table

``flow_grpo`` is the demo as it is, in bypass mode. The others have another objective, one optimizer step a batch, twice
the learning rate, and noise levels of .3 and more. ``awm_own_noise`` does not share the noise of a prompt's images.
``awm_lag`` draws every batch with the adapter of eight batches before; ``awm_lag_corrected`` has importance weights.
``awm_shuffled`` deals the rewards to the wrong images. Each final adapter then draws the held-out numbers in plain
diffusers for two OCR engines: the reward's, and tesseract (must be installed), which had no part in training.
Resumable, as ``training_runs.py`` says.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from learning import COMMON, DECOUPLED_IS, LOSS, NONE, RC, ROLLOUT
from machine import describe
from second_ocr import held_out_numbers, second_ocr
from training_runs import HERE, Overrides, Study, load, read_results, run_missing, write_results

RESULTS = HERE / "results" / "clean_objectives.jsonl"
ACTOR = "actor_rollout_ref.actor"
STEPS = 150
STEP_FORWARDS = 6
"""Denoising steps of an image."""
EACH = 12
"""Images of every held-out number that both OCR engines read."""


def objective(name: str, **options: float) -> Overrides:
    """An objective on clean images, without rollout correction."""
    settings = {f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.optim.lr": 2e-3, f"{ACTOR}.clean.range": [0.3, 1.0]}
    return NONE | settings | {f"{LOSS}.loss_mode": name} | {f"{LOSS}.{key}": value for key, value in options.items()}


SHUFFLED: Overrides = {
    "reward.functions.ocr": 0,
    "reward.custom_reward_function.path": "benchmarks/shuffled_ocr.py",
}
LATE: Overrides = {f"{ROLLOUT}.adapter_lag": 8}
SETTINGS: dict[str, Overrides] = {
    "awm": objective("awm"),
    "flow_grpo": {f"{RC}.bypass_mode": True},
    "diffusion_nft": objective("diffusion_nft", mix_beta=0.1),
    "awm_own_noise": objective("awm") | {f"{ACTOR}.clean.shared_noise": False},
    "awm_lag": objective("awm") | LATE,
    "awm_lag_corrected": objective("awm") | DECOUPLED_IS | LATE,
    "awm_fp8": {**objective("awm"), f"{ROLLOUT}.quantization": "fp8"},
    "dpo": objective("dpo", dpo_beta=100.0),
    "awm_shuffled": objective("awm") | SHUFFLED,
}


def after_training(folder: Path) -> dict[str, Any]:
    """Readings of the final adapter's images."""
    return {"drawn": second_ocr(folder / "lora", held_out_numbers() * EACH)}


def base_result() -> dict[str, Any]:
    """The images of the model before training, as a result."""
    drawn = second_ocr(None, held_out_numbers() * EACH)
    return {"setting": "base", "seed": 0, "overrides": [], "drawn": drawn, "machine": describe()}


def forwards(setting: str) -> float:
    """Transformer forwards of an image and batch, a backward counting as one: drawing, and forward and backward of two
    SDE steps or places; importance weights add a scoring pass."""
    if setting == "dpo":
        return STEP_FORWARDS + 2 / 12 * 2 * 3  # best and worst of twelve, with a forward of the base
    return STEP_FORWARDS + 2 * 2 + 2 * (setting == "awm_lag_corrected")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), help="settings (%(default)s)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    arguments = parser.parse_args()
    study = Study(SETTINGS, COMMON | {"trainer.test_freq": 10}, RESULTS, STEPS, after_training)
    if not load(["base"], RESULTS):
        write_results(RESULTS, [*read_results(RESULTS), base_result()])
    failed = run_missing(study, arguments.only, arguments.seeds, arguments.jobs)
    print(table(load(["base", *SETTINGS], RESULTS)))
    return 1 if failed else 0


HEADER = (
    "| objective | held out after 30, 60, 150 batches, by seed | batches to .85 | read right (own OCR / tesseract) "
    "| forwards |\n|---|---|---|---|---|"
)


def batches_to(run: dict[str, Any], reward: float) -> int | None:
    """First validation with this held-out reward."""
    return next((int(step) for step, value in run["held_out"].items() if value >= reward), None)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each objective."""
    lines = [HEADER]
    for setting, group in runs.items():
        trained = [run for run in group if "held_out" in run]
        curves = "; ".join(
            " ".join(f"{run['held_out'][step]:.2f}".lstrip("0") for step in ("30", "60", "150")) for run in trained
        )
        reached = ", ".join(str(batches_to(run, 0.85) or "never") for run in trained)
        read = " / ".join(
            f"{fmean(run['drawn'][name] for run in group):.2f}" for name in ("reward_engine_exact", "tesseract_exact")
        )
        work = f"{forwards(setting):g}" if trained else ""
        lines.append(f"| `{setting}` | {curves} | {reached} | {read} | {work} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
