"""A step's time by stage, and the time that bypass mode saves: ratios between runs of the same process.

    python benchmarks/step_time.py --out benchmarks/results/step_time.json

Steps of the demo in three modes alternate in one process; the figures are medians of pairwise ratios. "decoupled"
scores only the mini-batches whose old policy the update does not supply itself (``actor.score=auto``). The share of a
step that is model compute (transformer, VAE) is measured around those modules.

    python benchmarks/step_time.py --sizes 8,32,128 --out benchmarks/results/step_shares.json

What a step spends, for batches of so many images, outside model compute and reward, and on the loss and the rollout
correction alone (forward; decoupled, everything scored: the mode that corrects most).

    python benchmarks/step_time.py --calibration --steps 40 --out benchmarks/results/calibration_share.json \
        actor_rollout_ref.rollout.quantization=fp8_emulated

What the probe's forwards take of a step, and what all the rest of measuring, calibrating and guarding takes (bypass
mode with ``clip_ratio=auto``, ``rollout_rs_threshold=auto`` and ``guard=fallback``): the calibrated rejection counts
with what it takes longer than one bound for all. With fp8 weights the bounds differ
between timesteps, once enough of each has been seen.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from machine import describe

from flowgrpo_rc import batch as batch_module
from flowgrpo_rc.actor import actor as actor_module
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.correction.plan import CorrectionPlan
from flowgrpo_rc.rollout import DiffusersEngine
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer import trainer as trainer_module
from flowgrpo_rc.trainer.timer import TRAINING_STAGES

MODES = {
    "bypass": ("algorithm.rollout_correction.bypass_mode=true",),
    "decoupled": ("algorithm.rollout_correction.bypass_mode=false", "actor_rollout_ref.actor.score=auto"),
    "decoupled-all-scored": ("algorithm.rollout_correction.bypass_mode=false", "actor_rollout_ref.actor.score=always"),
}
CALIBRATED = (
    *MODES["bypass"],
    "actor_rollout_ref.actor.diffusion_loss.clip_ratio=auto",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=auto",
    "algorithm.rollout_correction.guard=fallback",
)

_CORRECT = ((actor_module, "correct_old_policy"), (trainer_module, "correct_old_policy"))


class ModelClock:
    """Seconds spent inside the forwards of some modules and in backward passes."""

    def __init__(self, trainer: FlowGRPOTrainer) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        run = trainer.run
        assert isinstance(run.engine, DiffusersEngine), "these figures are the diffusers engine's"
        for transformer in {run.engine.transformer, run.actor.transformer}:  # one, where they share it
            self._wrap(transformer, "forward", "transformer")
        self._wrap(run.model.pipe.vae, "decode", "vae")
        self._wrap(run.accelerator, "backward", "backward")

    def watch_loss(self) -> None:
        """Also time the loss and the correction, in the actor and the trainer that use them."""
        self._wrap(actor_module, "diffusion_loss_sums", "loss")
        for module, name in _CORRECT:
            self._wrap(module, name, "correction")

    @contextmanager
    def watching_rejection(self) -> Iterator[list[int]]:
        """Time the calibrated rejection, and one bound for all on the same rows; gives the number of bounds by call."""
        original = batch_module.correct_and_measure
        groups: list[int] = []

        def twice(*log_probs_and_mask, plan, row_bounds, **others):
            groups.append(len(row_bounds.unique()))
            fixed = with_one_bound(plan, float(row_bounds.max()))
            start = self._now()
            original(*log_probs_and_mask, plan=fixed, **others)
            between = self._now()
            result = original(*log_probs_and_mask, plan=plan, row_bounds=row_bounds, **others)
            self.seconds["one_bound"] += between - start
            self.seconds["calibrated"] += self._now() - between
            return result

        batch_module.correct_and_measure = twice
        try:
            yield groups
        finally:
            batch_module.correct_and_measure = original

    def _wrap(self, owner: object, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*args, **kwargs):
            start = self._now()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[label] += self._now() - start

        setattr(owner, name, timed)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by name."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


def with_one_bound(plan: CorrectionPlan, bound: float) -> CorrectionPlan:
    """The plan with a number in place of ``auto``."""
    (criterion,) = plan.criteria
    lower = -bound if criterion.statistic == "k1" else criterion.lower
    return replace(plan, criteria=(replace(criterion, upper=bound, lower=lower, calibrated=False),))


def measure(steps: int, overrides: list[str]) -> dict[str, list[dict[str, float]]]:
    """``steps`` alternating pairs of steps; seconds per stage and per module of each."""
    samples: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            mode: FlowGRPOTrainer(
                compose("tiny_qwen_image_ocr", [*settings, f"trainer.default_local_dir={folder}/{mode}", *overrides])
            )
            for mode, settings in MODES.items()
        }
        clocks = {mode: ModelClock(trainer) for mode, trainer in trainers.items()}
        for index in range(steps + 1):
            for mode, trainer in trainers.items():
                trainer.train_step()
                taken = {**trainer.timer.take(), **{f"model/{k}": v for k, v in clocks[mode].take().items()}}
                if index > 0:  # the first step warms up
                    samples[mode].append(taken)
    return samples


def shares(images: int, steps: int, overrides: list[str]) -> dict[str, float]:
    """Median shares of a step with so many images, 8 a prompt, in two optimizer steps where there are two prompts."""
    prompts = images // 8
    settings = [
        *MODES["decoupled-all-scored"],
        f"data.train_batch_size={prompts}",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, prompts // 2)}",
    ]
    originals = [(m, n, getattr(m, n)) for m, n in ((actor_module, "diffusion_loss_sums"), *_CORRECT)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = FlowGRPOTrainer(
            compose("tiny_qwen_image_ocr", [*settings, f"trainer.default_local_dir={folder}/run", *overrides])
        )
        clock = ModelClock(trainer)
        clock.watch_loss()
        try:
            for index in range(steps + 1):
                trainer.train_step()
                times = trainer.timer.take()
                inside = clock.take()
                if index > 0:
                    rows.append((times, inside))
        finally:
            for module, name, original in originals:
                setattr(module, name, original)
    model = ("transformer", "vae", "backward")

    def share(of) -> float:
        return statistics.median(of(times, inside) / times["timing_s/step"] for times, inside in rows)

    return {
        "step_s": statistics.median(times["timing_s/step"] for times, _ in rows),
        "model": share(lambda _, inside: sum(inside.get(name, 0.0) for name in model)),
        "reward": share(lambda times, _: times["timing_s/reward"]),
        "loss_and_correction": share(lambda _, inside: inside["loss"] + inside["correction"]),
    }


def report_calibration(steps: int, overrides: list[str]) -> dict[str, float]:
    """Prints and returns median shares of a step: the probe's forwards, and everything else around them."""
    forwards = []
    others = []
    with tempfile.TemporaryDirectory() as folder:
        config = compose("tiny_qwen_image_ocr", [*CALIBRATED, f"trainer.default_local_dir={folder}/run", *overrides])
        trainer = FlowGRPOTrainer(config)
        run = trainer.run
        clock = ModelClock(trainer)
        clock._wrap(trainer.rescoring, "rescore", "probe_forwards")
        for bands, name in ((run.clip_bands, "widths"), (run.rejection_bands, "bounds")):
            clock._wrap(bands, name, "bands")
        clock._wrap(run, "guard", "guard")  # called as run.guard(...)
        with clock.watching_rejection() as groups:
            for index in range(steps + 1):
                trainer.train_step()
                times = trainer.timer.take()
                inside = clock.take()
                if index > 0:
                    step = times["timing_s/step"] + inside["guard"] - inside["one_bound"]  # the guard ends a step
                    forwards.append(inside["probe_forwards"] / step)
                    around = times["timing_s/probe"] - inside["probe_forwards"] + inside["bands"] + inside["guard"]
                    others.append((around + inside["calibrated"] - inside["one_bound"]) / step)
    result = {
        "probe_forwards": statistics.median(forwards),
        "everything_else": statistics.median(others),
        "bounds_a_micro_batch": statistics.fmean(groups),
    }
    print(
        f"of a step: the probe's forwards {result['probe_forwards']:.2%}, the rest {result['everything_else']:.3%}; "
        f"{result['bounds_a_micro_batch']:.1f} bounds a micro-batch"
    )
    return result


