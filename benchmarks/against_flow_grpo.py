"""A step of training beside one of flow_grpo's own loop, on equal work: CPU and wall seconds, and peak memory.

    git clone https://github.com/yifan123/flow_grpo
    python benchmarks/against_flow_grpo.py --flow-grpo flow_grpo --out benchmarks/results/against_flow_grpo.json

flow_grpo's ``scripts/train_sd3.py`` is read from the clone that ``--flow-grpo`` names and executed as it is, without
its validation; prompts and rewards are supplied, and packages that it names and does not need for this (absl, wandb)
are stood in for. Both sides train the same random Stable Diffusion 3 with a LoRA of rank 32 on the same eight layers of
every block, with as many prompts, images, denoising steps (all stochastic, all trained) and images a micro-batch, in
one optimizer step, each in a process of its own with one thread. Their steps alternate; a ratio is that of one pair,
theirs over ours, so that above 1 this package is faster. First both score one batch of flow_grpo's, and have to agree.

``sampling`` ends where the update begins: prompts, rollout, reward and advantages. In bfloat16 flow_grpo computes under
autocast with weights in float32, and so does the actor here; the engine is in bfloat16. Further settings of this
package's side can follow: ``actor_rollout_ref.model.dtype=bfloat16``.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from machine import describe

TESTS = Path(__file__).parents[1] / "tests"
GROUP = 4
"""Images of a prompt, and of a micro-batch."""
LENGTH = 128
"""Tokens of the T5, as ``train_sd3.py`` has them."""
CLIP_TOKENS = 77
NOISE = 0.7
GUIDANCE = 4.5
PROMPTS = [f"a sign that says {number}" for number in range(16)]
ALIKE = 1e-5
"""Largest difference of the two log-probs of a step in float32; they are means over latent dimensions, of size one. A
guidance scale that is 10 % off is 3.5e-3 (tiny model)."""
ROUNDINGS = 2.0
"""In bfloat16 it may also be this many times what rounding is expected to make, see ``expected_rounding``."""


@dataclass(frozen=True)
class Case:
    """What both sides are asked for."""

    size: str
    """A key of ``SIZES``."""
    guided: bool
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.size} {'guided' if self.guided else 'unguided'} {self.dtype}"


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    blocks: int
    heads: int
    head: int
    pixels: int
    images: int
    steps: int


SIZES = {
    "tiny": Size(blocks=3, heads=2, head=16, pixels=32, images=8, steps=10),
    "56M": Size(blocks=6, heads=8, head=64, pixels=128, images=4, steps=2),
}


# ------------------------------------------------------------------ the model


def save_model(size: Size, folder: Path) -> int:
    """Write a random Stable Diffusion 3 of this size; returns the parameters of its transformer."""
    sys.path.insert(0, str(TESTS))
    import tiny_sd3
    from diffusers import SD3Transformer2DModel

    tiny_sd3.CLIP_TOKENS = CLIP_TOKENS
    pipe = tiny_sd3.build()
    torch.manual_seed(1)
    settings = dict(pipe.transformer.config) | {
        "num_layers": size.blocks,
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head,
        "caption_projection_dim": size.heads * size.head,
        "dual_attention_layers": (),
    }
    pipe.transformer = SD3Transformer2DModel.from_config(settings).eval()
    pipe.save_pretrained(folder)
    return sum(parameter.numel() for parameter in pipe.transformer.parameters())


# ------------------------------------------------------------------ either side, in a process of its own


class Clock:
    """CPU and wall seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._now = self._read()

    def add(self, name: str) -> None:
        """Count what has passed since the last call as ``name``."""
        now = self._read()
        for i, (end, start) in enumerate(zip(now, self._now, strict=True)):
            self.seconds[name][i] += end - start
        self._now = now

    def restart(self) -> None:
        """Count from now."""
        self.seconds.clear()
        self._now = self._read()

    def take(self) -> dict[str, Any]:
        """All of it, and the peak of the process's memory so far in MiB."""
        scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
        return {**{name: list(value) for name, value in self.seconds.items()}, "peak_mib": peak}

    @staticmethod
    def _read() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()


