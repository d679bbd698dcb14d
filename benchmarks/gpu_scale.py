"""Times, peak memory and gaps of large models with random weights, which are made on the device itself.

    python benchmarks/gpu_scale.py --case qwen --out FILE.jsonl [--seconds 190] [--device cpu]
    python benchmarks/gpu_scale.py --plan --out FILE.jsonl       # what the plan expects of the same passes

Each measurement is a line of JSON, written at once, so that a killed run leaves what it had. Engines draw one after the
other and are dropped; then actors learn from what the plain one drew, and score what each of them drew.
"""

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

QWEN = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
QWEN += [f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")]
"""The layers that Qwen-Image's recipes adapt."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its requests."""

    path: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the transformer's configuration."""
    pixels: int
    tokens: int
    guidance: float
    rank: int
    targets: list[str] | None = None
    images: int
    engine_rows: int
    """Images of a forward of the engine."""
    actor_rows: int
    """Images of a micro-batch of the actor, with two steps each."""
    steps: int


QWEN_IMAGE = {"path": "Qwen/Qwen-Image", "tokens": 256, "guidance": 4.0, "rank": 64, "targets": QWEN}
SD35 = {"path": "stabilityai/stable-diffusion-3.5-medium", "tokens": 128, "guidance": 4.5, "rank": 32}
SMALL = {"num_layers": 12, "num_attention_heads": 8, "axes_dims_rope": [16, 56, 56], "joint_attention_dim": 512}
CASES = {
    "nano": Case(path="asset:tiny_qwen_image", tokens=24, guidance=4.0, rank=8, targets=QWEN, pixels=32, images=4,
                 engine_rows=4, actor_rows=2, steps=4),
    "460m": Case(**QWEN_IMAGE | {"changes": SMALL, "tokens": 64}, pixels=512, images=64, engine_rows=32, actor_rows=16,
                 steps=10),
    "sd35": Case(**SD35, pixels=512, images=48, engine_rows=24, actor_rows=6, steps=10),
    "sd35_1024": Case(**SD35, pixels=1024, images=8, engine_rows=8, actor_rows=2, steps=4),
    "qwen": Case(**QWEN_IMAGE, pixels=512, images=16, engine_rows=16, actor_rows=4, steps=4),
    "qwen_1024": Case(**QWEN_IMAGE, pixels=1024, images=4, engine_rows=4, actor_rows=1, steps=3),
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": {"merge_adapter": True},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "fp8, merged": {"quantization": "fp8", "merge_adapter": True},
    "compiled": {"torch_compile": True},
    "fp8, merged, compiled": {"quantization": "fp8", "merge_adapter": True, "torch_compile": True},
}
"""Settings of ``DiffusersEngine``."""
ACTORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "LoRA float32": {"lora_compute_dtype": "float32"},
    "LoRA float32 by TF32": {"lora_compute_dtype": "float32", "allow_tf32": True},
    "without recomputing": {"enable_gradient_checkpointing": False},
    "compiled": {"torch_compile": True},
}
"""Settings of ``ModelConfig``; a compiled transformer stays so, and comes last."""
OF_INTEREST = ("plain", "LoRA float32", "compiled")
"""Actors with which every engine's gap is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--plan", action="store_true", help="what the plan expects, of --case or of all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190, help="begin nothing new after so many")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    chosen = [arguments.case] if arguments.case else [name for name in CASES if name != "nano"]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            pipeline = changed_pipeline(CASES[name], Path(folder) / name)
            if arguments.plan:
                write(arguments.out, {"case": name, **planned(CASES[name], pipeline)})
            else:
                Measurement(name, pipeline, arguments.device, arguments.out, arguments.seconds).run()


def write(file: Path, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    with file.open("a") as rows:
        rows.write(f"{line}\n")


def changed_pipeline(case: Case, folder: Path) -> Path:
    """A copy of the pipeline's configuration files, with the case's changes."""
    from flowgrpo_rc.planner.pipeline import find_folder

    shutil.copytree(find_folder(case.path), folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | case.changes))
    return folder


def random_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The family's adapter around a transformer and a VAE with random weights; other parts are missing."""
    import diffusers

    from flowgrpo_rc.models.registry import FAMILIES

    index = json.loads((folder / "model_index.json").read_text())
    kind = getattr(diffusers, index["_class_name"])
    parts = dict.fromkeys(kind._get_signature_types())
    parts |= {name: index[name] for name in parts if not isinstance(index.get(name, []), list)}
    for name in ("transformer", "vae"):
        parts[name] = random_network(getattr(diffusers, index[name][1]), folder / name, dtype, device)
    dynamic = index["_class_name"].startswith("QwenImage")
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=dynamic, shift=3.0)
    return resolve_name(FAMILIES[index["_class_name"]].adapter)(kind(**parts))


