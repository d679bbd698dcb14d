"""Putting a built model in the place of the last one, once it is whole."""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def refuse_other_folders(parser: argparse.ArgumentParser, output: Path, index: str, kind: str) -> None:
    """End the program where `output` is something else than `kind`, which has a file `index`: it would be replaced."""
    if output.exists() and not (output / index).is_file():
        parser.error(f"--output: {output} exists and is {kind}; it would be replaced, so name another folder")


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A folder to write into; it takes the place of `output` when the block ends, unless by an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build_") as temporary:
        folder = Path(temporary) / output.name
        yield folder
        shutil.rmtree(output, ignore_errors=True)
        folder.rename(output)


def save_in_half(pipeline: Any, folder: Path) -> None:
    """Write a pipeline, its transformer and its VAE in float16.

    The text encoders stay in float32: transformers loads them in the precision of their files, diffusers the other
    parts in float32, and a pipeline of mixed precision fails.
    """
    pipeline.transformer.half()
    pipeline.vae.half()
    pipeline.save_pretrained(folder)
    make_readable(folder)


def make_readable(folder: Path) -> None:
    """Weights are written as readable for the owner alone."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)
