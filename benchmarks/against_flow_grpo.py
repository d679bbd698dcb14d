"""A step of training beside one of flow_grpo's own loop, on equal work: CPU and wall seconds, peak memory, operations.

    git clone https://github.com/yifan123/flow_grpo
    python benchmarks/against_flow_grpo.py --flow-grpo flow_grpo --sizes tiny --rows 4,8,20 \
        --out benchmarks/results/against_flow_grpo.json
    python benchmarks/against_flow_grpo.py --flow-grpo flow_grpo --sizes 56M --pairs 2 \
        --out benchmarks/results/against_flow_grpo_56M.json
    python benchmarks/against_flow_grpo.py --flow-grpo flow_grpo --guided true --dtypes float32 --steps 10 --trained 2 \
        --pairs 4 --out benchmarks/results/against_flow_grpo_cheap_rollouts.json

flow_grpo's ``scripts/train_sd3.py`` is read from the clone that ``--flow-grpo`` names and executed as it is, without
its validation; prompts and rewards are supplied, and packages that it names and does not need for this (absl, wandb)
are stood in for. Both sides train the same random Stable Diffusion 3 with a LoRA of rank 32 on the same eight layers of
every block, with as many prompts, images, denoising steps (all stochastic, all trained) and images a micro-batch, in
one optimizer step, each in a process of its own with one thread. Their steps alternate; a ratio is that of one pair,
theirs over ours, so that above 1 this package is faster. First both score one batch of flow_grpo's, and have to agree.

flow_grpo trains one step of a micro-batch's images at a time. This package takes all of their steps in one forward, or
as many rows (steps of images) as ``ppo_micro_batch_rows`` says, so that it is here several times, once for each number
of ``--rows``. With guidance flow_grpo's gradient leaves the unconditional half out, as ``detach_unconditional`` does
here; all of these learn from that gradient, and the last one, ``both halves``, from this package's own.

With ``--trained`` both learn from that many first steps alone. This package then draws with all steps, with one
starting noise for the images of a prompt, with half of the steps after the trained ones, and with both
(``docs/cheap_rollouts.md``).

``sampling`` ends where the update begins: prompts, rollout, reward and advantages. In bfloat16 flow_grpo computes under
autocast with weights in float32, and so does the actor here; the engine is in bfloat16. Further settings of this
package's side can follow: ``actor_rollout_ref.model.dtype=bfloat16``.

Peaks are those of the process's resident memory, while it loads, samples and trains (Linux). A last step counts the
operations that are no views, each of which would be a kernel on a GPU, and the bytes that the largest graph keeps for
its backward pass besides parameters; neither depends on the machine's load.
"""

