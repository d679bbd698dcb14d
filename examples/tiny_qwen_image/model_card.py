"""The README that goes with the built model: what it is, how it was made, and what was measured on it."""

from collections.abc import Mapping
from pathlib import Path

from cards import data_table, parts_table, table, write_card
from diffusers import QwenImagePipeline
from evaluation import Score
from number_images import INK, PAPER
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
    write_card(
        folder,
        CARD,
        settings,
        quality=quality_table(scores),
        parts=parts_table(pipeline, sizes_in_words(pipeline)),
        vocabulary=len(pipeline.tokenizer),
        data=pictures_table(settings.images),
        minutes=minutes,
    )


def quality_table(scores: Mapping[int, Score]) -> str:
    if not scores:
        return "Not measured."
    rows = [(n, f"{score.reward:.3f}", f"{score.exact:.3f}", score.images) for n, score in scores.items()]
    return table(["Euler steps", "mean reward", "exactly right", "images"], rows)


def sizes_in_words(pipeline: QwenImagePipeline) -> dict[str, str]:
    transformer, vae = pipeline.transformer.config, pipeline.vae.config
    text_encoder = pipeline.text_encoder.config.text_config
    return {
        "transformer": f"{transformer.num_layers} blocks, "
        f"{transformer.num_attention_heads * transformer.attention_head_dim} wide",
        "vae": f"{vae.z_dim} latent channels, {pipeline.vae_scale_factor}x smaller",
        "text_encoder": f"{text_encoder.num_hidden_layers} layer, {text_encoder.hidden_size} wide, random",
    }


def pictures_table(images: int) -> str:
    shades = f"{INK[0]} to {INK[1] - 1}, {PAPER[0]} to {PAPER[1] - 1}"
    return data_table(("pictures", images), ("grey of the ink, of the paper", shades))
