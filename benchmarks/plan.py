"""The plan against reality: predicted bytes against the resident set of real steps on the CPU.

    nice python benchmarks/plan.py          # writes results/plan.json

A Qwen-Image of 6 blocks of width 1024 (231 M parameters, float32), LoRA of rank 64, 256 pixels, 64 prompt tokens; one
forward and backward of some rows, with and without gradient checkpointing, on one process and sharded over two. A step
of one row of a small image comes first, so that what libraries load is there before. The resident set is read every
2 ms. glibc is told to give freed tensors back (``MALLOC_MMAP_THRESHOLD_``), so that it has no pool of its own.
``--rounded`` does so with the base in int8, fp8 and nf4 (``make quantization`` installs what that needs), and counts
the weights as they are loaded.

``--depth NAME`` compares the scaled figures of a shipped pipeline with a fake run of all its blocks instead.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import describe

RESULTS = Path(__file__).resolve().parent / "results" / "plan.json"
TRANSFORMER = {
    "num_layers": 6,
    "num_attention_heads": 8,
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "in_channels": 32,
    "out_channels": 8,
    "joint_attention_dim": 512,
}
TOKENS = 64
SIZE = 256
CASES = [
    {"rows": 2, "recompute": True, "processes": 1},
    {"rows": 2, "recompute": False, "processes": 1},
    {"rows": 8, "recompute": True, "processes": 1},
    {"rows": 2, "recompute": True, "processes": 2},
    {"rows": 8, "recompute": True, "processes": 2},
    {"rows": 2, "recompute": False, "processes": 2},
]
ROUNDED = [
    {"rows": 2, "recompute": recompute, "processes": 1, "quantization": quantization}
    for quantization in ("int8", "fp8", "nf4")
    for recompute in (True, False)
]
MIB = 2**20


def write_pipeline(folder: Path) -> str:
    """A folder with the model's configuration files; the decoder is the tiny model's and is not run."""
    from flowgrpo_rc.paths import shipped

    tiny = shipped("assets") / "tiny_qwen_image"
    index = json.loads((tiny / "model_index.json").read_text())
    del index["text_encoder"]
    contents = {
        "model_index.json": index,
        "vae/config.json": json.loads((tiny / "vae" / "config.json").read_text()),
        "transformer/config.json": {"_class_name": "QwenImageTransformer2DModel", **TRANSFORMER},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def settings(path: str, quantization: str | None = None) -> tuple[Any, Any]:
    """LoRA and rollout of every case."""
    from flowgrpo_rc.models.config import ModelConfig
    from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig

    asked = PipelineConfig(height=SIZE, width=SIZE, max_sequence_length=TOKENS)
    dtype = "float32" if quantization is None else "bfloat16"
    lora = ModelConfig(path=path, lora_rank=64, dtype=dtype, quantization=quantization)
    return lora, RolloutConfig(dtype=dtype, pipeline=asked)


def predicted(path: str, case: dict[str, Any]) -> dict[str, float]:
    """MiB beyond the weights that stay: activations and gradients, and gathered blocks."""
    from flowgrpo_rc.actor.config import DiffusionActorConfig
    from flowgrpo_rc.planner.memory import Measured
    from flowgrpo_rc.planner.settings import PlannedRun

    lora, rollout = settings(path, case.get("quantization"))
    actor = DiffusionActorConfig(ppo_micro_batch_rows=case["rows"])  # a run's own micro-batch is not interpolated
    measured = Measured(PlannedRun(model=lora, actor=actor, rollout=rollout, prompts=1))
    step = measured.update(case["rows"], recompute=case["recompute"], accumulates=False).peak
    gathered = measured.sizes.gathered if case["processes"] > 1 else 0
    rounded = {"predicted_weights_mib": measured.sizes.transformer / MIB} if "quantization" in case else {}
    return rounded | {
        "parameters": measured.sizes.parameters,
        "step_mib": step / MIB,
        "gathered_mib": gathered / MIB,
        "predicted_mib": (step + gathered) / MIB,
    }


class Resident(threading.Thread):
    """Reads this process's resident set until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.peak = max(self.peak, resident())


def resident() -> int:
    """Bytes, without those of mapped files."""
    _, whole, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (whole - shared) * os.sysconf("SC_PAGE_SIZE")