class Orders:
    """The other end of ``Side``: one line a request, one line an answer."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what either program prints is no answer

    def wait(self) -> None:
        """Until a step is asked for; ends the process where none is wanted any more."""
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)

    def answer(self, value: Any) -> None:
        """Tell the result of the last request."""
        self._answers.write(json.dumps(value) + "\n")


def run_theirs(case: Case, folder: Path, clone: Path) -> None:
    """flow_grpo's ``main``, a step at every request."""
    orders = Orders()
    script = load_script(clone)
    clock = Clock()
    started = False

    def bar(iterable: Any, desc: str = "", **_others: Any) -> Any:
        """In place of its progress bars, whose names tell where a step is."""
        nonlocal started
        if desc.endswith(": sampling"):
            if started:
                clock.add("training")
                orders.answer(clock.take())
            orders.wait()
            started = True
            clock.restart()
        elif desc.endswith(": training"):
            clock.add("sampling")
        return iterable

    sample = script.pipeline_with_logprob

    def record(pipeline: Any, **request: Any) -> Any:
        """Keep the first batch that is drawn, for the other side to score."""
        images, latents, log_probs = sample(pipeline, **request)
        file = folder / "batch.pt"
        if not file.exists():
            torch.save(
                {
                    "latents": torch.stack(latents, 1).float(),
                    "log_probs": torch.stack(log_probs, 1).float(),
                    "timesteps": pipeline.scheduler.timesteps.float(),
                    "sigmas": pipeline.scheduler.sigmas.float(),
                    "embeds": request["prompt_embeds"].float(),
                    "pooled": request["pooled_prompt_embeds"].float(),
                    "negative": request["negative_prompt_embeds"].float(),
                    "negative_pooled": request["negative_pooled_prompt_embeds"].float(),
                },
                file,
            )
        return images, latents, log_probs

    loader = script.DataLoader
    script.tqdm = bar
    script.pipeline_with_logprob = record
    script.eval = lambda *_all: None  # validation is no part of a step
    script.DataLoader = lambda *parts, num_workers, **settings: loader(*parts, num_workers=0, **settings)
    script.FLAGS.config = their_config(case, folder, clone)
    script.main([])


def load_script(clone: Path) -> Any:
    """``scripts/train_sd3.py`` as a module, with stand-ins for what it imports and is not used here."""
    import accelerate  # noqa: F401  what looks for wandb when it is imported is not to find the stand-in
    import diffusers  # noqa: F401
    import peft  # noqa: F401

    def nothing(*_all: Any, **_more: Any) -> None:
        """Done in place of what is not measured."""

    stand_in("absl", app=types.SimpleNamespace(), flags=types.SimpleNamespace(FLAGS=types.SimpleNamespace()))
    config_flags = types.SimpleNamespace(DEFINE_config_file=nothing)
    stand_in("ml_collections", ConfigDict=types.SimpleNamespace, config_flags=config_flags)
    stand_in("wandb", init=nothing, log=nothing, Image=nothing)
    stand_in("flow_grpo.prompts")
    rewards = stand_in("flow_grpo.rewards", multi_score=lambda _device, _weights: their_reward)
    sys.path.insert(0, str(clone))
    import flow_grpo  # pyright: ignore[reportMissingImports]

    flow_grpo.rewards = rewards
    return load_file("train_sd3", clone / "scripts" / "train_sd3.py")


def stand_in(name: str, **content: Any) -> types.ModuleType:
    """A module of this name, imported from now on."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def load_file(name: str, path: Path) -> Any:
    """A Python file as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def their_reward(images: torch.Tensor, prompts: Any, metadata: Any, only_strict: bool = True) -> Any:
    """Mean brightness of images in [0, 1], ``(B, 3, H, W)``."""
    return {"avg": images.float().mean((1, 2, 3)).tolist()}, {}


