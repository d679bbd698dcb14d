"""What scoring while drawing saves: a step's wall time with a scorer as slow as the rollout, overlapped and serial.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json

Steps of the tiny Qwen-Image run. Every micro-batch of the rollout sleeps, and so does the scorer for each micro-batch,
equally long and much longer than anything is computed: so neither the number of cores nor other work on the machine
decides. ``ratio`` is the time from the rollout's begin to the end of the reward (timing_s/rollout + probe + reward)
over the slower of the two (timing_s/rollout, timing_s/reward_work). Serial steps take about twice the slower one;
overlapped ones wait for the last micro-batch alone.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import describe

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.rollout import diffusers_engine
from flowgrpo_rc.trainer import FlowGRPOTrainer

SCORER = """
import time

def sleeps(images, prompts, metadata, seconds):
    time.sleep(seconds)
    return images.reshape(len(images), -1).mean(1) / 255

sleeps.streams = True
"""
IMAGES = 16
PARTS = 8


class Sleeping(diffusers_engine.RequestSampler):
    """Draws, and then sleeps."""

    seconds = 0.0

    def sample(self, rows):
        found = super().sample(rows)
        time.sleep(self.seconds)
        return found


def run(folder: Path, overlap: bool, seconds: float, steps: int) -> list[dict[str, float]]:
    """The rows of so many steps, after one to warm up."""
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER)
    config = compose(
        "tiny_qwen_image_ocr",
        [
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.rollout.n={IMAGES // 4}",
            f"actor_rollout_ref.rollout.micro_batch_size={IMAGES // PARTS}",
            "actor_rollout_ref.rollout.pipeline.num_inference_steps=3",
            "actor_rollout_ref.rollout.algo.sde_window_range=[0,2]",
            "actor_rollout_ref.rollout.probe.images=0",
            f"reward.reward_functions.sleeps={{path: {scorer}, name: sleeps, seconds: {seconds}}}",
            f"reward.overlap={str(overlap).lower()}",
            "trainer.val_before_train=false",
            f"trainer.total_training_steps={steps + 1}",
            "data.val_files=null",
            f"trainer.default_local_dir={folder / 'run'}",
        ],
    )
    return FlowGRPOTrainer(config).fit().rows()[1:]


def ratio(row: dict[str, float]) -> float:
    """Of one step; see the head of this file."""
    together = sum(row.get(f"timing_s/{stage}", 0.0) for stage in ("rollout", "probe", "reward"))
    return together / max(row["timing_s/rollout"], row["timing_s/reward_work"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="sleep of a micro-batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    Sleeping.seconds = args.seconds
    diffusers_engine.RequestSampler = Sleeping  # type: ignore[misc]
    results = {"machine": describe(), "micro_batches": PARTS, "sleep_s": args.seconds, "steps": args.steps}
    for name, overlap in (("overlapped", True), ("serial", False)):
        with tempfile.TemporaryDirectory() as folder:
            rows = run(Path(folder), overlap, args.seconds, args.steps)
        found = [ratio(row) for row in rows]
        results[name] = {
            "ratio": statistics.median(found),
            "ratios": found,
            **{
                key: statistics.median(row[f"timing_s/{key}"] for row in rows)
                for key in ("rollout", "reward", "reward_work")
            },
        }
        print(f"{name}: {results[name]['ratio']:.3f} times the slower of rollout and scoring")
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
