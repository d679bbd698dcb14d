"""The model card of a run's final LoRA: the README.md that a hub shows."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo_rc.correction.options.explanation import in_force
from flowgrpo_rc.data import file_list
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.lora import ADAPTER_FILE
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.trainer.config import FlowGRPOConfig

_CARD = """---
{metadata}
---

# {name}

A LoRA for `{base}`, trained {how}. It acts at full strength: scale 1, whatever a
program reads of its metadata.{average}

```python
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{path}")
{load}
image = pipe({arguments}).images[0]
```

## Training

| | |
|---|---|
| prompts | {prompts} from {files} |
| batches | {steps} of {images} images, {size} |
| LoRA | rank {rank}, alpha {alpha} |
| optimizer | AdamW, learning rate {lr:g} |
| images | {drawn} |
| rollout correction | {correction} |

## Evaluation

{evaluation}

A model that is trained for a reward also learns the reward's weaknesses. Compare images with those of the base model,
and with a scorer that had no part in the training, before you rely on it.
"""


def model_card(
    config: FlowGRPOConfig, model: DiffusionModel, rows: Sequence[Mapping[str, Any]], prompts: int, *, averaged: bool
) -> str:
    """The card as Markdown, with the metadata that a hub reads.

    Args:
        config: of the run.
        model: that the LoRA belongs to.
        rows: of ``metrics.jsonl``.
        prompts: number of training prompts.
        averaged: it is the moving average of the LoRA.
    """
    from huggingface_hub import ModelCardData

    parts = config.actor_rollout_ref
    rollout = parts.rollout
    name = type(model.pipe).__name__
    path = parts.model.path
    # A folder on this machine is no model of a hub.
    is_local = os.path.exists(resolve_asset(path))
    metadata = ModelCardData(
        base_model=None if is_local else path,
        library_name="diffusers",
        pipeline_tag="image-to-image" if FAMILIES[name].images[0] else "text-to-image",
        tags=["lora", "flow-grpo", "reinforcement-learning"],
    )
    load = f'pipe.transformer.load_lora_adapter("lora", weight_name="{ADAPTER_FILE}")'
    if hasattr(model.pipe, "load_lora_weights"):
        load = 'pipe.load_lora_weights("lora")'
    decay = parts.actor.ema_decay
    pipeline = rollout.pipeline
    objective = parts.actor.diffusion_loss.objective
    how = f"by online reinforcement learning (`{objective.name}`) for the reward *{config.reward.in_words()}*"
    precision = rollout.precision_in_words
    drawn = f"drawn by {rollout.name} in {precision}, {pipeline.num_inference_steps} denoising steps"
    if config.data.preferences:
        how = f"by `{objective.name}` on pairs of a preferred and a rejected image"
        drawn = "the pairs of the files"
    return _CARD.format(
        metadata=metadata.to_yaml(),
        name=f"{config.trainer.experiment_name}: LoRA",
        base=path,
        how=how,
        average=f" These are the moving averages of its weights (decay {decay:g})." if averaged else "",
        pipeline=name,
        path=resolve_asset(path),
        load=load,
        arguments=_arguments(name, rollout.validation_pipeline),
        prompts=prompts,
        files=", ".join(
            os.path.basename(file) for file in file_list("data", config.data.preferences or config.data.train_files)
        ),
        steps=rows[-1]["step"] if rows else 0,
        images=config.prompts * rollout.drawn,
        size=f"{pipeline.width} x {pipeline.height} pixels",
        rank=parts.model.lora_rank,
        alpha=parts.model.lora_alpha,
        lr=parts.actor.optim.lr,
        drawn=drawn,
        correction=in_force(config.rollout_correction),
        evaluation=_evaluation(rows, rollout.validation_pipeline),
    )


def _arguments(name: str, pipeline: PipelineConfig) -> str:
    """Arguments of the diffusers pipeline ``name`` that validation corresponds to."""
    family = FAMILIES[name]
    given: dict[str, Any] = {"height": pipeline.height, "width": pipeline.width}
    given["num_inference_steps"] = pipeline.num_inference_steps
    if family.guidance_scale_is_cfg:
        given["guidance_scale"] = pipeline.true_cfg_scale - family.cfg_above_guidance
    else:
        given |= {"true_cfg_scale": pipeline.true_cfg_scale} if family.takes_cfg else {}
        given |= {} if pipeline.guidance_scale is None else {"guidance_scale": pipeline.guidance_scale}
    image = "image=picture, " if family.images[0] else ""
    return f'{image}prompt="a prompt", ' + ", ".join(f"{key}={value}" for key, value in given.items())


def _evaluation(rows: Sequence[Mapping[str, Any]], pipeline: PipelineConfig) -> str:
    """Held-out rewards of the first and the last validation as a table."""
    held_out = [row for row in rows if "val/reward/mean" in row]
    if not held_out:
        return "The run had no validation."
    first, last = held_out[0], held_out[-1]
    lines = [
        f"Held-out prompts, fixed noise, deterministic sampling, {pipeline.num_inference_steps} steps, "
        f"{pipeline.width} x {pipeline.height} pixels, guidance {pipeline.guidance_in_words}.",
        "",
        f"| reward | step {first['step']} | step {last['step']} |",
        "|---|---|---|",
    ]
    for name in last:
        if name.startswith("val/reward/"):
            before = f"{first[name]:.4g}" if name in first else ""
            lines.append(f"| {name.removeprefix('val/reward/')} | {before} | {last[name]:.4g} |")
    return "\n".join(lines)