def report_shares(sizes: list[int], steps: int, overrides: list[str]) -> dict[str, dict[str, float]]:
    """Prints and returns ``shares`` for every size."""
    result = {}
    for images in sizes:
        row = result[str(images)] = shares(images, steps, overrides)
        row["elsewhere"] = 1 - row["model"] - row["reward"]
        print(
            f"{images:4} images: step {row['step_s']:.2f} s, model {row['model']:.1%}, reward {row['reward']:.1%}, "
            f"elsewhere {row['elsewhere']:.1%}; loss and correction {row['loss_and_correction']:.2%}",
            flush=True,
        )
    return result


def summarise(samples: dict[str, list[dict[str, float]]]) -> dict:
    """Medians per stage, and the ratios."""
    stages = {
        mode: {s: statistics.median(row[f"timing_s/{s}"] for row in rows) for s in (*TRAINING_STAGES, "step")}
        for mode, rows in samples.items()
    }
    shares = {
        mode: statistics.median(
            sum(v for k, v in row.items() if k.startswith("model/")) / row["timing_s/step"] for row in rows
        )
        for mode, rows in samples.items()
    }
    everything = samples["decoupled-all-scored"]

    def over_all_scored(mode: str) -> float:
        pairs = zip(samples[mode], everything, strict=True)
        return statistics.median(row["timing_s/step"] / base["timing_s/step"] for row, base in pairs)

    return {
        "median_seconds": stages,
        "model_compute_share": shares,
        "step_over_all_scored": {mode: over_all_scored(mode) for mode in ("bypass", "decoupled")},
        "score_share_of_all_scored": statistics.median(r["timing_s/score"] / r["timing_s/step"] for r in everything),
        "correct_share_of_all_scored": statistics.median(
            r["timing_s/correct"] / r["timing_s/step"] for r in everything
        ),
    }


