"""The theory of the gap against measurement: share, cosine, drift and its decay with the width, on the demo's model.

    python benchmarks/gap_theory.py                  # measures, writes results/gap_theory.json and the figure
    python benchmarks/gap_theory.py --report         # draws the figure from the results; measures nothing

For rollouts in fp8 and in bfloat16, at clip bands of many widths, on the same images of the engine:

- the share of samples outside the clip band, counted, and expected of ``l ~ N(-K, 2K)``;
- the cosine of the gradients with and without the gap under random advantages, and ``sqrt(1 - share / 2)``;
- the drift from the sampled log ratios, averaged over advantages of +1 and -1, along the one from the law;
- the size of the drift, and ``phi(c / s) / phi(0)`` of a single log ratio of deviation ``s``.

Then ``--updates`` training steps in bypass mode at ``--clip``: what is left of the drift's direction while the actor
follows it and the engine follows the actor.
"""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import describe

from flowgrpo_rc.batch import Key
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.gap.probe import sample_and_rescore
from flowgrpo_rc.gap.research.drift import DriftMeter, resample
from flowgrpo_rc.gap.statistics import apply_limits
from flowgrpo_rc.loss import diffusion_loss_sums
from flowgrpo_rc.trainer import FlowGRPOTrainer

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gap_theory.json"
PLOT = HERE.parent / "docs" / "images" / "gap_theory.png"
LOSS = "actor_rollout_ref.actor.diffusion_loss"
RC = "algorithm.rollout_correction"
ENGINES = {
    "fp8": ["actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.quantization=fp8_emulated"],
    "bfloat16": ["actor_rollout_ref.rollout.dtype=bfloat16"],
}
WIDTHS = (1e-5, 5e-5, 1e-4, 2e-4, 3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 3e-3, 5e-3)
SEED = 3


def trainer_of(overrides: list[str], folder: str) -> FlowGRPOTrainer:
    """The demo in bypass mode without rejection, loaded."""
    plain = [f"{RC}.rollout_rs=null", f"{RC}.rollout_rs_threshold=null", f"{RC}.rollout_is=null"]
    quiet = [f"trainer.default_local_dir={folder}", "trainer.logger=[console]", f"trainer.seed={SEED}"]
    return FlowGRPOTrainer(compose("tiny_qwen_image_ocr", [*plain, *quiet, *overrides]))


def sampled_drift(trainer: FlowGRPOTrainer, mode: Any, batch: Any) -> torch.Tensor:
    """An image's mean drift from the log ratios that were sampled, under advantages of +1 and -1."""

    def loss(output: Any, data: Any) -> torch.Tensor:
        log_probs = output["log_probs"]
        named = {name: data[name].to(log_probs) for name in (Key.ROLLOUT_LOG_PROBS, Key.TIMESTEPS)}
        total = log_probs.new_zeros(())
        for sign in (1.0, -1.0):
            named[Key.ADVANTAGES] = torch.full_like(log_probs[:, 0], sign)
            total = total + diffusion_loss_sums(mode, output, named).loss_sum / 2
        return total / log_probs.shape[1]

    return trainer.run.actor.gradients(batch.trajectories, batch.conditioning, [loss])[0] / len(batch.trajectories)


