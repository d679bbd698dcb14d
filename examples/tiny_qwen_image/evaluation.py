"""How well a pipeline draws what it is asked for, read by a real OCR engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import QwenImagePipeline
from number_images import IMAGE_SIZE, NUMBERS, prompt_for

from flowgrpo_rc.rewards import OCRReward


@dataclass(frozen=True)
class Score:
    """Mean OCR reward and share of exactly right pictures over `images` pictures."""

    reward: float
    exact: float
    images: int


def draw(pipeline: QwenImagePipeline, prompts: Sequence[str], steps: int, seed: int) -> np.ndarray:
    """One picture per prompt, without guidance: (N, H, W, 3) uint8."""
    images = pipeline(
        prompt=list(prompts),
        height=IMAGE_SIZE,
        width=IMAGE_SIZE,
        num_inference_steps=steps,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return (images * 255).round().astype(np.uint8)


def evaluate(pipeline: QwenImagePipeline, reward: OCRReward, *, steps: int, seeds: int) -> Score:
    """Score all hundred numbers, `seeds` pictures each."""
    prompts = [prompt_for(number) for number in NUMBERS]
    scores = np.concatenate([reward(draw(pipeline, prompts, steps, seed), prompts)[0] for seed in range(seeds)])
    return Score(reward=float(scores.mean()), exact=float((scores == 1).mean()), images=len(scores))
