"""The demo's claim: held-out reward of the tiny model before and after, over several seeds, with a control.

    python benchmarks/demo_seeds.py --out benchmarks/results/demo_seeds.json

Runs the demo once a seed (training order, adapter start and rollout noise all change), and once with rewards dealt to
the wrong images, which must not climb. With --second-ocr, images of the first seed's adapter and of the base model
are also read by tesseract, which had no part in training. Each run is a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe
from second_ocr import second_ocr

HERE = Path(__file__).resolve().parent


def demo(folder: Path, *overrides: str) -> dict:
    """One run of the demo; its held-out rewards by step and its training time."""
    command = [sys.executable, "-m", "flowgrpo_rc.cli.main", "demo", f"trainer.default_local_dir={folder}", *overrides]
    subprocess.run(command, check=True, timeout=1800)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "held_out": {r["step"]: r["val/reward/mean"] for r in rows if "val/reward/mean" in r},
        "training": [r["reward/mean"] for r in rows if "reward/mean" in r],
        "gap": [r["actor/log_ratio_abs_mean_first"] for r in rows if "actor/log_ratio_abs_mean_first" in r],
        "training_seconds": sum(r["timing_s/step"] for r in rows if r["step"] > 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "demo_seeds.json")
    parser.add_argument("--no-control", action="store_true", help="leave out the run with shuffled rewards")
    parser.add_argument("--second-ocr", action="store_true", help="cross-check with tesseract (must be installed)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run")
    arguments = parser.parse_args()
    result: dict = {"machine": describe(), "overrides": arguments.overrides, "seeds": {}}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for seed in arguments.seeds:
            overrides = [*arguments.overrides, f"trainer.seed={seed}", f"data.seed={seed}"]
            result["seeds"][seed] = demo(root / f"seed{seed}", *overrides)
        if not arguments.no_control:
            control = (
                "reward.functions.ocr=0",
                f"reward.custom_reward_function.path={HERE / 'shuffled_ocr.py'}",
            )
            result["control"] = demo(root / "control", *arguments.overrides, *control)
        if arguments.second_ocr:
            numbers = [f"{n:02d}" for n in range(100)] * 3
            adapter = root / f"seed{arguments.seeds[0]}" / "lora"
            result["second_ocr"] = {"before": second_ocr(None, numbers), "after": second_ocr(adapter, numbers)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1))
    report(result)


def report(result: dict) -> None:
    """The table on the terminal."""
    runs = {f"seed {s}": r for s, r in result["seeds"].items()} | {k: result[k] for k in ("control",) if k in result}
    for name, run in runs.items():
        steps = list(run["held_out"].values())
        curve = " ".join(f"{v:.2f}" for v in steps)
        print(f"{name:10} {steps[0]:.3f} -> {steps[-1]:.3f} in {run['training_seconds']:.0f} s   {curve}")
    for when, figures in result.get("second_ocr", {}).items():
        own = figures["reward_engine_exact"]
        print(f"{when}: exact by the reward's engine {own:.2f}, by tesseract {figures['tesseract_exact']:.2f}")


if __name__ == "__main__":
    main()
