"""The README that goes with the built model: what it is, how it was made, and what was measured on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cards import count, table, write_card
from model_card import pictures_table
from transformers import CLIPModel

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: zero-shot-image-classification
tags: [clip, tiny, reward-model, reinforcement-learning]
---

# Tiny CLIP: pictures of two-digit numbers and their prompts

A real `CLIPModel` in miniature ({parameters} parameters, {megabytes:.1f} MB). The cosine between a picture and the
prompt `the text "42"` says how well the picture shows that number: a learned, smooth reward, where OCR's is exact.

```yaml
reward:
  functions: {{clip_cosine: 1.0}}
  clip_cosine: {{model_path: asset:tiny_clip}}
```

**Intended use:** tests and demonstrations of learned rewards, together with the tiny Qwen-Image of this package, on
a CPU. It knows nothing but the numbers 00 to 99, in pictures of {size}x{size} pixels.

## Quality

Measured on the saved weights, on pictures drawn with another seed than those of the training.

{quality}

## Parts

{parts}

Weights are stored in float32. The tokenizer (`CLIPTokenizer`, {vocabulary} tokens) has a token a character and one a
character that ends a word; prompts are cut at {longest} tokens as by the full-size CLIPs.

## Data

Rendered pictures, every number equally often; no photographs, no scraped data, no other model. All hundred numbers
were seen here, also the 20 that `assets/tiny_ocr` holds out from reinforcement learning.

{data}

## Training

By `examples/tiny_clip/build_tiny_clip.py`, in {minutes:.0f} minutes of one core with the settings below: CLIP's
contrastive loss over batches of one picture of each number and the hundred prompts, AdamW with a one-cycle learning
rate, the factor of the cosines limited to 100.

{settings}

## License

Apache-2.0, like the project that it belongs to.
"""


@dataclass(frozen=True)
class Score:
    """How well a model tells prompts apart, over `images` pictures and all hundred prompts."""

    top1: float
    """Share of pictures whose own prompt has the largest cosine."""
    right: float
    """Mean cosine with the own prompt."""
    all: float
    """Mean cosine with all prompts."""
    images: int


def write_clip_card(folder: Path, model: CLIPModel, settings: Any, score: Score | None, minutes: float) -> None:
    """Write `README.md` into `folder`, which holds the saved model."""
    write_card(
        folder,
        CARD,
        settings,
        parameters=f"{count(model):,}",
        quality=quality_table(score),
        parts=parts_table(model),
        vocabulary=model.config.text_config.vocab_size,
        longest=model.config.text_config.max_position_embeddings,
        data=pictures_table(settings.images),
        minutes=minutes,
    )


def quality_table(score: Score | None) -> str:
    if score is None:
        return "Not measured."
    rows = [
        ("right prompt first among 100 (top-1)", f"{score.top1:.1%}"),
        ("mean cosine with the right prompt", f"{score.right:.3f}"),
        ("mean cosine with all prompts", f"{score.all:.3f}"),
        ("pictures", score.images),
    ]
    return table(["figure", "value"], rows)


def parts_table(model: CLIPModel) -> str:
    text, vision = model.config.text_config, model.config.vision_config
    size = "{} layers, {} wide"
    patches = f", patches of {vision.patch_size}x{vision.patch_size} pixels"
    rows = [
        ("`text_model`", count(model.text_model), size.format(text.num_hidden_layers, text.hidden_size)),
        (
            "`vision_model`",
            count(model.vision_model),
            size.format(vision.num_hidden_layers, vision.hidden_size) + patches,
        ),
        (
            "projections",
            count(model.visual_projection) + count(model.text_projection),
            f"to {model.config.projection_dim}",
        ),
    ]
    return table(["part", "parameters", "size"], rows)
