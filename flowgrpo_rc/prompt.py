"""A prompt: a text, and the reference images that a model edits or follows."""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line, reason

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats of reference images, as Pillow names them. Others are excluded because some are programs (PostScript)."""
DECODED_IMAGES = 8
"""Reference images whose pixels a process keeps: rewards open that of a prompt once for each of its images."""


@dataclass(frozen=True)
class ReferenceImage:
    """A prompt's reference image. Two are equal if their files have equal bytes, whatever their paths.

    ``numpy.asarray(image)`` gives its pixels, (H, W, 3) uint8 RGB.
    """

    digest: str
    """SHA-256 of the file's bytes, hexadecimal."""
    width: int = field(compare=False)
    """Pixels, as the image is shown: after its EXIF orientation."""
    height: int = field(compare=False)
    source: str = field(compare=False)
    """Row of the prompt file, for messages: ``train.jsonl:3``."""
    path: str | None = field(default=None, compare=False)
    """Its file; ``None`` if ``content`` is given."""
    content: bytes | None = field(default=None, compare=False, repr=False)
    """Bytes of the file, if the prompt file contains them."""

    def read(self) -> bytes:
        """The bytes of its file. ``ValueError`` if it is gone, or has changed since the prompts were read."""
        if self.content is not None:
            return self.content
        try:
            found = Path(str(self.path)).read_bytes()
        except OSError as error:
            raise ValueError(
                f"{self.source}: the image {self.path} cannot be read ({reason(error)}); it was there when the run "
                "began, so put it back"
            ) from error
        # Embeddings in the store belong to the bytes that were read at the start.
        if content_digest(found) != self.digest:
            raise ValueError(
                f"{self.source}: the image {self.path} has changed since the run began; leave it as it is while the "
                "run lasts"
            )
        return found

    def open(self) -> Any:
        """The upright picture as a ``PIL.Image.Image`` in RGB, which the caller may change.

        The file is read at every call; its pixels are decoded unless they are cached (``DECODED_IMAGES``).

        Raises:
            ValueError: as ``read``; or the file is damaged.
        """
        # Read before the cache is used, so that a file that has changed since the start is refused.
        self.read()
        return _decoded(self).copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        if copy is False:
            raise ValueError("the pixels of an image file are decoded anew, which needs memory of their own")
        return np.asarray(self.open(), dtype=dtype)


@lru_cache(maxsize=DECODED_IMAGES)
def _decoded(image: ReferenceImage) -> Any:
    """The picture of ``ReferenceImage.open``; equal files share an entry."""
    from PIL import Image, ImageOps

    content = image.read()
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as opened:
            upright = ImageOps.exif_transpose(opened)
        # A palette's transparent colours are converted only from there.
        return (upright.convert("RGBA") if upright.mode == "P" else upright).convert("RGB")
    except Exception as error:  # the decoders raise errors of every kind
        name = image.path or "in the prompt file"
        raise ValueError(
            f"{image.source}: the image {name} is damaged or cut off ({one_line(error, 200)}); save it again"
        ) from error


@dataclass(frozen=True)
class Prompt:
    """A text with its reference images; equal prompts have equal embeddings."""

    text: str
    images: tuple[ReferenceImage, ...] = ()
    reference_area: int | None = None
    """Pixels of each image before the VAE encodes it; ``None``: as in the pipeline's own call."""
    negative: bool = False
    """A negative prompt; set only for families whose pipelines encode negative prompts in another way."""


def grey_image(size: int) -> ReferenceImage:
    """A grey square of ``size`` pixels to a side, in memory."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (size, size), (128, 128, 128)).save(file, format="PNG")
    content = file.getvalue()
    return ReferenceImage(content_digest(content), size, size, "a grey image", content=content)


def as_prompt(prompt: str | Prompt) -> Prompt:
    """A text alone is a prompt without images."""
    return Prompt(prompt) if isinstance(prompt, str) else prompt


def is_negative(prompt: Prompt) -> bool:
    """A negative prompt, for families that encode them in another way; a blank text always is one."""
    return prompt.negative or not prompt.text.strip()


def texts(prompts: Iterable[str | Prompt]) -> list[str]:
    """The texts of prompts, without their images."""
    return [as_prompt(prompt).text for prompt in prompts]


def content_digest(content: bytes) -> str:
    """SHA-256 of a file's bytes: ``ReferenceImage.digest``."""
    return hashlib.sha256(content).hexdigest()
