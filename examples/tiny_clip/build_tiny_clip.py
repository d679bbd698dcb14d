"""Build a real `CLIPModel` in miniature that knows how pictures of two-digit numbers and their prompts belong together.

    python examples/tiny_clip/build_tiny_clip.py

takes about three minutes of one core; the defaults are the ones of the shipped model, `assets/tiny_clip`. It learns
from the pictures of the tiny Qwen-Image (`examples/tiny_qwen_image/number_images.py`) by CLIP's own contrastive loss:
every batch holds one picture of each of the hundred numbers and their hundred prompts, and each picture has to find its
prompt and each prompt its picture. The result depends on the seed alone on a given machine and thread count.
"""

import argparse
import string
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny_qwen_image"))
from clip_card import Score, write_clip_card  # noqa: E402
from number_images import IMAGE_SIZE, NUMBERS, make_dataset, prompt_for  # noqa: E402
from saving import make_readable, refuse_other_folders, replacing  # noqa: E402
from training import Descent  # noqa: E402

OUTPUT = HERE.parents[1] / "assets" / "tiny_clip"
WIDTH = 64
PATCH = 4
TOKENS = 77
"""As in the full-size CLIPs: longer prompts are cut there."""
LARGEST_SCALE = 100.0
"""What CLIP's training limits the factor of the cosines to."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what comes out."""

    seed: int
    threads: int
    images: int
    steps: int
    learning_rate: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the model")
    parser.add_argument("--unseen", type=int, default=1000, help="pictures to judge it by; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what decides the result")
    parser.add_argument("--images", type=int, default=12000, help="rendered pictures to train on")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    refuse_other_folders(parser, arguments.output, "preprocessor_config.json", "no CLIP")
    if arguments.images < len(NUMBERS) or arguments.images % len(NUMBERS):
        parser.error(f"--images: got {arguments.images}; give a multiple of {len(NUMBERS)}")
    return arguments


def make_tokenizer() -> CLIPTokenizer:
    """A token a character, and one a character that ends a word."""
    characters = string.printable.strip()
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TOKENS)


def make_model(tokenizer: CLIPTokenizer, seed: int) -> CLIPModel:
    """The untrained model: three layers look at 8 x 8 patches, two read the prompt."""
    layers = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2}
    projection = WIDTH // 2
    torch.manual_seed(seed)
    return CLIPModel(
        CLIPConfig(
            text_config={
                **layers,
                "num_hidden_layers": 2,
                "projection_dim": projection,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": TOKENS,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={
                **layers,
                "num_hidden_layers": 3,
                "projection_dim": projection,
                "image_size": IMAGE_SIZE,
                "patch_size": PATCH,
            },
            projection_dim=projection,
        )
    )


def make_processor() -> Any:
    """CLIP's own preprocessing, for small pictures."""
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=side)


def pictures(processor: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rendered pictures as the model takes them, (count, 3, height, width), and the index of each one's number."""
    images, labels = make_dataset(count, seed)
    pixels = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return processor(images=list(pixels), return_tensors="pt")["pixel_values"], labels


def prompt_tokens(tokenizer: CLIPTokenizer) -> dict[str, Tensor]:
    """The hundred prompts, which are equally long."""
    return dict(tokenizer([prompt_for(number) for number in NUMBERS], return_tensors="pt"))


def train(model: CLIPModel, pixels: Tensor, tokens: dict[str, Tensor], settings: Settings) -> None:
    """Learn which picture belongs to which prompt. ``pixels`` has the numbers in turn: 00, 01, ... 99, 00, ..."""
    by_number = pixels.unflatten(0, (-1, len(NUMBERS)))
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    descent = Descent("clip", optimizer, settings.learning_rate, settings.steps)
    numbers = torch.arange(len(NUMBERS))
    model.train()
    for _ in range(settings.steps):
        chosen = torch.randint(len(by_number), (len(NUMBERS),), generator=generator)
        descent.step(model(pixel_values=by_number[chosen, numbers], **tokens, return_loss=True).loss)
        with torch.no_grad():
            model.logit_scale.clamp_(max=np.log(LARGEST_SCALE))
    model.eval()


@torch.no_grad()
def score(folder: Path, pixels: Tensor, labels: Tensor, tokens: dict[str, Tensor]) -> Score:
    """What the saved model makes of pictures that it has not seen."""
    model = CLIPModel.from_pretrained(folder).eval()
    cosines = torch.cat([model(pixel_values=p, **tokens).logits_per_image for p in pixels.split(200)])
    cosines /= model.logit_scale.exp()
    return Score(
        top1=(cosines.argmax(1) == labels).double().mean().item(),
        right=cosines[torch.arange(len(labels)), labels].double().mean().item(),
        all=cosines.double().mean().item(),
        images=len(labels),
    )


def main() -> None:
    arguments = vars(parse_arguments())
    output = arguments.pop("output")
    unseen = arguments.pop("unseen")
    settings = Settings(**arguments)
    torch.set_num_threads(settings.threads)

    start = time.process_time()
    tokenizer = make_tokenizer()
    processor = make_processor()
    model = make_model(tokenizer, settings.seed)
    tokens = prompt_tokens(tokenizer)
    pixels, _ = pictures(processor, settings.images, settings.seed)
    train(model, pixels, tokens, settings)
    minutes = (time.process_time() - start) / 60

    with replacing(output) as folder:
        for part in (model, processor, tokenizer):
            part.save_pretrained(folder)
        make_readable(folder)
        # Another seed than the training pictures': fonts, places and shades are drawn anew.
        found = score(folder, *pictures(processor, unseen, settings.seed + 1), tokens) if unseen else None
        write_clip_card(folder, model, settings, found, minutes)
    print(f"{output}, {minutes:.1f} minutes of processor time, {found or 'not measured'}")


if __name__ == "__main__":
    main()
