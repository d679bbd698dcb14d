"""The README that goes with the built model: what it is, how it was made, and what was measured on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cards import data_table, parts_table, table, write_card
from diffusers import FluxKontextPipeline
from edit_images import INK_SATURATION, INK_VALUE, PAPER_SATURATION, PAPER_VALUE
from kontext_evaluation import EditScore

CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: image-to-image
tags: [flux, kontext, image-editing, tiny, reinforcement-learning, flow-matching]
---

# Tiny FLUX.1-Kontext: another number in the same style, on purpose not too well

A real `FluxKontextPipeline` in miniature ({megabytes:.1f} MB). Its reference is a picture of a two-digit number, and
for the prompt `make it "42"` it draws that number in the reference's colours, {size}x{size} pixels. Its training was
stopped early, so that many pictures are wrong or misshapen and reinforcement learning has something to improve.

```python
from diffusers import FluxKontextPipeline
from PIL import Image

pipe = FluxKontextPipeline.from_pretrained("assets/tiny_kontext")
reference = Image.open("assets/tiny_edit/references/test_00.png")
image = pipe(
    image=reference,
    prompt='make it "42"',
    height=32,
    width=32,
    max_area=32 * 32,
    _auto_resize=False,
    num_inference_steps=10,
    max_sequence_length={tokens},
).images[0]
```

**Intended use:** tests and demonstrations of reinforcement learning for image editing, on a CPU in minutes. It can draw
nothing but the numbers 00 to 99 and is of no use for anything else.

## Quality

OCR reward: `1 - min(d, n) / n`, where `d` is the edit distance between what the OCR engine reads and the number, and
`n` = 2 is the number's length. Style: 1 for the reference's colours of paper and ink, 0 where they are 48 grey levels
off (`examples/tiny_kontext/style_reward.py`). Measured on the saved weights, computing in float32, over the prompts of
`assets/tiny_edit`:

{quality}

## Parts

{parts}

Transformer and VAE are stored in float16, the text encoders in float32. Both tokenizers have a token a character. The
text encoders are random: the transformer learned to read their output. It embeds no guidance.

## Data

Rendered pictures in pairs: two numbers in one style, each the reference of the other; no photographs, no scraped data,
no other model. All hundred numbers were seen here; the lists in `assets/tiny_edit` hold out 20 of them, and the
references that they are asked for with, from reinforcement learning only.

{data}

## Training

By `examples/tiny_kontext/build_tiny_kontext.py`, in {minutes:.0f} minutes of one core with the settings below. First
the VAE on the pictures (squared error + 0.1 absolute error + 0.001 KL divergence + squared error of the mean colours
of squares of 8 pixels), then the transformer with the rectified-flow loss on the VAE's latents, with those of the
reference behind them. Both use one-cycle learning rates; of the transformer, the weights' moving average is kept.

{settings}

## License

Apache-2.0, like the project that it belongs to.
"""


def write_kontext_card(
    folder: Path, pipeline: FluxKontextPipeline, settings: Any, scores: Mapping[int, EditScore], minutes: float
) -> None:
    """Write `README.md` into `folder`, which holds the saved pipeline."""
    write_card(
        folder,
        CARD,
        settings,
        tokens=pipeline.tokenizer_max_length,
        quality=_quality(scores),
        parts=parts_table(pipeline, _sizes_in_words(pipeline)),
        data=_pairs_table(settings.pairs),
        minutes=minutes,
    )


def _quality(scores: Mapping[int, EditScore]) -> str:
    if not scores:
        return "Not measured."
    rows = [(n, *(f"{x:.3f}" for x in (s.ocr, s.exact, s.style)), s.images) for n, s in scores.items()]
    return table(["Euler steps", "mean OCR reward", "exactly right", "mean style", "images"], rows)


def _sizes_in_words(pipeline: FluxKontextPipeline) -> dict[str, str]:
    transformer, vae = pipeline.transformer.config, pipeline.vae.config
    clip, t5 = pipeline.text_encoder.config, pipeline.text_encoder_2.config
    return {
        "transformer": f"{transformer.num_layers} double and {transformer.num_single_layers} single blocks, "
        f"{transformer.num_attention_heads * transformer.attention_head_dim} wide",
        "vae": f"{vae.latent_channels} latent channels, {pipeline.vae_scale_factor}x smaller",
        "text_encoder": f"{clip.num_hidden_layers} layers, {clip.hidden_size} wide, random",
        "text_encoder_2": f"{t5.num_layers} layers, {t5.d_model} wide, random",
    }


def _pairs_table(pairs: int) -> str:
    return data_table(
        ("pairs", pairs),
        ("paper, of any hue", f"saturation {_range(PAPER_SATURATION)}, value {_range(PAPER_VALUE)}"),
        ("ink, of any hue", f"saturation {_range(INK_SATURATION)}, value {_range(INK_VALUE)}"),
    )


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:g} to {ends[1]:g}"