import argparse
import contextlib
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
from torch.utils._python_dispatch import TorchDispatchMode

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
    """The work of both sides."""

    size: str
    """A key of ``SIZES``."""
    guided: bool
    dtype: str
    steps: int
    """Denoising steps."""
    trained: int
    """Steps that are learned from, the first ones."""

    @property
    def name(self) -> str:
        of = "" if self.trained == self.steps else f", {self.trained} of {self.steps} steps"
        return f"{self.size} {'guided' if self.guided else 'unguided'} {self.dtype}{of}"

    def ways(self, rows: list[str]) -> dict[str, list[str]]:
        """The settings with which this package does it, by what a table calls them."""
        whole = f"{GROUP * self.trained} rows"
        found = {f"{count} rows": [f"actor_rollout_ref.actor.ppo_micro_batch_rows={count}"] for count in rows}
        found |= {whole: []}
        if self.trained < self.steps:
            start = ["actor_rollout_ref.rollout.algo.init_same_noise=true"]
            tail = ["actor_rollout_ref.rollout.tail.steps=0.5"]
            found |= {f"{whole}, one start": start, f"{whole}, half a tail": tail, f"{whole}, both": [*start, *tail]}
        if self.guided:
            both = {f"{whole}, both halves": []}
            detached = "actor_rollout_ref.actor.detach_unconditional=true"
            found = {name: [*settings, detached] for name, settings in found.items()} | both
        return found


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
    from diffusers import SD3Transformer2DModel
    from tiny_families import stable_diffusion_3

    pipe = stable_diffusion_3.build(clip_tokens=CLIP_TOKENS)
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
    """CPU and wall seconds by name, and the most memory held meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.peaks: dict[str, float] = {}
        self._now = self._read()

    def add(self, name: str) -> None:
        """Count what has passed since the last call as ``name``."""
        now = self._read()
        for i, (end, start) in enumerate(zip(now, self._now, strict=True)):
            self.seconds[name][i] += end - start
        self.peaks[name] = max(self.peaks.get(name, 0.0), take_peak())
        self._now = self._read()

    def restart(self) -> None:
        """Count from now."""
        self.peaks = {"before": take_peak()}
        self.seconds.clear()
        self._now = self._read()

    def take(self) -> dict[str, Any]:
        """All of it."""
        return {"seconds": {name: list(value) for name, value in self.seconds.items()}, "peaks": dict(self.peaks)}

    @staticmethod
    def _read() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()


def take_peak() -> float:
    """The most MiB that this process has held since the last call; where the system does not tell, since it began."""
    status = Path("/proc/self/status")
    if not status.is_file():
        scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is that of what follows
    return int(line.split()[1]) / 2**10


class Tally(TorchDispatchMode):
    """Operations that are no views by the part of a step, and the bytes of the largest graph.

    Args:
        parameters: whose bytes are no graph's.
    """

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        super().__init__()
        self.part = "sampling"
        self.operations: dict[str, int] = defaultdict(int)
        self.graph = 0
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._kept: dict[int, int] = {}
        self._in_backward = False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "Tally":
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[self.part] += not func.is_view
        return func(*args, **(kwargs or {}))

    def take(self) -> dict[str, Any]:
        """The counts."""
        return {"operations": dict(self.operations), "graph_mib": self.graph / 2**20}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._in_backward:  # the last graph is used up, and this is the next one's
            self._in_backward = False
            self._kept.clear()
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._kept[storage.data_ptr()] = storage.nbytes()
            self.graph = max(self.graph, sum(self._kept.values()))
        return tensor.detach()  # without its graph, of which it would be a part

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._in_backward = True
        return tensor


class Orders:
    """The other end of ``Side``: one line a request, one line an answer."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what either program prints is no answer

    def wait(self) -> str:
        """Until something is asked for, ``step`` or ``count``; ends the process where nothing is any more."""
        request = sys.stdin.readline()
        if not request:
            sys.stdout.flush()
            os._exit(0)
        return request.strip()

    def answer(self, value: Any) -> None:
        """Tell the result of the last request."""
        self._answers.write(json.dumps(value) + "\n")


