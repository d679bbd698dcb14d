"""Objectives on clean images beside FlowGRPO: the demo's model and engine, several seeds, a control, a second OCR.

    python benchmarks/clean_objectives.py --jobs 2 --seeds 1,2,3    # runs what is missing, then prints a table
    python benchmarks/clean_objectives.py --report    # writes table and figure of docs/clean_images.md; runs nothing

``flow_grpo`` is the demo as it is, in bypass mode. The others have another objective, one optimizer step a batch, twice
the learning rate, and noise levels of .3 and more. ``awm_as_flow_grpo`` is the demo with another objective alone,
``flow_grpo_one_step`` has the optimizer settings of the others. ``awm_own_noise`` shares no noise among a prompt's
images. ``awm_lag`` draws every batch with the adapter of eight batches before, ``awm_lag_1`` to ``_4`` of fewer;
``..._corrected`` has importance weights, ``awm_lag_places`` of four places instead of two, ``awm_lag_own_noise`` of
noise that images do not share. ``awm_shuffled`` deals the rewards to the wrong images. Each final adapter
then draws the held-out numbers in plain diffusers for two OCR engines: the reward's, and tesseract (must be installed),
which had no part in training.
Resumable, as ``training_runs.py`` says.
"""

import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from learning import COMMON, DECOUPLED_IS, LOSS, NONE, RC, ROLLOUT, plot_curves
from machine import describe
from second_ocr import held_out_numbers, second_ocr
from training_runs import (
    HERE,
    Overrides,
    Study,
    by_seed,
    load,
    read_results,
    run_missing,
    study_arguments,
    write_results,
    write_table,
)

RESULTS = HERE / "results" / "clean_objectives.jsonl"
PAGE = HERE.parent / "docs" / "clean_images.md"
PLOT = HERE.parent / "docs" / "images" / "clean_images.png"
ACTOR = "actor_rollout_ref.actor"
STEPS = 150
STEP_FORWARDS = 6
"""Denoising steps of an image."""
EACH = 12
"""Images of every held-out number that both OCR engines read."""


