"""A prompt: a text, and the reference images that a model edits or follows."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line, reason

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats of reference images, as Pillow names them. Others are excluded because some are programs (PostScript)."""
DECODED_BYTES = 64 * 2**20
"""Bytes of decoded reference images that a process keeps: 21 images of 1024 x 1024 pixels."""


class DecodedImages:
    """Cache of the most recently used images, by the digests of their files; threads share it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._images: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Any:
        """A copy as ``PIL.Image.Image``; ``None`` if it is not cached."""
        with self._lock:
            found = self._images.get(digest)
            if found is not None:
                self._images.move_to_end(digest)
        return None if found is None else found.copy()

    def add(self, digest: str, image: Any) -> None:
        """Cache a copy of an RGB image, and drop the least recently used ones."""
        size = 3 * image.width * image.height
        # One image above the limit would evict all others and itself.
        if size > self._limit:
            return
        # The caller may draw on its picture.
        copy = image.copy()
        with self._lock:
            if digest not in self._images:
                self._bytes += size
            # The digest identifies the pixels: two paths to one file share an entry.
            self._images[digest] = copy
            while self._bytes > self._limit:
                _, dropped = self._images.popitem(last=False)
                self._bytes -= 3 * dropped.width * dropped.height


_DECODED = DecodedImages(DECODED_BYTES)
"""Rewards open the reference of a prompt once for each of its images."""


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
        """The bytes of its file.

        Raises:
            ValueError: the file is gone, or another than when the prompts were read; names source and file.
        """
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

        The file is read at every call; its pixels are decoded unless they are cached (``DECODED_BYTES``).

        Raises:
            ValueError: as ``read``; or the file is damaged.
        """
        from PIL import Image, ImageOps

        # Read before the cache is used, so that a file that has changed since the start is refused.
        content = self.read()
        found = _DECODED.get(self.digest)
        if found is not None:
            return found
        try:
            with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
                upright = ImageOps.exif_transpose(image)
            # A palette's transparent colours are converted only from there.
            found = (upright.convert("RGBA") if upright.mode == "P" else upright).convert("RGB")
        except Exception as error:  # the decoders raise errors of every kind
            name = self.path or "in the prompt file"
            raise ValueError(
                f"{self.source}: the image {name} is damaged or cut off ({one_line(error, 200)}); save it again"
            ) from error
        _DECODED.add(self.digest, found)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        if copy is False:
            raise ValueError("the pixels of an image file are decoded anew, which needs memory of their own")
        return np.asarray(self.open(), dtype=dtype)


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
