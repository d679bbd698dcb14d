"""The probe on another model: the tiny Stable Diffusion 3 of ``tiny_sd3.py``, by the limits from the demo's model.

    python benchmarks/tiny_sd3.py                 # once: the model
    python benchmarks/sd3_ground.py --jobs 1      # trains what is missing of seed 1, some minutes a run and core
    python benchmarks/sd3_ground.py --verdicts    # `flowgrpo-rc probe` on every setting with a result
    python benchmarks/sd3_ground.py --report      # writes the table of docs/gap_study.md; runs nothing

Its blocks, text encoders, VAE and timestep embedding are others than those that the limits were chosen on; pictures,
reward, batches, optimizer and window are the demo's. Each setting is held against the one with float32 rollouts of the
same kind of step. Resumable, as ``training_runs.py`` says.
"""

import argparse
import sys
from typing import Any

from gap_ground import PAGE, judged_rows, table
from gap_study import BYPASS, DECOUPLED, PRECISIONS, probed, read_verdicts
from learning import COMMON, LOSS, ROLLOUT
from tiny_sd3 import FOLDER, NO_T5_TOKENS, SCORES
from training_runs import HERE, Overrides, Study, load, run_missing, write_table

RESULTS = HERE / "results" / "sd3_ground.jsonl"
STEPS = 60

MODES: dict[str, Overrides] = {
    f"{precision}_{mode}_{clip}": {**correction, f"{LOSS}.clip_ratio": float(clip), **PRECISIONS[precision]}
    for precision, mode, correction, clip in (
        ("float32", "bypass", BYPASS, "1e-3"),
        ("fp8", "bypass", BYPASS, "1e-3"),
        ("bfloat16", "bypass", BYPASS, "2e-4"),
        ("fp8", "bypass", BYPASS, "2e-3"),
        ("fp8", "decoupled", DECOUPLED, "1e-3"),
    )
}
TWIN = "float32_bypass_1e-3"
MODEL: Overrides = {
    # Relative to the checkout, where runs are started: results are the same settings on every machine.
    "actor_rollout_ref.model.path": str(FOLDER.relative_to(HERE.parent)),
    f"{ROLLOUT}.pipeline.max_sequence_length": NO_T5_TOKENS,
}

SETTINGS: dict[str, Overrides] = {f"sde_{mode}": overrides for mode, overrides in MODES.items()} | {
    f"dance_sde_{mode}": {**MODES[mode], f"{ROLLOUT}.algo.sde_type": "dance_sde"} for mode in (TWIN, "fp8_bypass_2e-3")
}


def twin_of(setting: str) -> str:
    """The setting without a gap, of the same kind of step."""
    kind = next(kind for kind in ("dance_sde", "sde") if setting.startswith(f"{kind}_"))
    return f"{kind}_{TWIN}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--verdicts", action="store_true", help="run the probe on every setting with a result")
    parser.add_argument("--report", action="store_true", help=f"write the table of {PAGE.name}; runs nothing")
    arguments = parser.parse_args()
    if not arguments.report and not (FOLDER / SCORES).is_file():
        parser.error(f"{FOLDER} has no finished model; run benchmarks/tiny_sd3.py first")
    settings = [name for name in SETTINGS if arguments.only in name]
    study = Study(SETTINGS, COMMON | MODEL, RESULTS, STEPS)
    failed = 0
    if arguments.verdicts:
        probed(study, [name for name in load(settings, RESULTS) if not name.endswith(TWIN)])
    elif not arguments.report:
        failed = run_missing(study, settings, [1], arguments.jobs)
    found: list[dict[str, Any]] = judged_rows(load(settings, RESULTS), read_verdicts(RESULTS), twin_of)
    if arguments.report:
        write_table(PAGE, RESULTS, table(found))
    else:
        print(table(found))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