ONE_STEP: Overrides = {f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.optim.lr": 2e-3}


def objective(name: str, **options: float) -> Overrides:
    """An objective on clean images, without rollout correction."""
    settings = ONE_STEP | {f"{ACTOR}.clean.range": [0.3, 1.0]}
    return NONE | settings | {f"{LOSS}.loss_mode": name} | {f"{LOSS}.{key}": value for key, value in options.items()}


SHUFFLED: Overrides = {
    "reward.functions.ocr": 0,
    "reward.custom_reward_function.path": "benchmarks/shuffled_ocr.py",
}


def late(batches: int) -> Overrides:
    """Every batch is drawn with the adapter of this many batches before."""
    return {f"{ROLLOUT}.adapter_lag": batches}


SETTINGS: dict[str, Overrides] = {
    "awm": objective("awm"),
    "flow_grpo": {f"{RC}.bypass_mode": True},
    "diffusion_nft": objective("diffusion_nft", mix_beta=0.1),
    "awm_as_flow_grpo": {**NONE, f"{LOSS}.loss_mode": "awm"},
    "flow_grpo_one_step": {f"{RC}.bypass_mode": True, **ONE_STEP},
    "awm_own_noise": objective("awm") | {f"{ACTOR}.clean.shared_noise": False},
    "awm_lag": objective("awm") | late(8),
    "awm_lag_corrected": objective("awm") | DECOUPLED_IS | late(8),
    "awm_lag_places": objective("awm") | DECOUPLED_IS | late(8) | {f"{ACTOR}.clean.places": 4},
    "awm_lag_own_noise": objective("awm") | DECOUPLED_IS | late(8) | {f"{ACTOR}.clean.shared_noise": False},
    "awm_lag_4": objective("awm") | late(4),
    "awm_lag_4_corrected": objective("awm") | DECOUPLED_IS | late(4),
    "awm_lag_2": objective("awm") | late(2),
    "awm_lag_2_corrected": objective("awm") | DECOUPLED_IS | late(2),
    "awm_lag_1": objective("awm") | late(1),
    "awm_lag_1_corrected": objective("awm") | DECOUPLED_IS | late(1),
    "awm_float32": {**objective("awm"), f"{ROLLOUT}.dtype": "float32"},
    "awm_fp8": {**objective("awm"), f"{ROLLOUT}.quantization": "fp8_emulated"},
    "dpo": objective("dpo", dpo_beta=100.0),
    "awm_shuffled": objective("awm") | SHUFFLED,
}


SHOWN = {
    "flow_grpo": ("FlowGRPO", "#b2182b"),
    "awm": ("AWM", "#08519c"),
    "diffusion_nft": ("DiffusionNFT", "#4d4d4d"),
}
"""Settings of the figure, with their labels and colours."""


def after_training(folder: Path) -> dict[str, Any]:
    """Readings of the final adapter's images."""
    return {"drawn": second_ocr(folder / "lora", held_out_numbers() * EACH)}


def base_result() -> dict[str, Any]:
    """The images of the model before training, as a result."""
    drawn = second_ocr(None, held_out_numbers() * EACH)
    return {"setting": "base", "seed": 0, "overrides": [], "drawn": drawn, "machine": describe()}


def forwards(setting: str) -> float:
    """Transformer forwards of an image and batch, a backward counting as one: drawing, and forward and backward of two
    SDE steps or places. Importance weights, or the second of two optimizer steps, add a scoring pass."""
    if setting == "dpo":
        return STEP_FORWARDS + 2 / 12 * 2 * 3  # best and worst of twelve, with a forward of the base
    return STEP_FORWARDS + 2 * 2 + (2 if "corrected" in setting else setting == "awm_as_flow_grpo")


def main() -> int:
    arguments = study_arguments(__doc__, SETTINGS)
    if arguments.report:
        runs = load(["base", *SETTINGS], RESULTS)
        write_table(PAGE, RESULTS, table(runs))
        plot_curves(
            runs, SHOWN, PLOT, unit="transformer forwards an image, added up over the batches", per_step=forwards
        )
        return 0
    study = Study(SETTINGS, COMMON | {"trainer.test_freq": 10}, RESULTS, STEPS, after_training)
    if not load(["base"], RESULTS):
        write_results(RESULTS, [*read_results(RESULTS), base_result()])
    failed = run_missing(study, arguments.only, arguments.seeds, arguments.jobs)
    print(table(load(["base", *SETTINGS], RESULTS)))
    return 1 if failed else 0


NORM = "actor/velocity_norm"
HEADER = (
    "| setting | held out after 30, 60, 150 batches, by seed | batches to .85 | forwards to .85 "
    "| read right (own OCR / tesseract) | velocity norm, mean of the run |\n|---|---|---|---|---|---|"
)


def batches_to(run: dict[str, Any], reward: float) -> float | None:
    """Batches until this held-out reward, linear between the validations; ``None`` if it is never reached."""
    curve = [(int(step), value) for step, value in run["held_out"].items()]
    for (before, low), (after, high) in pairwise(curve):
        if low < reward <= high:
            return before + (after - before) * (reward - low) / (high - low)
    return None


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        trained = [run for run in group if "held_out" in run]
        cells = [by_seed([run["held_out"][step] for step in ("30", "60", "150")] for run in trained)]
        reached = [batches_to(run, 0.85) for run in trained]
        cells.append(", ".join("never" if number is None else f"{number:.0f}" for number in reached))
        whole = [number for number in reached if number is not None]
        cells.append(f"{fmean(whole) * forwards(setting):.0f}" if whole else "")
        cells.append(
            " / ".join(
                f"{fmean(run['drawn'][name] for run in group):.2f}"
                for name in ("reward_engine_exact", "tesseract_exact")
            )
        )
        norms = [run["metrics"][NORM] for run in trained if NORM in run["metrics"]]
        cells.append(f"{fmean(norms):.2f}" if norms else "")
        lines.append(f"| `{setting}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