def their_config(case: Case, folder: Path, clone: Path) -> Any:
    """flow_grpo's defaults, with this case's work."""
    size = SIZES[case.size]
    batches = size.images // GROUP
    config = load_file("flow_grpo_base", clone / "config" / "base.py").get_config()
    config.pretrained.model = str(folder / "model")
    config.dataset = str(folder)
    config.prompt_fn = "general_ocr"
    config.resolution = size.pixels
    config.mixed_precision = "bf16" if case.dtype == "bfloat16" else "no"
    config.save_freq = 10**9
    config.logdir = str(folder / "logs")
    config.sample.num_steps = size.steps
    config.sample.guidance_scale = GUIDANCE if case.guided else 1.0
    config.sample.train_batch_size = GROUP
    config.sample.num_image_per_prompt = GROUP
    config.sample.num_batches_per_epoch = batches
    config.sample.noise_level = NOISE
    config.train.batch_size = GROUP
    config.train.gradient_accumulation_steps = batches
    config.train.cfg = case.guided
    config.train.learning_rate = 1e-4
    return config


def run_ours(case: Case, folder: Path, overrides: list[str]) -> None:
    """This package's ``train_step`` at every request; the first request is to score flow_grpo's batch."""
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    orders = Orders()
    trainer = FlowGRPOTrainer(our_config(case, folder, overrides))
    clock = Clock()

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        clock.add("between")
        yield
        clock.add("training" if name in ("update", "sync") else "sampling")

    timer: Any = trainer
    timer.timer = stage
    orders.wait()
    difference, excess = difference_of_scores(trainer, case, folder)
    orders.answer({"difference": difference, "excess": excess})
    while True:
        orders.wait()
        clock.restart()
        trainer.train_step()
        orders.answer(clock.take())


def our_config(case: Case, folder: Path, overrides: list[str]) -> Any:
    """The configuration of this package that asks for the same work."""
    from flowgrpo_rc.cli.compose import compose

    size = SIZES[case.size]
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    prompts = size.images // GROUP
    return compose(
        "flowgrpo_trainer",
        [
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "actor_rollout_ref.model.lora_rank=32",
            "actor_rollout_ref.model.lora_alpha=64",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            f"data.train_files={folder / 'train.txt'}",
            f"data.train_batch_size={prompts}",
            f"{actor}.ppo_mini_batch_size={prompts}",
            f"{actor}.ppo_micro_batch_size_per_gpu={GROUP}",
            f"{actor}.optim.weight_decay=1e-4",
            "algorithm.rollout_correction.bypass_mode=true",
            f"{rollout}.n={GROUP}",
            f"{rollout}.micro_batch_size={GROUP}",
            f"{rollout}.dtype={case.dtype}",
            f"{rollout}.probe.images=0",
            f"{rollout}.algo.noise_level={NOISE}",
            f"{rollout}.algo.sde_window_range=[0,{size.steps}]",
            f"{rollout}.algo.sde_window_size={size.steps}",
            f"{rollout}.pipeline.height={size.pixels}",
            f"{rollout}.pipeline.width={size.pixels}",
            f"{rollout}.pipeline.num_inference_steps={size.steps}",
            f"{rollout}.pipeline.true_cfg_scale={GUIDANCE if case.guided else 1.0}",
            f"{rollout}.pipeline.max_sequence_length={LENGTH}",
            f"reward.custom_reward_function.path={TESTS / 'brightness_reward.py'}",
            f"trainer.mixed_precision={'bf16' if case.dtype == 'bfloat16' else 'no'}",
            "trainer.total_training_steps=1000000",
            "trainer.device=cpu",
            "trainer.logger=[]",
            f"trainer.default_local_dir={folder / 'run'}",
            *overrides,
        ],
    )


