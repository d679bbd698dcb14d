"""Rewrites of held-out requests and their pictures, before a run of the example script and after it.

    bash examples/flowgrpo_trainer/run_tiny_prompt_writer.sh trainer.total_training_steps=60 trainer.seed=1
    python benchmarks/prompt_writer_picture.py outputs/flowgrpo_rc/tiny_prompt_writer

Writes the picture of docs/prompt_writer.md. Both rows start from the same seeds: the first rewrite and the first image
that come are shown, none is chosen.
"""

import argparse
import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
from prompt_writer import requests, rewrites
from second_ocr import draw

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "prompt_writer_before_after.png"
SHOWN = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    run = parser.parse_args().run
    # Every other of the twenty, so that tens and units differ.
    asked = [row["prompt"] for row in requests()[:20]][:: 20 // SHOWN][:SHOWN]
    figure, grid = plt.subplots(2, SHOWN, figsize=(12, 4), layout="constrained")
    for row, (writer, lora) in enumerate([(None, None), (run / "writer", run / "lora")]):
        texts = rewrites(writer, asked)
        for place, (request, text, image) in enumerate(zip(asked, texts, draw(lora, texts), strict=True)):
            cell = grid[row][place]
            cell.imshow(image)
            cell.set_xticks([])
            cell.set_yticks([])
            cell.set_xlabel(textwrap.fill(text, 16), fontsize=9)
            if row == 0:
                cell.set_title(request, fontsize=10)
        grid[row][0].set_ylabel(["before", "after"][row], fontsize=11)
    figure.savefig(PICTURE, dpi=110)
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