def random_network(kind: Any, folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A network whose weights are drawn on ``device``, small enough that its outputs stay finite."""
    from accelerate import init_empty_weights

    from flowgrpo_rc.models.base import keeps_float32

    with init_empty_weights():
        network = kind.from_config(json.loads((folder / "config.json").read_text()))
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(network.named_parameters()):
        held = torch.float32 if keeps_float32(network, name) else dtype
        value = torch.ones(parameter.shape, dtype=held, device=device)
        if name.endswith("bias"):
            value.zero_()
        elif parameter.dim() > 1:
            value.normal_(0, 0.5 * parameter[0].numel() ** -0.5, generator=generator)
        place, _, last = name.rpartition(".")
        setattr(network.get_submodule(place), last, torch.nn.Parameter(value, requires_grad=False))
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            saved = name not in module._non_persistent_buffers_set and buffer.is_floating_point()
            setattr(module, name, buffer.to(device, dtype if saved else buffer.dtype))
    return network.eval()


def lora_of(case: Case, folder: Path) -> Any:
    """The section ``actor_rollout_ref.model`` of a case whose pipeline lies in ``folder``."""
    from flowgrpo_rc.models import ModelConfig

    return ModelConfig(
        path=str(folder),
        dtype="bfloat16",
        lora_rank=case.rank,
        lora_alpha=2 * case.rank,
        target_modules=case.targets,
        enable_gradient_checkpointing=True,
    )


class Measurement:
    """One case on one device."""

    def __init__(self, name: str, folder: Path, device: str, out: Path, seconds: float) -> None:
        self.name = name
        self.case = CASES[name]
        self.device = torch.device(device)
        self.out = out
        self.begins = time.perf_counter()
        self.seconds = seconds
        self.state: dict[str, Any] = {}
        self.batches: dict[str, Any] = {}
        """Recorded steps of each engine."""
        self.model = self.measured("build", lambda: random_model(folder, torch.bfloat16, device))
        self.lora = lora_of(self.case, folder)

    def run(self) -> None:
        # Actors keep nearly half of the time, since updates are the larger part of a run.
        for kind, tried, share in ((self.draw, ENGINES, 0.55), (self.learn, ACTORS, 1.0)):
            for label, settings in tried.items():
                if time.perf_counter() > self.begins + share * self.seconds:
                    self.row(f"{kind.__name__}, {label}", skipped="no time left")
                    continue
                try:
                    kind(label, **settings)
                except (torch.OutOfMemoryError, RuntimeError, AssertionError, ImportError, KeyError) as error:
                    # Kernels or packages that are missing here must not end the others.
                    self.row(f"{kind.__name__}, {label}", error=f"{type(error).__name__}: {error}"[:300])
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def row(self, what: str, **figures: Any) -> None:
        write(self.out, {"case": self.name, "what": what, **figures})

    def measured(self, what: str, call: Callable[[], Any], rows: int = 0) -> Any:
        """The result of ``call``; its seconds, milliseconds a row and peak memory are written."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = call()
        if cuda:
            torch.cuda.synchronize()
        figures: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        if rows:
            figures["ms a row"] = 1000 * figures["seconds"] / rows
        if cuda:
            figures["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        self.row(what, **figures)
        return result

    def request(self, images: int, steps: int) -> Any:
        """Two images a prompt; prompts have unequal lengths where the family masks them."""
        from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
        from flowgrpo_rc.models.prompts import pad
        from flowgrpo_rc.rollout import RolloutRequest

        generator = torch.Generator().manual_seed(1)
        blank = self.model.blank_prompt()
        full = self.model.prompt_tokens(self.case.tokens)

        def prompt(length: int) -> EncodedPrompt:
            pooled = None if blank.pooled is None else torch.randn(len(blank.pooled), generator=generator)
            return EncodedPrompt(torch.randn(length, blank.embeds.shape[-1], generator=generator), pooled)

        count = max(1, images // 2)
        unequal = self.model.masks_prompts
        prompts = pad([prompt(full - (i % (full // 2) if unequal else 0)) for i in range(count)])
        negative = pad([prompt(2 if unequal else full) for _ in range(count)])
        size = self.case.pixels
        return RolloutRequest(
            Conditioning(prompts, negative, self.case.guidance, None, size, size),
            torch.arange(images) // 2,
            steps,
            list(range(images)),
            torch.zeros(images, dtype=torch.long),
            2,
            noise_level=0.7,
        )

    def draw(self, label: str, **settings: Any) -> None:
        from flowgrpo_rc.models.lora import adapter_state
        from flowgrpo_rc.rollout import DiffusersEngine

        case = self.case
        engine = DiffusersEngine(
            self.model,
            self.lora,
            dtype=torch.bfloat16,
            micro_batch_size=case.engine_rows,
            device=self.device,
            **settings,
        )
        try:
            if not self.state:
                shapes = adapter_state(engine.transformer, engine.adapter)
                self.state = {name: 0.01 * torch.randn_like(value).float() for name, value in shapes.items()}
            self.measured(f"sync, {label}", lambda: engine.sync(self.state, 1))
            warm = self.request(case.engine_rows, 2)
            self.measured(f"first images, {label}", lambda: engine.generate(warm))
            request = self.request(case.images, case.steps)
            rows = case.images * case.steps
            self.batches[label] = self.measured(f"rollout, {label}", lambda: engine.generate(request), rows).batch
        finally:
            engine.close()

    def learn(self, label: str, allow_tf32: bool = False, **settings: Any) -> None:
        from accelerate import Accelerator

        from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
        from flowgrpo_rc.batch import Key, MiniBatch
        from flowgrpo_rc.dtypes import set_tf32
        from flowgrpo_rc.models.lora import load_adapter_state

        case = self.case
        correction = {"bypass_mode": True, "rollout_is": "sequence", "rollout_is_threshold": 2.0}
        # This rate moves nothing, so that every gap stays that of rounding.
        options = {"rollout_correction": correction, "optim": {"lr": 1e-12}}
        config = DiffusionActorConfig(ppo_micro_batch_size_per_gpu=case.actor_rows, **options)
        set_tf32(allow_tf32)
        actor = DiffusionActor(
            self.model,
            config,
            replace(self.lora, **settings),
            Accelerator(cpu=self.device.type == "cpu"),
            sde_type="sde",
            noise_level=0.7,
            total_optimizer_steps=100,
        )
        try:
            load_adapter_state(actor.transformer, self.state)
            half = max(case.actor_rows, case.images // 2)
            batch = self.batches["plain"][:half].clone()
            batch[Key.ADVANTAGES] = torch.randn(half, generator=torch.Generator().manual_seed(2))
            cond = self.request(case.images, case.steps).conditioning

            def update(rows: int) -> None:
                actor.update(batch, cond, [MiniBatch(torch.arange(rows))])

            self.measured(f"first update, {label}", lambda: update(case.actor_rows))
            self.measured(f"update, {label}", lambda: update(half), 2 * half)
            for drawn, found in self.batches.items() if label in OF_INTEREST else ():
                self.gap(actor, f"engine {drawn}, actor {label}", found, cond)
        finally:
            set_tf32(False)
            actor.transformer.disable_gradient_checkpointing()
            actor.transformer.delete_adapters("default")

    def gap(self, actor: Any, label: str, batch: Any, cond: Any) -> None:
        """Of a few images, scored as the actor's micro-batches are and row by row."""
        part = batch[: self.case.actor_rows]
        for rows in (None, 1):
            actor.config.ppo_micro_batch_rows = rows
            found = actor.rescore(part, cond)["log_probs"]
            apart = (found - part["rollout_log_probs"]).double().abs().flatten()
            figures = {"mean": float(apart.mean()), "90 %": float(apart.quantile(0.9)), "largest": float(apart.max())}
            self.row(f"gap, {label}", rows=rows or 2 * len(part), **figures)
        actor.config.ppo_micro_batch_rows = None


def planned(case: Case, folder: Path) -> dict[str, Any]:
    """Peaks and operations that ``flowgrpo-rc plan`` counts for an update's micro-batch and a forward of the engine."""
    from flowgrpo_rc.actor import DiffusionActorConfig
    from flowgrpo_rc.planner.memory import MemoryPlan
    from flowgrpo_rc.planner.settings import PlannedRun
    from flowgrpo_rc.rollout import RolloutConfig

    size = {"height": case.pixels, "width": case.pixels}
    run = PlannedRun(
        model=lora_of(case, folder),
        actor=DiffusionActorConfig(ppo_micro_batch_size_per_gpu=case.actor_rows),
        rollout=RolloutConfig(
            micro_batch_size=case.engine_rows,
            n=2,
            pipeline={
                **size,
                "num_inference_steps": case.steps,
                "true_cfg_scale": case.guidance,
                "max_sequence_length": case.tokens,
            },
            algo={"sde_window_size": 2},
        ),
        prompts=max(1, case.images // 2),
    )
    memory = MemoryPlan(run).memory(run, 1)
    gib = {name: size / 2**30 for name, size in {**memory.resident, **memory.stages, "total": memory.total}.items()}
    return {"what": "plan, GiB", **gib}


if __name__ == "__main__":
    main()