def run_theirs(case: Case, folder: Path, clone: Path) -> None:
    """flow_grpo's ``main``, a step at every request."""
    orders = Orders()
    script = load_script(clone)
    clock = Clock()
    started = False
    tally: Tally | None = None
    transformer: Any = None

    def bar(iterable: Any, desc: str = "", **_others: Any) -> Any:
        """In place of its progress bars, whose names tell where a step is."""
        nonlocal started, tally
        if desc.endswith(": sampling"):
            if tally is not None:
                tally.__exit__(None, None, None)
                orders.answer(tally.take())
                tally = None
            elif started:
                clock.add("training")
                orders.answer(clock.take())
            request = orders.wait()
            started = True
            if request == "count":
                tally = Tally(transformer.parameters()).__enter__()
            clock.restart()
        elif desc.endswith(": training"):
            clock.add("sampling")
            if tally is not None:
                tally.part = "training"
        return iterable

    sample = script.pipeline_with_logprob

    def record(pipeline: Any, **request: Any) -> Any:
        """Keep the first batch that is drawn, for the other side to score."""
        nonlocal transformer
        transformer = pipeline.transformer
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
    config.sample.num_steps = case.steps
    config.train.timestep_fraction = case.trained / case.steps
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
    from flowgrpo_rc.trainer.timer import StageTimer

    orders = Orders()
    trainer = FlowGRPOTrainer(our_config(case, folder, overrides))
    clock = Clock()
    tally = Tally(trainer.run.actor.transformer.parameters())

    class TwoParts(StageTimer):
        """A step's stages as the two parts that are compared."""

        @contextmanager
        def __call__(self, stage: str) -> Iterator[None]:
            clock.add(tally.part)
            tally.part = "training" if stage in ("update", "sync") else "sampling"
            yield
            clock.add(tally.part)

    trainer.timer = TwoParts(trainer.accelerator.device)
    orders.wait()
    difference, excess = difference_of_scores(trainer, case, folder)
    orders.answer({"difference": difference, "excess": excess})
    while orders.wait() == "step":
        tally.part = "sampling"
        clock.restart()
        trainer.train_step()
        clock.add("training")
        orders.answer(clock.take())
    tally.part = "sampling"
    with tally:
        trainer.train_step()
    orders.answer(tally.take())
    orders.wait()


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
            f"{rollout}.algo.sde_window_range=[0,{case.trained}]",
            f"{rollout}.algo.sde_window_size={case.trained}",
            f"{rollout}.pipeline.height={size.pixels}",
            f"{rollout}.pipeline.width={size.pixels}",
            f"{rollout}.pipeline.num_inference_steps={case.steps}",
            f"{rollout}.pipeline.true_cfg_scale={GUIDANCE if case.guided else 1.0}",
            f"{rollout}.pipeline.max_sequence_length={LENGTH}",
            f"reward.custom_reward_function.path={TESTS / 'brightness_reward.py'}",
            f"trainer.mixed_precision={'bf16' if case.dtype == 'bfloat16' else 'no'}",
            "trainer.total_training_steps=1000000",
            "trainer.device=cpu",
            "trainer.logger=[]",
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
    for j in range(case.steps):
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

    def __init__(self, who: str, case: Case, folder: Path, clone: Path, overrides: list[str], log: Path) -> None:
        settings = json.dumps([who, asdict(case), str(folder), str(clone), overrides])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        self._log = log.open("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, request: str = "step") -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{request}\n")
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


def compare(case: Case, clone: Path, pairs: int, rows: list[str], overrides: list[str]) -> dict[str, Any]:
    """``pairs`` alternating steps of flow_grpo and of each way of this package, after one that warms up."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        parameters = save_model(SIZES[case.size], folder / "model")
        for split in ("train", "test"):
            (folder / f"{split}.txt").write_text("\n".join(PROMPTS) + "\n")
        sides = {"theirs": Side("theirs", case, folder, clone, [], folder / "theirs.log")}
        stack.callback(sides["theirs"].close)
        # Its first batch is what the others score.
        samples = {"theirs": [sides["theirs"].ask()]}
        difference = 0.0
        for number, (way, settings) in enumerate(case.ways(rows).items()):
            place = folder / f"run_{number}"
            settings = [f"trainer.default_local_dir={place}", *settings, *overrides]
            sides[way] = Side("ours", case, folder, clone, settings, place.with_suffix(".log"))
            stack.callback(sides[way].close)
            scored = sides[way].ask()
            difference = max(difference, scored["difference"])
            if not scored["excess"] <= 1:
                raise SystemExit(
                    f"{case.name}: the two score one batch differently, by up to {scored['difference']:.1e} and "
                    f"{scored['excess']:.1f} times what rounding allows"
                )
            samples[way] = [sides[way].ask()]
        order = list(sides)
        for _ in range(pairs):
            for who in order:
                samples[who].append(sides[who].ask())
            order.reverse()
        counts = {who: side.ask("count") for who, side in sides.items()}
    theirs = samples.pop("theirs")
    return {
        "parameters": parameters,
        "difference_of_scores": difference,
        "pairs": pairs,
        "theirs": figures(theirs) | counts["theirs"],
        "ours": {way: figures(own) | ratios(theirs, own) | counts[way] for way, own in samples.items()},
    }


PARTS = ("sampling", "training", "step")


def figures(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one side's steps: median seconds of each part, without the first step, the largest peak, and the peaks of that
    step: later ones begin with what the allocator has kept of it."""
    first = {name: round(peak) for name, peak in samples[0]["peaks"].items()}
    largest = max(peak for one in samples for peak in one["peaks"].values())
    medians = {
        f"{part}_{kind}_s": statistics.median(_seconds(one, part, index) for one in samples[1:])
        for index, kind in enumerate(("cpu", "wall"))
        for part in PARTS
    }
    return {"peak_mib": round(largest), "first_peaks_mib": first, **medians}