def expected_rounding(latents: torch.Tensor, step_std: torch.Tensor) -> torch.Tensor:
    """By how much roundings of a step's mean to bfloat16 on both sides move its log-prob, ``(B,)``.

    A rounding ``d`` of a dimension moves ``z**2 / 2`` by ``z d / std + d**2 / (2 std**2)``. Over the ``N`` dimensions
    the first, of either sign, averages out to ``d / (std sqrt(N))`` and the second stays. The last step's ``std`` is a
    hundredth of the others', so that there the second counts, and elsewhere the first.
    """
    values = latents.flatten(1)
    rounding = torch.finfo(torch.bfloat16).eps / math.sqrt(12) * values.square().mean(1).sqrt()
    relative = rounding / step_std.flatten()
    return math.sqrt(2 / values.shape[1]) * relative + relative.square()


def difference_of_scores(trainer: Any, case: Case, folder: Path) -> tuple[float, float]:
    """Largest difference of the log-probs of flow_grpo's first batch, theirs and those of this package's actor, and the
    same over what is allowed.

    Both adapters are at their start, where they change nothing, so that the base's weights are all there is.
    """
    from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
    from flowgrpo_rc.models.prompts import pad
    from flowgrpo_rc.sde import log_prob, transition

    batch = torch.load(folder / "batch.pt", weights_only=True)
    size = SIZES[case.size]

    def rows(embeds: torch.Tensor, pooled: torch.Tensor) -> Any:
        return pad([EncodedPrompt(row, vector) for row, vector in zip(embeds, pooled, strict=True)])

    images = len(batch["latents"])
    conditioning = Conditioning(
        rows(batch["embeds"], batch["pooled"]),
        rows(batch["negative"][:images], batch["negative_pooled"][:images]) if case.guided else None,
        GUIDANCE if case.guided else 1.0,
        None,
        size.pixels,
        size.pixels,
    ).rows(torch.arange(images), torch.device("cpu"))
    worst = 0.0
    excess = 0.0
    actor = trainer.run.actor
    for j in range(size.steps):
        x = batch["latents"][:, j]
        timesteps = batch["timesteps"][j].expand(images)
        with torch.no_grad(), trainer.accelerator.autocast():
            velocity = trainer.run.model.velocity(actor.transformer, x, timesteps, conditioning)
        sigmas = [batch["sigmas"][i].expand(images) for i in (j, j + 1)]
        step = transition(x, velocity.float(), *sigmas, noise_level=NOISE, sde_type="sde")
        ours = log_prob(step, batch["latents"][:, j + 1], sde_type="sde")
        differences = (ours - batch["log_probs"][:, j]).abs()
        allowed = torch.full_like(differences, ALIKE)
        if case.dtype == "bfloat16":
            allowed += ROUNDINGS * expected_rounding(batch["latents"][:, j + 1], step.step_std)
        worst = max(worst, float(differences.max()))
        excess = max(excess, float((differences / allowed).max()))
    return worst, excess


# ------------------------------------------------------------------ the comparison


