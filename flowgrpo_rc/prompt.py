"""What a model is asked to draw: a text, and the images that it is to edit or to follow."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReferenceImage:
    """An image that a prompt refers to. Two are the same when their files are, wherever they lie."""

    digest: str
    """SHA-256 of the file's bytes, hexadecimal."""
    width: int = field(compare=False)
    """Pixels, as the image is shown: after its EXIF orientation."""
    height: int = field(compare=False)
    source: str = field(compare=False)
    """Where the prompts name it, for messages: ``train.jsonl:3``."""
    path: str | None = field(default=None, compare=False)
    """Its file; ``None`` where ``content`` is given."""
    content: bytes | None = field(default=None, compare=False, repr=False)
    """The bytes of the file, where the prompts hold them."""

    def open(self) -> Any:
        """The picture, a ``PIL.Image.Image`` in RGB, upright."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.content) if self.content is not None else str(self.path)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")


@dataclass(frozen=True)
class Prompt:
    """A text with its reference images; prompts that are equal have equal embeddings."""

    text: str
    images: tuple[ReferenceImage, ...] = ()
    reference_area: int | None = None
    """Pixels that each image is scaled to before the VAE encodes it; ``None``: as many as the pipeline's own call."""


def grey_image(size: int) -> ReferenceImage:
    """A grey square of ``size`` pixels to a side, in memory."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (size, size), (128, 128, 128)).save(file, format="PNG")
    content = file.getvalue()
    return ReferenceImage(hashlib.sha256(content).hexdigest(), size, size, "a grey image", content=content)


def as_prompt(prompt: str | Prompt) -> Prompt:
    """A text alone is a prompt without images."""
    return Prompt(prompt) if isinstance(prompt, str) else prompt


def texts(prompts: Iterable[str | Prompt]) -> list[str]:
    """What the prompts say, without their images."""
    return [as_prompt(prompt).text for prompt in prompts]
