"""Images learned from more than once: the demo's model and engine, several seeds, a second OCR engine.

    python benchmarks/tiny_sd3.py                         # once: the model of ``sd3_...``
    python benchmarks/replay.py --jobs 2 --seeds 1,2,3    # runs what is missing, then prints a table
    python benchmarks/replay.py --report                  # writes tables and figure of docs/replay.md; runs nothing

``once`` is the demo in bypass mode, for 60 batches; ``whole_...`` run the demo's 150. ``epochs`` learns twice from
every batch at once. ``replay_N`` takes, for each optimizer step from new images, one from the last N batches,
``replay_N_75`` three (a buffer of two batches has two); the ratio to the rollout's policy is clipped, as bypass mode
does. ``current_N...`` learn in decoupled mode, with the actor as the old policy of what is replayed: without
correction, with ``weights`` of whole windows, with ``rejection``, with both, or with ``auto``, both with a band that
follows the gap. ``awm...`` learn from clean images with the settings of ``clean_objectives.py``; there the old policy's
matching errors are clipped. ``scouts_N`` learn from the extremes of N images a prompt (``random``: from any),
``redrawn`` from those that an fp8 engine's scouts have chosen, and ``corrected`` with weights from the fp8 engine's
own. ``sd3_...`` has another model, the tiny Stable Diffusion 3. The second OCR engine reads as in
``cheap_rollouts.py``. Resumable, as ``training_runs.py`` says.
"""

import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from cheap_rollouts import FULL, UPDATE
from clean_objectives import EACH, batches_to, objective
from learning import COMMON, DECOUPLED_IS, FP8, ROLLOUT, correction, plot_curves
from sd3_ground import MODEL
from second_ocr import held_out_numbers, second_ocr
from tiny_sd3 import FOLDER, OPTIONS
from training_runs import CONFIG, HERE, Overrides, Study, by_seed, load, run_missing, study_arguments, write_table

RESULTS = HERE / "results" / "replay.jsonl"
PAGE = HERE.parent / "docs" / "replay.md"
PLOT = HERE.parent / "docs" / "images" / "replay.png"
STEPS = 60
BATCHES = (1, 2, 4, 8)
BAND = "0.999_1.001"
WHOLE: Overrides = {"trainer.total_training_steps": 150}
EPOCHS: Overrides = {"actor_rollout_ref.actor.ppo_epochs": 2}


def replay(batches: int, **settings: Any) -> Overrides:
    """A buffer of so many batches."""
    return {"algorithm.replay.batches": batches} | {f"algorithm.replay.{name}": v for name, v in settings.items()}


def current(batches: int, *, weights: str | None = None, band: str | None = None) -> Overrides:
    """Decoupled mode, with the current policy as the old one of what is replayed."""
    return correction(bypass=False, weights=weights, band=band) | replay(batches, old_policy="current")


def scouts(number: int, **settings: Any) -> Overrides:
    """So many scouts a prompt, of which 12 are learned from."""
    return {f"{ROLLOUT}.scout.n": number} | {f"{ROLLOUT}.scout.{name}": value for name, value in settings.items()}


AWM = objective("awm")
IN_FP8 = {"redraw": True, "engine.quantization": "fp8_emulated"}
SETTINGS: dict[str, Overrides] = {
    "once": FULL,
    "epochs": FULL | EPOCHS,
    **{f"replay_{n}": FULL | replay(n) for n in BATCHES},
    **{f"replay_{n}_75": FULL | replay(n, share=0.75) for n in BATCHES[1:]},
    "whole_once": FULL | WHOLE,
    "whole_replay_2_75": FULL | replay(2, share=0.75) | WHOLE,
    "replay_4_spread": FULL | replay(4, select="spread"),
    **{f"current_{n}": current(n) for n in BATCHES},
    **{f"current_{n}_weights": current(n, weights="sequence") for n in BATCHES},
    **{f"current_{n}_rejection": current(n, band=BAND) for n in BATCHES},
    **{f"current_{n}_both": current(n, weights="sequence", band=BAND) for n in BATCHES},
    **{f"current_{n}_auto": current(n, weights="sequence", band="auto") for n in BATCHES},
    **{f"scouts_{n}": FULL | scouts(n) for n in (24, 48)},
    "scouts_24_random": FULL | scouts(24, select="random"),
    **{f"scouts_{n}_redrawn": FULL | scouts(n, **IN_FP8) for n in (24, 48)},
    **{f"scouts_{n}_corrected": DECOUPLED_IS | FP8 | scouts(n) for n in (24, 48)},
    "awm": AWM,
    "awm_epochs": AWM | EPOCHS,
    **{f"awm_replay_{n}": AWM | replay(n) for n in BATCHES},
    "awm_replay_4_75": AWM | replay(4, share=0.75),
    **{f"awm_current_{n}": AWM | current(n) for n in BATCHES},
    **{f"awm_current_{n}_weights": AWM | current(n, weights="sequence") for n in BATCHES},
}
SD3 = ("once", "replay_2_75", "current_4", "current_4_both", "scouts_24_redrawn")
SETTINGS |= {f"sd3_{name}": MODEL | SETTINGS[name] for name in SD3}
CORRECTIONS = {
    "": "none",
    "_weights": "weights",
    "_rejection": "rejection",
    "_both": "weights and rejection",
    "_auto": "weights, rejection by `auto`",
}
GRID = {f"current_{n}{correction}" for n in BATCHES for correction in CORRECTIONS}
"""Settings of a table of their own."""
SHOWN = {
    "once": ("every image once", "#b2182b"),
    "epochs": ("two epochs", "#4d4d4d"),
    "replay_2_75": ("two batches replayed", "#f4a582"),
    "awm": ("AWM, every image once", "#74add1"),
    "awm_replay_2": ("AWM, two batches replayed", "#08519c"),
}
"""Settings of the figure, with their labels and colours."""
HEADER = (
    "| setting | held out after 20, 40, 60 batches, by seed | batches drawn to .85 | forwards to .85 "
    "| replayed steps with a gradient, last batch | read right (own OCR / tesseract) |"
    "\n|---|---|---|---|---|---|"
)