def ratios(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Theirs over ours, pair by pair: median, least and largest, in CPU and wall seconds."""
    found = {}
    for index, kind in enumerate(("cpu", "wall")):
        for part in PARTS:
            pairs = zip(theirs[1:], ours[1:], strict=True)
            values = [_seconds(one, part, index) / _seconds(other, part, index) for one, other in pairs]
            found[f"{part}_{kind}"] = [statistics.median(values), min(values), max(values)]
    return found


def _seconds(sample: dict[str, Any], part: str, index: int) -> float:
    if part != "step":
        return sample["seconds"][part][index]
    return sum(value[index] for value in sample["seconds"].values())


def report(case: Case, result: dict[str, Any]) -> None:
    """A few lines for the terminal."""
    theirs = result["theirs"]
    print(f"{case.name} ({result['parameters'] / 1e6:.1f} M), scores alike to {result['difference_of_scores']:.0e}")
    print(f"  flow_grpo: {_sizes_in_words(theirs)}")
    for way, ours in result["ours"].items():
        told = [
            f"{part} {ours[f'{part}_cpu'][0]:.2f} ({ours[f'{part}_cpu'][1]:.2f}-{ours[f'{part}_cpu'][2]:.2f})"
            for part in PARTS
        ]
        print(f"  {way}: theirs over ours in CPU seconds: {', '.join(told)}; {_sizes_in_words(ours)}", flush=True)


def _sizes_in_words(side: dict[str, Any]) -> str:
    peaks = ", ".join(f"{name} {value}" for name, value in side["first_peaks_mib"].items())
    operations = " + ".join(str(side["operations"][part]) for part in ("sampling", "training"))
    return (
        f"peak {side['peak_mib']} MiB (first step: {peaks}); graph {side['graph_mib']:.1f} MiB; operations {operations}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow-grpo", type=Path, help="a clone of flow_grpo")
    parser.add_argument("--sizes", default="tiny,56M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--guided", default="true,false")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rows", default=str(GROUP), help="rows of a micro-batch here, besides all of its images'")
    parser.add_argument("--steps", type=int, help="denoising steps (those of the size)")
    parser.add_argument("--trained", type=int, help="steps that are learned from, the first ones (all)")
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
    cases: dict[str, Any] = {}
    for size in given.sizes.split(","):
        for guided in given.guided.split(","):
            for dtype in given.dtypes.split(","):
                steps = given.steps or SIZES[size].steps
                case = Case(size, guided == "true", dtype, steps, given.trained or steps)
                rows = given.rows.split(",")
                cases[case.name] = compare(case, given.flow_grpo.resolve(), given.pairs, rows, given.overrides)
                report(case, cases[case.name])
                if given.out:  # after each: one takes minutes
                    told = {"machine": describe(), "flow_grpo": _commit(given.flow_grpo), "cases": cases}
                    given.out.write_text(json.dumps(told, indent=1) + "\n")


def _commit(clone: Path) -> str:
    asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