def real(path: str, case: dict[str, Any]) -> dict[str, float]:
    """One step of this process, alone or as one of two that share the base."""
    import gc

    import diffusers
    import torch

    from flowgrpo_rc.dtypes import torch_dtype
    from flowgrpo_rc.models.base import Conditioning, Prompts
    from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
    from flowgrpo_rc.models.qwen_image import QwenImage
    from flowgrpo_rc.sde import log_prob, transition

    lora, _ = settings(path, case.get("quantization"))
    torch.manual_seed(0)
    loaded = {}
    if "quantization" in case:
        transformer, loaded = load_rounded(path, case["quantization"])
    else:
        transformer = diffusers.QwenImageTransformer2DModel(**TRANSFORMER).requires_grad_(False)
    vae = diffusers.AutoencoderKLQwenImage.from_config(json.loads((Path(path) / "vae" / "config.json").read_text()))
    pipe = diffusers.QwenImagePipeline(None, vae, None, None, transformer)
    if case["processes"] > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (case["processes"],))
        for block in transformer.transformer_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(transformer, mesh=mesh)
    model = QwenImage(pipe)
    computes_in = torch_dtype(lora.lora_computes_in)
    attach_lora(transformer, model, lora, dtype=torch.float32, compute_dtype=computes_in)
    if case["recompute"]:
        transformer.enable_gradient_checkpointing()
    trained = adapter_parameters(transformer).values()

    def step(rows: int, size: int) -> None:
        mask = torch.ones(rows, TOKENS, dtype=torch.bool)
        prompts = Prompts(torch.randn(rows, TOKENS, 512), mask, lengths=(TOKENS,) * rows)
        conditioning = Conditioning(prompts, None, 1.0, None, size, size)
        latents = torch.randn(rows, *model.latent_shape(size, size))
        level = torch.full((rows,), 0.5)
        velocity = model.velocity(transformer, latents, level * 1000, conditioning)
        made = transition(latents, velocity, level, level / 2, noise_level=0.7, sde_type="sde")
        log_prob(made, latents, sde_type="sde").sum().backward()
        for parameter in trained:
            parameter.grad = None

    step(1, 64)
    gc.collect()
    before = resident()
    reader = Resident()
    reader.start()
    step(case["rows"], SIZE)
    reader.done.set()
    reader.join()
    time.sleep(0.1)
    return loaded | {"before_mib": before / MIB, "step_mib": (reader.peak - before) / MIB}


def load_rounded(path: str, quantization: str) -> tuple[Any, dict[str, float]]:
    """The transformer read from its file, with the resident memory that this took at most and that it kept."""
    import gc

    import torch
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel

    from flowgrpo_rc.models.quantization import loading_options, replace_rounded_layers

    class_ = QwenImageTransformer2DModel
    with init_empty_weights():
        empty = class_(**TRANSFORMER)
    with loading_options(quantization, empty, torch.device("cpu"), torch.bfloat16) as options:
        before = resident()
        reader = Resident()
        reader.start()
        transformer = class_.from_pretrained(path, subfolder="transformer", torch_dtype=torch.bfloat16, **options)
    replace_rounded_layers(transformer.requires_grad_(False))
    reader.done.set()
    reader.join()
    gc.collect()
    return transformer, {"loading_mib": (reader.peak - before) / MIB, "weights_mib": (resident() - before) / MIB}


def write_weights(path: str) -> None:
    """Random weights of the transformer, in bfloat16 as they are published."""
    import diffusers
    import torch

    torch.manual_seed(0)
    transformer = diffusers.QwenImageTransformer2DModel(**TRANSFORMER)
    transformer.to(torch.bfloat16).save_pretrained(Path(path) / "transformer")


def run_case(path: str, case: dict[str, Any]) -> dict[str, Any]:
    """Real and predicted; of two processes the larger one."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    program = [sys.executable]
    if case["processes"] > 1:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case["processes"])]
    with tempfile.TemporaryDirectory() as folder:
        command = [*program, __file__, "--one", json.dumps(case), "--path", path, "--out", folder]
        subprocess.run(command, check=True, env=environment)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    worst = max(found, key=lambda one: one["step_mib"])
    guess = predicted(path, case)
    loaded = {name: worst[name] for name in ("loading_mib", "weights_mib") if name in worst}
    step = {"real_mib": worst["step_mib"], "constant_mib": worst["step_mib"] - guess["predicted_mib"]}
    return {**case, **guess, **loaded, **step}


def depth(name: str) -> dict[str, Any]:
    """Scaled from short runs, and run with all blocks; LoRA of rank 64 on the family's layers, 512 pixels, 8 rows."""
    import torch

    from flowgrpo_rc.models.config import ModelConfig
    from flowgrpo_rc.models.registry import FAMILIES
    from flowgrpo_rc.planner import passes
    from flowgrpo_rc.planner.pipeline import FakePipeline
    from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig

    peaks = []
    for short in (passes.SHORT, 1000):
        passes.SHORT = short
        pipeline = FakePipeline(name, torch.bfloat16)
        scale = 3.5 if pipeline.transformer.config.get("guidance_embeds") else None
        cfg = 4.0 if FAMILIES[pipeline.class_name].takes_cfg else 1.0
        guided = PipelineConfig(max_sequence_length=256, true_cfg_scale=cfg, guidance_scale=scale)
        asked = RolloutConfig(pipeline=guided)
        of = passes.Passes(pipeline, ModelConfig(lora_rank=64), "float32", asked, autocast=False)
        peaks.append(of.update(8, recompute=True, reference=False, detached=False, accumulates=True).peak)
    scaled, whole = peaks
    return {
        "pipeline": name,
        "scaled_gib": scaled / 2**30,
        "all_blocks_gib": whole / 2**30,
        "error": scaled / whole - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", action="append", default=[], metavar="NAME")
    parser.add_argument("--rounded", action="store_true", help="with the base in 8 and 4 bits")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        result = real(arguments.path, json.loads(arguments.one))
        (arguments.out / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))
        return
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    saved["machine"] = describe()
    if arguments.depth:
        saved["depth"] = [depth(name) for name in arguments.depth]
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = write_pipeline(Path(folder))
            if arguments.rounded:
                write_weights(path)
                saved["rounded"] = [run_case(path, case) for case in ROUNDED]
            else:
                saved["resident"] = [run_case(path, case) for case in CASES]
    RESULTS.write_text(json.dumps(saved, indent=1) + "\n")
    print(json.dumps(saved, indent=1))


if __name__ == "__main__":
    main()
