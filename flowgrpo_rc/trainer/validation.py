"""Validation: held-out prompts, fixed noise, deterministic sampling with the rollout engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout import RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.rollout.seeds import VALIDATION, seed_for
from flowgrpo_rc.trainer.samples import Sample
from flowgrpo_rc.trainer.setup import Run


@dataclass(frozen=True)
class Validation:
    """Mean rewards as ``val/reward/...`` and the first samples, for the grids (main process)."""

    metrics: dict[str, float]
    samples: list[Sample]


Encode = Callable[[list[PromptRecord], PipelineConfig], Conditioning]
Generate = Callable[[RolloutRequest], Trajectories]


def validate(run: Run, conditioning: Encode, generate: Generate) -> Validation:
    """Score ``val_kwargs.n`` images of every validation prompt.

    Image ``k`` of prompt ``i`` always starts from the same noise, so that two validations differ by the adapter
    alone. The images are dealt out over the processes.
    """
    val = run.config.actor_rollout_ref.rollout.val_kwargs
    accelerator = run.accelerator
    count = len(run.val_prompts) * val.n
    own = list(range(accelerator.process_index, count, accelerator.num_processes))
    results = _score(run, conditioning, generate, own) if own else []
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        results = gather_object(results)
    results.sort(key=lambda r: r["index"])
    names = results[0]["rewards"]
    metrics = {f"val/reward/{n}": float(np.mean([r["rewards"][n] for r in results])) for n in names}
    samples = [
        Sample(
            r["image"],
            run.val_prompts[r["index"] % len(run.val_prompts)].prompt,
            r["rewards"]["mean"],
            r["text"],
        )
        for r in results
        if r["image"] is not None
    ]
    return Validation(metrics, samples)


def _score(run: Run, conditioning: Encode, generate: Generate, own: list[int]) -> list[dict[str, Any]]:
    """Sample and reward image numbers ``own``; number ``k * prompts + i`` is image ``k`` of prompt ``i``."""
    rollout = run.config.actor_rollout_ref.rollout
    val, shown = rollout.val_kwargs, run.config.trainer.log_val_generations
    records = [run.val_prompts[i % len(run.val_prompts)] for i in own]
    distinct = {(r.prompt, r.negative_prompt): r for r in records}
    row = {key: i for i, key in enumerate(distinct)}
    pipeline = rollout.validation_pipeline
    trajectories = generate(
        RolloutRequest(
            conditioning=conditioning(list(distinct.values()), pipeline),
            prompt_index=torch.tensor([row[r.prompt, r.negative_prompt] for r in records]),
            num_inference_steps=pipeline.num_inference_steps,
            seeds=[seed_for(val.seed, VALIDATION, 0, i) for i in own],
            window_starts=None,
        )
    )
    images = trajectories.images.numpy()
    reward = run.reward(images, [r.prompt for r in records], [r.metadata for r in records])
    texts = reward.texts or [None] * len(own)
    return [
        {
            "index": index,
            "rewards": {"mean": float(reward.total[i])} | {n: float(v[i]) for n, v in reward.parts.items()},
            "image": images[i] if index < shown else None,
            "text": texts[i],
        }
        for i, index in enumerate(own)
    ]