class Side:
    """One of the two programs in a process of its own, with one thread."""

    def __init__(self, who: str, case: Case, folder: Path, clone: Path, overrides: list[str]) -> None:
        settings = json.dumps([who, asdict(case), str(folder), str(clone), overrides])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        self._log = (folder / f"{who}.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"a side ended by itself:\n{self._log.read()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End its process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def compare(case: Case, clone: Path, pairs: int, overrides: list[str]) -> dict[str, Any]:
    """``pairs`` alternating steps of both sides, after one that warms up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_model(SIZES[case.size], folder / "model")
        for split in ("train", "test"):
            (folder / f"{split}.txt").write_text("\n".join(PROMPTS) + "\n")
        sides = {who: Side(who, case, folder, clone, overrides) for who in ("theirs", "ours")}
        try:
            # A step of theirs is answered at the beginning of its next; the first is asked for here.
            samples: dict[str, list[dict[str, Any]]] = {"theirs": [sides["theirs"].ask()], "ours": []}
            scored = sides["ours"].ask()
            difference = scored["difference"]
            if not scored["excess"] <= 1:
                raise SystemExit(
                    f"{case.name}: the two score one batch differently, by up to {difference:.1e} and "
                    f"{scored['excess']:.1f} times what rounding allows"
                )
            samples["ours"].append(sides["ours"].ask())
            for index in range(pairs):
                order = ("theirs", "ours") if index % 2 else ("ours", "theirs")
                for who in order:
                    samples[who].append(sides[who].ask())
        finally:
            for side in sides.values():
                side.close()
    return {"parameters": parameters, "difference_of_scores": difference, **summarise(samples)}


def summarise(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Theirs over ours, pair by pair: median, least and largest, in CPU and wall seconds; and peaks."""
    result: dict[str, Any] = {
        who: {"peak_mib": round(max(one["peak_mib"] for one in rows))} for who, rows in samples.items()
    }
    pairs = list(zip(samples["theirs"][1:], samples["ours"][1:], strict=True))
    for kind, index in (("cpu", 0), ("wall", 1)):
        for part in ("sampling", "training", "step"):
            values = [[_seconds(one, part, index) for one in pair] for pair in pairs]
            ratios = [theirs / ours for theirs, ours in values]
            result[f"{part}_{kind}"] = [statistics.median(ratios), min(ratios), max(ratios)]
            for who, column in zip(("theirs", "ours"), zip(*values, strict=True), strict=True):
                result[who][f"{part}_{kind}_s"] = statistics.median(column)
    return result


def _seconds(sample: dict[str, Any], part: str, index: int) -> float:
    if part != "step":
        return sample[part][index]
    return sum(value[index] for name, value in sample.items() if name != "peak_mib")


def report(case: Case, result: dict[str, Any]) -> None:
    """A line for the terminal."""
    told = [
        f"{part} {result[f'{part}_cpu'][0]:.2f} ({result[f'{part}_cpu'][1]:.2f}-{result[f'{part}_cpu'][2]:.2f})"
        for part in ("sampling", "training", "step")
    ]
    peaks = f"{result['ours']['peak_mib']} / {result['theirs']['peak_mib']} MiB"
    print(
        f"{case.name} ({result['parameters'] / 1e6:.1f} M, scores alike to {result['difference_of_scores']:.0e}): "
        f"theirs over ours in CPU seconds: {', '.join(told)}; peak ours / theirs {peaks}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow-grpo", type=Path, help="a clone of flow_grpo")
    parser.add_argument("--sizes", default="tiny,56M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--guided", default="true,false")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--pairs", type=int, default=8, help="steps of each side, one warming up left out")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="settings of this package's side")
    given = parser.parse_args()
    if given.side:
        who, case, folder, clone, overrides = json.loads(given.side)
        torch.set_num_threads(1)
        if who == "theirs":
            run_theirs(Case(**case), Path(folder), Path(clone))
        else:
            run_ours(Case(**case), Path(folder), overrides)
        return
    if given.flow_grpo is None or not (given.flow_grpo / "scripts" / "train_sd3.py").is_file():
        parser.error("--flow-grpo: give the folder of a clone, in which scripts/train_sd3.py lies")
    results: dict[str, Any] = {}
    for size in given.sizes.split(","):
        for guided in given.guided.split(","):
            for dtype in given.dtypes.split(","):
                case = Case(size, guided == "true", dtype)
                results[case.name] = compare(case, given.flow_grpo.resolve(), given.pairs, given.overrides)
                report(case, results[case.name])
    if given.out:
        commit = subprocess.run(
            ["git", "-C", given.flow_grpo, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        told = {"machine": describe(), "flow_grpo": commit, "pairs": given.pairs, "cases": results}
        given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
