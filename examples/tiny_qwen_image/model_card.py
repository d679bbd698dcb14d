"""The README that goes with the built model: what it is, how it was made, and what was measured on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from diffusers import QwenImagePipeline
from evaluation import Score
from number_images import FONT_SIZES, FONTS, IMAGE_SIZE, INK, MAX_SHIFT, PAPER
from training import Settings

CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
tags: [qwen-image, tiny, reinforcement-learning, flow-matching]
---

# Tiny Qwen-Image: two-digit numbers, on purpose not too well

A real `QwenImagePipeline` in miniature ({megabytes:.1f} MB). For the prompt `the text "42"` it draws that
number, {size}x{size} pixels. Its training was stopped early, so that many pictures are wrong or misshapen and
reinforcement learning from an OCR reward has something to improve.

```python
from diffusers import QwenImagePipeline

pipe = QwenImagePipeline.from_pretrained("assets/tiny_qwen_image")
image = pipe('the text "42"', height=32, width=32, num_inference_steps=10, true_cfg_scale=1.0).images[0]
```

**Intended use:** tests and demonstrations of reinforcement learning for flow-matching image models, on a CPU
in minutes. It can draw nothing but the numbers 00 to 99 and is of no use for anything else.

## Quality

OCR reward `1 - min(d, n) / n`, where `d` is the edit distance between what the OCR engine reads and the
number, and `n` = 2 is the number's length. Measured on the saved weights, computing in float32, without
guidance, over all hundred numbers:

{quality}

## Parts

{parts}

Transformer and VAE are stored in float16, the text encoder in float32. The tokenizer (`Qwen2Tokenizer`,
{vocabulary} tokens) has one token per byte and one per word of the pipeline's prompt template, which is 34
tokens long as with the full-size tokenizer. The text encoder is random: the transformer learned to read its
output.

## Data

Rendered pictures, every number equally often; no photographs, no scraped data, no other model. All hundred
numbers were seen here; the lists in `assets/tiny_ocr` hold out 20 of them from reinforcement learning only.

{data}

## Training

By `examples/tiny_qwen_image/build_tiny_qwen_image.py`, in {minutes:.0f} minutes on a CPU with the settings
below. First the VAE on the pictures (squared error + 0.1 absolute error + 0.001 KL divergence), then the
transformer with the rectified-flow loss on the VAE's latents. Both use one-cycle learning rates; of the
transformer, the weights' moving average is kept.

{settings}

## License

Apache-2.0, like the project that it belongs to.
"""


def write_model_card(
    folder: Path, pipeline: QwenImagePipeline, settings: Settings, scores: Mapping[int, Score], minutes: float
) -> None:
    """Write `README.md` into `folder`, which holds the saved pipeline."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    card = CARD.format(
        megabytes=size / 1e6,
        size=IMAGE_SIZE,
        quality=quality_table(scores),
        parts=parts_table(pipeline),
        vocabulary=len(pipeline.tokenizer),
        data=data_table(settings),
        minutes=minutes,
        settings=table(["setting", "value"], asdict(settings).items()),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    rows = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def quality_table(scores: Mapping[int, Score]) -> str:
    if not scores:
        return "Not measured."
    rows = [(n, f"{score.reward:.3f}", f"{score.exact:.3f}", score.images) for n, score in scores.items()]
    return table(["Euler steps", "mean reward", "exactly right", "images"], rows)


def parts_table(pipeline: QwenImagePipeline) -> str:
    transformer, vae = pipeline.transformer.config, pipeline.vae.config
    text_encoder = pipeline.text_encoder.config.text_config
    sizes = {
        "transformer": f"{transformer.num_layers} blocks, "
        f"{transformer.num_attention_heads * transformer.attention_head_dim} wide",
        "vae": f"{vae.z_dim} latent channels, {pipeline.vae_scale_factor}x smaller",
        "text_encoder": f"{text_encoder.num_hidden_layers} layer, {text_encoder.hidden_size} wide, random",
    }
    rows = []
    for name, size in sizes.items():
        part = getattr(pipeline, name)
        millions = sum(parameter.numel() for parameter in part.parameters()) / 1e6
        rows.append((f"`{name}`", f"`{type(part).__name__}`", f"{millions:.2f} M", size))
    return table(["part", "class", "parameters", "size"], rows)


def data_table(settings: Settings) -> str:
    rows = [
        ("pictures", settings.images),
        ("fonts", ", ".join(font.removesuffix(".ttf") for font in FONTS)),
        ("font sizes", ", ".join(map(str, FONT_SIZES))),
        ("largest shift from the centre", f"{MAX_SHIFT} pixels"),
        ("grey of the ink, of the paper", f"{INK[0]} to {INK[1] - 1}, {PAPER[0]} to {PAPER[1] - 1}"),
    ]
    return table(["property", "value"], rows)
