"""Engines with other weights or kernels than the actor: their gap, their time on a CPU, and which layers round badly.

    make quantization && PYTHONPATH=.venv/quantization python benchmarks/engine_precision.py
    python benchmarks/engine_precision.py --layers FOLDER    # layers of another pipeline; writes nothing

Writes the tables of docs/low_precision.md.

- Gap: the demo's trained model, a bfloat16 actor that scores what the engine drew, 16 images of two SDE steps.
- Time: of one rollout against that of the plain engine, in float32, alternating, the median of five; the demo's model
  (2.5 M parameters) and a random Qwen-Image of 58 M at 128 pixels. A ratio below 1 is faster.
- Layers: the gap where fp8 rounds one kind of layer alone, emulated, without an adapter.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from machine import describe
from training_runs import HERE, write_table

RESULTS = HERE / "results" / "engine_precision.json"
LAYERS = HERE / "results" / "layer_drift.json"
PAGE = HERE.parent / "docs" / "low_precision.md"
DEMO = "asset:tiny_qwen_image"
ROUNDS = 5
MERGED = {"merge_adapter": True}
COMPILED = {"torch_compile": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": MERGED,
    "compiled": COMPILED,
    "merged, compiled": MERGED | COMPILED,
    "int8": {"quantization": "int8"},
    "int8, every layer": {"quantization": "int8", "quantization_skip": []},
    "int8, merged, compiled": {"quantization": "int8", **MERGED, **COMPILED},
    "fp8_emulated": {"quantization": "fp8_emulated"},
    "fp8_emulated, merged": {"quantization": "fp8_emulated", **MERGED},
}
"""Settings of ``DiffusersEngine``."""
BOTH = "compiled, and the actor"
TIMED = ("merged", "compiled", "merged, compiled")
LARGE = {
    "num_layers": 6,
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "joint_attention_dim": 64,
    "axes_dims_rope": [16, 24, 24],
    "in_channels": 64,
    "out_channels": 16,
}
"""57.7 M parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", metavar="PIPELINE", help="print the layers of this pipeline alone")
    arguments = parser.parse_args()
    if arguments.layers:
        print(layer_table(layers(arguments.layers)))
        return
    gaps = {name: gap(**settings) for name, settings in SETTINGS.items()}
    gaps[BOTH] = gap(actor_compiles=True, **COMPILED)
    print(gaps, flush=True)
    seconds = {name: times(build) for name, build in {"2.5 M": demo, "58 M": large}.items()}
    print(seconds, flush=True)
    RESULTS.write_text(json.dumps({"machine": describe(), "gaps": gaps, "seconds": seconds}, indent=1) + "\n")
    write_table(PAGE, RESULTS, table(gaps, seconds))
    found = layers(DEMO)
    LAYERS.write_text(json.dumps({"machine": describe(), "layers": found}, indent=1) + "\n")
    write_table(PAGE, LAYERS, layer_table(found))


def demo(dtype: str = "float32", path: str = DEMO) -> Any:
    """The demo's model."""
    from flowgrpo_rc.models import load_model

    return load_model(path, dtype=dtype)


def large() -> Any:
    """A random Qwen-Image around the demo's text encoder and VAE."""
    import torch
    from diffusers import QwenImageTransformer2DModel

    model = demo()
    width = model.pipe.transformer.config.joint_attention_dim
    channels = {name: model.pipe.transformer.config[name] for name in ("in_channels", "out_channels")}
    torch.manual_seed(0)
    model.pipe.transformer = QwenImageTransformer2DModel(**LARGE | channels | {"joint_attention_dim": width})
    model.transformer.requires_grad_(False).eval()
    return model


