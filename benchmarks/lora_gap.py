"""The gap between a bfloat16 engine and a bfloat16 actor, family by family, on the tiny pipelines of the tests.

    python benchmarks/lora_gap.py             # measures, and writes the table of docs/low_precision.md

Weights of the base are random, those of the LoRA Gaussian with a deviation of .1. The engine draws 16 images at a time,
one stochastic step each. The actor scores the steps with the LoRA's products in float32, then in bfloat16, from the
same float32 weights: 16 images at a time, then 8, for which a processor may have other kernels.
"""

import json
import sys
import tempfile
from typing import Any

from machine import describe
from training_runs import HERE, write_table

sys.path.insert(0, str(HERE.parent / "tests"))
RESULTS = HERE / "results" / "lora_gap.json"
PAGE = HERE.parent / "docs" / "low_precision.md"
IMAGES = 16
COLUMNS = {
    "float32, same rows": ("float32", IMAGES),
    "bfloat16, same rows": ("bfloat16", IMAGES),
    "bfloat16, half the rows": ("bfloat16", IMAGES // 2),
}
"""Precision of the LoRA's products in the actor, and the images that it scores at a time."""


def main() -> None:
    from tiny_families import TINY

    found = {}
    for family in TINY:
        found[family] = gaps(family)
        print(family, found[family], flush=True)
    RESULTS.write_text(json.dumps({"machine": describe(), "gaps": found}, indent=1) + "\n")
    write_table(PAGE, RESULTS, table(found))


def gaps(name: str) -> dict[str, float]:
    """Mean absolute log ratio per latent dimension, by column."""
    from tiny_families import TINY

    from flowgrpo_rc.models import load_model

    family = TINY[name]
    with tempfile.TemporaryDirectory() as folder:
        family.before_loading()
        family.build().save_pretrained(folder)
        return {column: gap(family, load_model(folder, dtype="bfloat16"), *how) for column, how in COLUMNS.items()}


def gap(family: Any, model: Any, computes_in: str, at_once: int) -> float:
    """Of one rollout and one scoring pass."""
    import torch
    from accelerate import Accelerator
    from tiny_families import PROMPTS
    from tiny_families.references import asked

    from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
    from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder
    from flowgrpo_rc.models.lora import adapter_parameters, adapter_state
    from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest

    lora = ModelConfig(dtype="bfloat16", lora_rank=4, lora_alpha=8, lora_compute_dtype=computes_in)
    engine = DiffusersEngine(model, lora, dtype=torch.bfloat16, micro_batch_size=IMAGES, device="cpu")
    config = DiffusionActorConfig(ppo_micro_batch_size_per_gpu=at_once)
    sde = {"sde_type": "sde", "noise_level": 0.7}
    actor = DiffusionActor(model, config, lora, Accelerator(cpu=True), **sde, total_optimizer_steps=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(actor.transformer).values():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    engine.sync(adapter_state(actor.transformer), 0)
    cfg, embedded = family.guidances[-1]
    encoder = PromptEncoder(model, family.length)
    prompts, negative = (
        encoder(asked(family.images, texts, family.reference_area))
        for texts in (PROMPTS, [model.negative_prompt] * len(PROMPTS))
    )
    height, width = family.sizes[0]
    conditioning = Conditioning(prompts, negative if cfg > 1 else None, cfg, embedded, height, width)
    index = torch.arange(IMAGES) % len(PROMPTS)
    starts = torch.full((IMAGES,), 2)
    request = RolloutRequest(conditioning, index, 6, list(range(IMAGES)), starts, 1, noise_level=0.7)
    batch = engine.generate(request).batch
    return float((actor.score(batch, conditioning).log_probs - batch["rollout_log_probs"]).abs().mean())


def table(found: dict[str, dict[str, float]]) -> str:
    """A row a family."""
    lines = [f"| tiny pipeline | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(cell(value) for value in row.values())} |" for name, row in found.items()]
    return "\n".join(lines)


def cell(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


if __name__ == "__main__":
    main()
