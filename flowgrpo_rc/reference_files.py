"""Reader of a prompt file's columns of images. It checks every file once; models and rewards decode it later.

The check reads an image's header and finds a file that is cut off: by the checksums of a PNG, the end mark of a JPEG.
Files of other formats are decoded.
"""

import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.paths import LFS_POINTER
from flowgrpo_rc.prompt import IMAGE_FORMATS, ReferenceImage, content_digest

IMAGES_KEY = "images"
"""The column of reference images."""
LARGEST_PIXELS = 8192 * 8192
"""Of one image. A small file can claim to be a picture of any size."""
_FORMS = "a path, an image file's bytes (parquet), a mapping with 'bytes' or 'path', or a list of these"
_ORIENTATION = 0x0112
"""EXIF tag of a picture's orientation; from 5 on its sides are exchanged."""
_DEEP_MODES = ("I", "F")
"""Pillow's modes with integers or floats for values have names that begin with these letters."""
_PNG_BIT_DEPTH = 24
"""Offset of the bit depth in a PNG file: signature, chunk header, width and height come before it."""
_TIFF_BITS_PER_SAMPLE = 258
"""The TIFF tag that holds the bits of each channel."""
_TOO_LARGE = f"is larger than {LARGEST_PIXELS:,} pixels; scale it down"


def reference_image(source: str | os.PathLike[str] | bytes | Any) -> ReferenceImage:
    """The reference image of a file's path, of a file's bytes, or of a ``PIL.Image.Image``, which is kept as a PNG.

    Raises:
        ValueError: it is missing, damaged, cut off, animated, too large or no image.
    """
    if isinstance(source, bytes):
        return replace(_looked_at(source, "of these bytes", "reference_image"), content=source)
    if isinstance(source, str | os.PathLike):
        path = os.path.abspath(os.path.expanduser(source))
        return replace(_looked_at(_content(path, str(source), "reference_image"), path, "reference_image"), path=path)
    file = io.BytesIO()
    source.convert("RGB").save(file, format="PNG")
    return reference_image(file.getvalue())


class ReferenceReader:
    """Reads references; each file once, however many rows name it."""

    def __init__(self) -> None:
        self._files: dict[str, ReferenceImage] = {}

    def __call__(self, value: Any, source: str, column: str = IMAGES_KEY) -> tuple[ReferenceImage, ...]:
        """The images of one row.

        Args:
            value: content of the column; None and an empty list are no images.
            source: the row, ``train.jsonl:3``. Relative paths begin at the folder of its file.
            column: for messages.

        Raises:
            ValueError: one is missing, damaged, cut off, animated, too large or no image; names the row.
        """
        if value is None:
            return ()
        several = value if isinstance(value, list | tuple) else [value]
        return tuple(self._read(one, source, column) for one in several)

    def _read(self, value: Any, source: str, column: str) -> ReferenceImage:
        given = value
        if isinstance(value, Mapping):  # as Hugging Face's datasets write images
            given = value.get("bytes") or value.get("path")
        if isinstance(given, bytes):
            return replace(_looked_at(given, "in the prompt file", source), content=given)
        if isinstance(given, str) and given.strip():
            return self._at(given, source, column)
        keys = f" with the keys {', '.join(map(str, value)) or 'none'}" if isinstance(value, Mapping) else ""
        raise ValueError(
            f"{source}: {column!r} holds a {type(value).__name__}{keys} that names no image; give {_FORMS}, or "
            "leave it out"
        )

    def _at(self, text: str, source: str, column: str) -> ReferenceImage:
        if "\0" in text:
            raise ValueError(f"{source}: {column!r} holds {text[:80]!r}; a path cannot hold a NUL character")
        path = os.path.abspath(os.path.join(os.path.dirname(source), os.path.expanduser(text)))
        # Data sets name one reference in many rows; each file is checked once.
        if path not in self._files:
            self._files[path] = replace(_looked_at(_content(path, text, source), path, source), path=path)
        return replace(self._files[path], source=source)


def _content(path: str, text: str, source: str) -> bytes:
    """The bytes of a file; only a regular one is opened, as a pipe may never end."""
    if not os.path.isfile(path):
        remedy = "paths are relative to the prompt file's folder"
        if "://" in text:
            remedy = "it is an address; download the image and give its path"
        raise ValueError(f"{source}: the image {path} does not exist or is not a file; {remedy}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{source}: the image {path} cannot be read ({reason(error)}); check its permissions"
        ) from error


def _looked_at(content: bytes, name: str, source: str) -> ReferenceImage:
    """The image of these bytes, which must be a whole one."""
    from PIL import Image, UnidentifiedImageError

    named = f"{source}: the image {name}"
    # Reported apart from damage, because the remedies differ.
    if not content:
        raise ValueError(f"{named} is empty; save it again, or leave it out")
    if content.startswith(LFS_POINTER):
        raise ValueError(f"{named} is a Git LFS pointer, not the file itself; run ``git lfs pull``")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are judged here, and of odd metadata
            with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
                fault = _fault(image, content)
            width, height = (0, 0) if fault is not None else _upright_size(content)
    except UnidentifiedImageError as error:
        known = ", ".join(IMAGE_FORMATS)
        raise ValueError(f"{named} is not an image of a known format; give one of {known}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{named} {_TOO_LARGE}") from error
    except Exception as error:  # the decoders raise errors of every kind
        raise ValueError(f"{named} is damaged or cut off ({one_line(error, 200)}); save it again") from error
    if fault is not None:
        raise ValueError(f"{named} {fault}")
    return ReferenceImage(content_digest(content), width, height, source)


def _upright_size(content: bytes) -> tuple[int, int]:
    """Width and height as the picture is shown; raises what the decoder raises where the file is damaged."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
        image.verify()
    # Decoding thousands of large pictures would take minutes.
    with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
        ended = image.format in ("JPEG", "MPO") and content.rstrip(b"\0").endswith(b"\xff\xd9")
        if not ended and image.format != "PNG":
            return ImageOps.exif_transpose(image).size
        # Pillow decodes a whole PNG to look for a tag behind the pixels.
        if image.format == "PNG" and b"eXIf" not in content and b"tiff:Orientation" not in content:
            return image.size
        found = image.getexif().get(_ORIENTATION, 1)
        return image.size[::-1] if isinstance(found, int) and 5 <= found <= 8 else image.size


def _fault(image: Any, content: bytes) -> str | None:
    """The reason to refuse an image that can be decoded, or ``None``."""
    if image.width * image.height > LARGEST_PIXELS:
        return _TOO_LARGE
    if not all(image.size):
        return f"has no pixels ({image.width} x {image.height}); save it again"
    # A photograph with a preview behind it counts as two frames; the first is the photograph.
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:
        return f"holds {frames} pictures (an animation or several pages); save one of them"
    # Pillow opens 16-bit colours as 8-bit ones, so that its mode does not show them.
    bits = 8
    if image.format == "PNG":
        bits = content[_PNG_BIT_DEPTH]
    elif image.format == "TIFF":
        bits = max(image.tag_v2.get(_TIFF_BITS_PER_SAMPLE, (8,)))
    if image.mode.startswith(_DEEP_MODES) or bits > 8:
        return f"has more than 8 bits a value (mode {image.mode}), which would be cut off; save it with 8"
    return None