def request_for(model: Any, images: int, pixels: int = 32, steps: int = 6) -> Any:
    """A request with guidance: half as many prompts as images, two SDE steps in the middle."""
    import torch

    from flowgrpo_rc.models import Conditioning, PromptEncoder
    from flowgrpo_rc.rollout import RolloutRequest

    prompts = [f'the text "{i}"' for i in range(images // 2)]
    encode = PromptEncoder(model, 64)
    conditioning = Conditioning(encode(prompts), encode([" "] * len(prompts)), 4.0, None, pixels, pixels)
    index = torch.arange(images) // 2
    starts = torch.full((images,), steps // 3)
    return RolloutRequest(conditioning, index, steps, list(range(images)), starts, 2, noise_level=0.7)


def engine_and_state(
    model: Any, dtype: str, compiles: bool = False, scale: float = 0.02, **settings: Any
) -> tuple[Any, Any, Any]:
    """An engine, the section of its LoRA, and the random adapter that it has."""
    import torch

    from flowgrpo_rc.dtypes import torch_dtype
    from flowgrpo_rc.models import ModelConfig
    from flowgrpo_rc.models.lora import adapter_state
    from flowgrpo_rc.rollout import DiffusersEngine

    lora = ModelConfig(dtype=dtype, lora_rank=16, lora_alpha=32, torch_compile=compiles)
    engine = DiffusersEngine(model, lora, dtype=torch_dtype(dtype), micro_batch_size=16, device="cpu", **settings)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: scale * torch.randn(value.shape, generator=generator)
        for name, value in adapter_state(engine.transformer, engine.adapter).items()
    }
    engine.sync(state, 0)
    return engine, lora, state


def gap(path: str = DEMO, actor_compiles: bool = False, **settings: Any) -> float:
    """Mean absolute log ratio per latent dimension of what the engine drew, scored by a bfloat16 actor."""
    from accelerate import Accelerator

    from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
    from flowgrpo_rc.models.lora import load_adapter_state

    model = demo("bfloat16", path)
    engine, lora, state = engine_and_state(model, "bfloat16", actor_compiles, **settings)
    config = DiffusionActorConfig(ppo_micro_batch_size_per_gpu=16)
    sde = {"sde_type": "sde", "noise_level": 0.7}
    actor = DiffusionActor(model, config, lora, Accelerator(cpu=True), **sde, total_optimizer_steps=1)
    load_adapter_state(actor.transformer, state)
    request = request_for(model, 16)
    batch = engine.generate(request).batch
    return float((actor.score(batch, request.conditioning).log_probs - batch["rollout_log_probs"]).abs().mean())


def times(build: Callable[[], Any]) -> dict[str, float]:
    """Time of a rollout by setting, as a ratio to that of the plain engine."""
    import torch

    model = build()
    small = model.transformer.config.num_layers < LARGE["num_layers"]
    request = request_for(model, 16 if small else 4, 32 if small else 128, 6 if small else 2)
    plain, *_ = engine_and_state(model, "float32")
    ratios = {}
    for name in TIMED:
        torch._dynamo.reset()  # as in a process with one engine
        other, *_ = engine_and_state(model, "float32", **SETTINGS[name])
        pairs = []
        for one in (plain, other):
            one.generate(request)  # compiles, and fills caches
        for _ in range(ROUNDS):
            took = []
            for one in (plain, other):
                begin = time.perf_counter()
                one.generate(request)
                took.append(time.perf_counter() - begin)
            pairs.append(took[1] / took[0])
        ratios[name] = statistics.median(pairs)
    return ratios


def layers(path: str) -> dict[str, float]:
    """The gap by kind of layer: the part of its name that blocks have in common."""
    from flowgrpo_rc.rollout.weights import layers_to_round

    model = demo("bfloat16", path)
    names = layers_to_round(model.transformer, model, "int8", ())
    every = layers_to_round(model.transformer, model, "fp8_emulated", ())
    kinds = sorted({kind_of(name) for name in names})
    found = {}
    for kind in kinds:
        others = [name for name in every if kind_of(name) != kind]
        found[kind] = gap(path, scale=0.0, quantization="fp8_emulated", quantization_skip=others)
        print(kind, found[kind], flush=True)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kind_of(name: str) -> str:
    """A layer's name without its block: ``transformer_blocks.3.attn.to_q`` is ``attn.to_q``."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[number + 1 :])


def table(gaps: dict[str, float], seconds: dict[str, dict[str, float]]) -> str:
    """A row an engine."""
    sizes = list(seconds)
    lines = [f"| engine | gap | {' | '.join(f'time, {size}' for size in sizes)} |", "|---" * (len(sizes) + 2) + "|"]
    for name, value in gaps.items():
        ratios = [f"{seconds[size][name]:.2f}" if name in seconds[size] else "" for size in sizes]
        lines.append(f"| {name} | {'0' if value == 0 else f'{value:.1e}'} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def layer_table(found: dict[str, float]) -> str:
    """A row a kind of layer."""
    lines = ["| layer | gap |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {value:.1e} |" for name, value in found.items())])


if __name__ == "__main__":
    main()
