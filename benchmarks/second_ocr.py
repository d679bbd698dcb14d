"""Readings of an adapter's images by a second OCR engine, tesseract, which had no part in training.

    python benchmarks/second_ocr.py --lora outputs/flowgrpo_rc/tiny_qwen_image_ocr/lora --held-out --each 10

Draws with plain diffusers in float32, so it also shows what the adapter does outside the engine that it was trained
with. Prints JSON: the share of images read exactly right by the reward's engine and by tesseract.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEMO = "asset:tiny_qwen_image"
HELD_OUT = Path(__file__).resolve().parent.parent / "assets" / "tiny_ocr" / "test.txt"


def second_ocr(
    lora: Path | None,
    targets: Sequence[str],
    path: str = DEMO,
    options: dict[str, Any] | None = None,
    written: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Draw one image of each of ``targets`` and let both engines read it.

    Args:
        path, options: see ``draw``.
        written: the prompts of the images; by default those that the demo's model has learned.
    """
    return read_by_both(draw(lora, list(written or (f'the text "{t}"' for t in targets)), path, options), targets)


def draw(
    lora: Path | None, prompts: Sequence[str], path: str = DEMO, options: dict[str, Any] | None = None
) -> list[Any]:
    """One PIL image of each prompt, by plain diffusers.

    Args:
        path: the model.
        options: arguments of its pipeline, besides prompts, sizes and noise; by default those of the demo's.
    """
    import torch

    from flowgrpo_rc.models import load_model

    pipe = load_model(path).pipe
    if lora is not None:
        pipe.load_lora_weights(str(lora))
    pipe.set_progress_bar_config(disable=True)
    options = {"true_cfg_scale": 1.0} if options is None else options
    images = []
    for start in range(0, len(prompts), 50):
        part = list(prompts[start : start + 50])
        noise = [torch.Generator().manual_seed(10_000 + start + i) for i in range(len(part))]
        images += pipe(part, height=32, width=32, num_inference_steps=6, generator=noise, **options).images
    return images


def read_by_both(images: Sequence[Any], targets: Sequence[str]) -> dict[str, Any]:
    """Share of PIL images that each engine reads exactly."""
    import numpy as np

    from flowgrpo_rc.rewards import OCRReward

    own = OCRReward().read(np.stack([np.asarray(i.convert("RGB")) for i in images]))
    other = [tesseract(image) for image in images]
    return {
        "images": len(images),
        "reward_engine_exact": sum(a == b for a, b in zip(own, targets, strict=True)) / len(targets),
        "tesseract_exact": sum(a == b for a, b in zip(other, targets, strict=True)) / len(targets),
    }


def tesseract(image: Any) -> str:
    """Tesseract's reading of one image: a line of digits, enlarged four times, with a border."""
    from PIL import Image, ImageOps

    grey = image.convert("L")
    large = grey.resize((grey.width * 4, grey.height * 4), Image.Resampling.LANCZOS)
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        ImageOps.expand(large, 40, fill=large.getextrema()[1]).save(file.name)
        command = ["tesseract", file.name, "-", "--psm", "7", "-c", "tessedit_char_whitelist=0123456789"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def held_out_numbers() -> list[str]:
    """The numbers that RL never sees."""
    return re.findall(r'"(\d+)"', HELD_OUT.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", type=Path, help="an adapter in diffusers' format; the base model if left out")
    parser.add_argument("--each", type=int, default=3, help="images of every number (%(default)s)")
    parser.add_argument("--held-out", action="store_true", help="only the numbers that RL never sees")
    arguments = parser.parse_args()
    numbers = held_out_numbers() if arguments.held_out else [f"{n:02d}" for n in range(100)]
    print(json.dumps(second_ocr(arguments.lora, numbers * arguments.each)))


if __name__ == "__main__":
    main()
