"""How well a pipeline edits: what OCR reads of its pictures, and how near their colours are to the reference's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from number_images import IMAGE_SIZE
from style_reward import same_style

from flowgrpo_rc.data import PromptRecord, load_prompts
from flowgrpo_rc.rewards import OCRReward


@dataclass(frozen=True)
class EditScore:
    """Means over `images` pictures; `exact` is the share whose number OCR reads right."""

    ocr: float
    exact: float
    style: float
    images: int


def edit(
    pipeline: FluxKontextPipeline, records: Sequence[PromptRecord], *, text_tokens: int, steps: int, seed: int
) -> np.ndarray:
    """One picture per record: (N, H, W, 3) uint8."""
    references = np.stack([np.asarray(record.images[0], dtype=np.float32) for record in records]) / 255
    images = pipeline(
        image=torch.from_numpy(references).permute(0, 3, 1, 2),
        prompt=[record.prompt for record in records],
        height=IMAGE_SIZE,
        width=IMAGE_SIZE,
        max_area=IMAGE_SIZE**2,
        _auto_resize=False,
        num_inference_steps=steps,
        max_sequence_length=text_tokens,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return (images * 255).round().astype(np.uint8)


def evaluate_edits(
    pipeline: FluxKontextPipeline, files: Sequence[Path], reward: OCRReward, *, text_tokens: int, steps: int, seeds: int
) -> EditScore:
    """Score `seeds` pictures of every row of the prompt files."""
    records = load_prompts(files)
    prompts, rows = [r.prompt for r in records], [r.metadata for r in records]
    ocr, style = [], []
    for seed in range(seeds):
        images = edit(pipeline, records, text_tokens=text_tokens, steps=steps, seed=seed)
        ocr.append(reward(images, prompts)[0])
        style.append(same_style(images, prompts, rows))
    read, near = np.concatenate(ocr), np.concatenate(style)
    return EditScore(float(read.mean()), float((read == 1).mean()), float(near.mean()), len(read))