def measure(engine: str, images: int) -> dict[str, Any]:
    """All widths on the same images."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of([*ENGINES[engine], f"{LOSS}.clip_ratio={WIDTHS[0]}"], f"{folder}/run")
        run = trainer.probed_run()
        batch = sample_and_rescore(run, images)
        possible = resample(batch.sample, SEED)
        assert batch.sample.kl is not None
        for width in WIDTHS:
            mode = with_clip(run.mode, width)
            meter = DriftMeter(mode, run.rollout.algo.sde_type, SEED)
            meter.add(run.actor, batch.trajectories, batch.scored, batch.conditioning)
            found = meter.result(0.95)
            by_law = torch.stack(meter.group_sums()).sum(0) / meter.images
            by_samples = sampled_drift(trainer, mode, batch)
            rows.append(
                {
                    "width": width,
                    "share": float(apply_limits(mode, batch.sample).beyond.double().mean()),
                    "share_expected": float(apply_limits(mode, possible).beyond.double().mean()),
                    "cosine": found.cosine,
                    "drift": found.value,
                    "low": found.interval.low,
                    "high": found.interval.high,
                    "sampled_along": float(by_samples @ by_law / (by_law @ by_law)) if found.value else None,
                }
            )
            print(engine, {name: value and round(value, 5) for name, value in rows[-1].items()}, flush=True)
        deviation = (2 * batch.sample.kl).sqrt() / batch.sample.to_nats
        trainer.run.engine.close()
    return {"rows": rows, "deviations": deviation.flatten().tolist(), "kl_nats": float(batch.sample.kl.mean())}


def with_clip(mode: Any, width: float) -> Any:
    """The mode with another clip band."""
    return replace(mode, diffusion_loss=replace(mode.diffusion_loss, clip_ratio=width))


def follow(engine: str, clip: float, updates: int, images: int) -> list[dict[str, float]]:
    """The drift before and after training steps: its size, the gap, and its direction against the first one's."""
    rows = []
    first = None
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*ENGINES[engine], f"{LOSS}.clip_ratio={clip}", "data.train_batch_size=8"]
        trainer = trainer_of([*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=4"], f"{folder}/run")
        run = trainer.probed_run()
        for step in range(updates + 1):
            if step:
                trainer.train_step()
            batch = sample_and_rescore(run, images)
            assert batch.sample.kl is not None
            meter = DriftMeter(run.mode, run.rollout.algo.sde_type, SEED)
            meter.add(run.actor, batch.trajectories, batch.scored, batch.conditioning)
            drift = torch.stack(meter.group_sums()).sum(0) / meter.images
            first = drift if first is None else first
            along = float(drift @ first / (drift.norm() * first.norm()))
            rows.append(
                {
                    "batches": step,
                    "drift": meter.result(0.95).value,
                    "kl_nats": float(batch.sample.kl.mean()),
                    "cosine_with_first": along,
                }
            )
            print(engine, "after", {name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
        trainer.run.engine.close()
    return rows


def draw(results: dict[str, Any], path: Path) -> None:
    """Theory as lines, measurement as marks."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.5), layout="constrained")
    colours = {"fp8": "#c53030", "bfloat16": "#2b6cb0"}
    share, cosine, along, size = axes.flatten()
    for engine, colour in colours.items():
        found = results[engine]
        rows = found["rows"]
        widths = [row["width"] for row in rows]
        share.plot(widths, [row["share_expected"] for row in rows], color=colour, label=f"{engine}, expected")
        share.plot(widths, [row["share"] for row in rows], "o", color=colour, markersize=4, label="counted")
        cosine.plot(widths, [math.sqrt(1 - row["share_expected"] / 2) for row in rows], color=colour)
        cosine.plot(widths, [row["cosine"] for row in rows], "o", color=colour, markersize=4)
        seen = [row for row in rows if row["drift"] > 0.05 * rows[0]["drift"]]
        along.plot([r["width"] for r in seen], [r["sampled_along"] for r in seen], "o", color=colour, markersize=4)
        deviations = torch.tensor(found["deviations"], dtype=torch.float64)
        shape = [float(torch.exp(-((width / deviations) ** 2) / 2).mean()) for width in widths]
        size.plot(widths, [rows[0]["drift"] * value / shape[0] for value in shape], color=colour)
        values = [row["drift"] for row in rows]
        bars = [[r["drift"] - r["low"] for r in rows], [r["high"] - r["drift"] for r in rows]]
        size.errorbar(widths, values, yerr=bars, fmt="o", color=colour, markersize=4, capsize=2)
    share.set(ylabel="share outside the clip band")
    share.legend()
    cosine.set(ylabel="cosine of gradients with, without gap")
    along.axhline(1.0, color="0.4", linewidth=1)
    along.set(ylabel="sampled drift along the expected one", ylim=(0, 2))
    size.set(ylabel="drift, in gradients of one step")
    for one in axes.flatten():
        one.set(xscale="log", xlabel="half width of the clip band")
        one.grid(alpha=0.3)
    figure.suptitle("Lines: l ~ N(-K, 2K); marks: measured on the same images", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64, help="at every place of the window (%(default)s)")
    parser.add_argument("--updates", type=int, default=6, help="training steps to follow (%(default)s)")
    parser.add_argument("--report", action="store_true", help="draw the figure; measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        results: dict[str, Any] = {"machine": describe(), "images": arguments.images}
        results |= {engine: measure(engine, arguments.images) for engine in ENGINES}
        clips = {"fp8": 1e-3, "bfloat16": 1e-4}
        results["followed"] = {
            engine: follow(engine, clip, arguments.updates, arguments.images) for engine, clip in clips.items()
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw(json.loads(RESULTS.read_text()), PLOT)
    print(f"Written: {PLOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
