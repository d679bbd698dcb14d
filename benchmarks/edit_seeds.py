"""Learning of the tiny editing model: held-out rewards before and after, over several seeds, with two controls.

    python benchmarks/edit_seeds.py                        # writes benchmarks/results/edit_seeds.json, run by run
    python benchmarks/edit_seeds.py --runs seed1 no_ocr    # these alone

Each run is the example's script in a process of its own. A run that the file has with the same settings is not run
again. The controls: ``no_ocr`` is rewarded for the style alone, ``shuffled_references`` for OCR and for the style of
another image's reference; both report the same two held-out rewards as the others. With --picture the held-out grids of
the first and the last step of ``seed42`` become the page's picture.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import describe

from flowgrpo_rc.report.summary import stack_pictures

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "examples" / "flowgrpo_trainer" / "run_tiny_kontext_edit.sh"
STYLE = HERE.parent / "examples" / "tiny_kontext" / "style_reward.py"
RESULTS = HERE / "results" / "edit_seeds.json"
PICTURE = HERE.parent / "docs" / "images" / "editing.png"
LOOKING = "reward.val_functions"
OWN = "reward.reward_functions"

RUNS: dict[str, list[str]] = {f"seed{seed}": [f"trainer.seed={seed}", f"data.seed={seed}"] for seed in (42, 1, 2)}
RUNS["no_ocr"] = ["reward.functions.ocr=0", f"{LOOKING}.ocr=true"]
RUNS["shuffled_references"] = [
    f"{OWN}.same_style.weight=0",
    f"{OWN}.shuffled_style.path={HERE / 'shuffled_style.py'}",
    f"{OWN}.shuffled_style.name=shuffled_style",
    f"{LOOKING}.same_style.path={STYLE}",
    f"{LOOKING}.same_style.name=same_style",
]


def train(overrides: Sequence[str], folder: Path) -> dict:
    """One run of the script in ``folder``; its held-out rewards by step, and its time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", str(SCRIPT), *overrides, f"trainer.default_local_dir={folder}"]
    subprocess.run(command, check=True, timeout=7200, env=environment)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "held_out": {
            part: {r["step"]: r[f"val/reward/{part}"] for r in rows if f"val/reward/{part}" in r}
            for part in ("ocr", "same_style")
        },
        "training": [r["reward/mean"] for r in rows if "reward/mean" in r],
        "training_seconds": sum(r["timing_s/step"] for r in rows if r["step"] > 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURE.name} from the run seed42")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run")
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for name in arguments.runs:
        overrides = [*RUNS[name], *arguments.overrides]
        named = [text.replace(f"{HERE.parent}/", "") for text in overrides]
        if done.get(name, {}).get("overrides") != named:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "run"
                done[name] = {"overrides": named, **train(overrides, folder), "machine": describe()}
                if arguments.picture and name == "seed42":
                    grids = sorted((folder / "samples").glob("step_*.png"))
                    stack_pictures(PICTURE, [grids[0], grids[-1]])
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(done, indent=1) + "\n")
        report(name, done[name])


def report(name: str, run: dict) -> None:
    """A line on the terminal."""
    curves = [" ".join(f"{value:.2f}" for value in curve.values()) for curve in run["held_out"].values()]
    print(f"{name:20} OCR {curves[0]}   style {curves[1]}   {run['training_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