def study(**model: Any) -> Study:
    """The study; ``model`` as for ``second_ocr``."""
    common = COMMON | {"trainer.test_freq": 5}
    return Study(SETTINGS, common, RESULTS, STEPS, partial(after_training, **model))


def after_training(folder: Path, **model: Any) -> dict[str, Any]:
    """Readings of the final adapter's images, and replay figures of the last batches."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    replayed = {name: value for row in rows[-10:] for name, value in row.items() if name.startswith("replay/")}
    return {"drawn": second_ocr(folder / "lora", held_out_numbers() * EACH, **model), "replayed_last": replayed}


def forwards(setting: str) -> float:
    """Transformer forwards of an image that is learned from and batch, a backward counting as one."""
    from flowgrpo_rc.cli.compose import compose

    config = compose(CONFIG, study().overrides(setting, 1))
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    drawing = sum(rollout.forwards_per_image(clean=actor.diffusion_loss.objective.clean))
    scouts = rollout.drawn / rollout.n
    drawing = drawing + scouts * rollout.scout_steps if rollout.scout.redraw else drawing * scouts
    minis = config.mini_batches
    batches = config.trainer.total_training_steps or STEPS
    replayed = config.algorithm.replay.optimizer_steps(batches, minis, rollout.staleness) / (batches * minis)
    return drawing + UPDATE * (actor.ppo_epochs + replayed)


def main() -> int:
    arguments = study_arguments(__doc__, SETTINGS)
    if arguments.report:
        runs = load(SETTINGS, RESULTS)
        write_table(PAGE, RESULTS, table({name: group for name, group in runs.items() if name not in GRID}))
        write_table(PAGE, RESULTS.with_stem("replay_grid"), grid(runs))
        plot_curves(runs, {name: how for name, how in SHOWN.items() if name in runs}, PLOT, unit="batches drawn")
        return 0
    demo = [name for name in arguments.only if not name.startswith("sd3_")]
    sd3 = [name for name in arguments.only if name.startswith("sd3_")]
    failed = run_missing(study(), demo, arguments.seeds, arguments.jobs)
    failed += run_missing(study(path=str(FOLDER), options=OPTIONS), sd3, arguments.seeds, arguments.jobs)
    print(table(load(SETTINGS, RESULTS)))
    return 1 if failed else 0


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        held_out = by_seed([run["held_out"][step] for step in ("20", "40", "60")] for run in group)
        reached = [batches_to(run, 0.85) for run in group]
        whole = [number for number in reached if number is not None]
        read = {name: fmean(run["drawn"][f"{name}_exact"] for run in group) for name in ("reward_engine", "tesseract")}
        cells = [
            held_out,
            ", ".join("never" if number is None else f"{number:.0f}" for number in reached),
            f"{fmean(whole) * forwards(setting):.0f}" if len(whole) == len(group) else "",
            mean_of(group, "replay/teaching_fraction"),
            f"{read['reward_engine']:.2f} / {read['tesseract']:.2f}",
        ]
        lines.append(f"| `{setting}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def grid(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each correction of ``current_N``, a column for each N."""
    lines = [f"| correction, batches in the buffer | {' | '.join(map(str, BATCHES))} |"]
    lines.append("|---" * (len(BATCHES) + 1) + "|")
    for suffix, name in CORRECTIONS.items():
        cells = [grid_cell(runs.get(f"current_{n}{suffix}", [])) for n in BATCHES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def grid_cell(group: list[dict[str, Any]]) -> str:
    """Held out at the end by seed, their mean, and the share that tesseract reads."""
    if not group:
        return ""
    ends = [run["final_held_out"] for run in group]
    read = fmean(run["drawn"]["tesseract_exact"] for run in group)
    shown = [f"{value:.2f}".lstrip("0") for value in (*ends, fmean(ends), read)]
    return f"{' '.join(shown[:-2])}: {shown[-2]} ({shown[-1]})"


def mean_of(group: list[dict[str, Any]], name: str) -> str:
    """Mean of a metric over the last batch of all runs; empty where they have none."""
    values = [run["replayed_last"][name] for run in group if name in run["replayed_last"]]
    return f"{fmean(values):.2f}" if values else ""


if __name__ == "__main__":
    sys.exit(main())