def report_ratios(steps: int, overrides: list[str]) -> dict:
    """Prints and returns ``summarise``."""
    result = summarise(measure(steps, overrides))
    print(f"{'stage':10} " + " ".join(f"{mode:>21}" for mode in MODES) + f"   seconds, median of {steps} steps")
    for stage in (*TRAINING_STAGES, "step"):
        values = (result["median_seconds"][mode][stage] for mode in MODES)
        print(f"{stage:10} " + " ".join(f"{v:21.4f}" for v in values))
    shares = result["model_compute_share"]
    print(f"{'model':10} " + " ".join(f"{shares[mode]:21.1%}" for mode in MODES) + "   compute, share of the step")
    for mode, ratio in result["step_over_all_scored"].items():
        print(f"step time of {mode} over decoupled with everything scored: {ratio:.3f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sizes", help="images per batch, comma-separated: shares of a step instead of ratios")
    parser.add_argument("--calibration", action="store_true", help="what measuring, calibrating and guarding take")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both modes")
    arguments = parser.parse_args()
    if arguments.calibration:
        result = {"machine": describe(), **report_calibration(arguments.steps, arguments.overrides)}
    elif arguments.sizes:
        sizes = [int(size) for size in arguments.sizes.split(",")]
        result = {"machine": describe(), "sizes": report_shares(sizes, arguments.steps, arguments.overrides)}
    else:
        result = {"machine": describe(), **report_ratios(arguments.steps, arguments.overrides)}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
