"""Images as files in memory, for requests to another process and back."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

FORMATS = ("png", "jpeg")
"""PNG keeps every pixel; JPEG is smaller, does not, and is what flow_grpo and verl-omni send."""
MOST_PIXELS = 2**27
"""Most pixels of all images of a request together: 128 images of 1024 x 1024, 403 MB once decoded."""


def encode(image: np.ndarray, image_format: str, quality: int = 75) -> bytes:
    """One image, (H, W, 3) uint8 RGB, as a file of a format of ``FORMATS``; ``quality`` is JPEG's, by default pillow's.

    PNG is packed lightly: pillow's default takes four times as long.
    """
    buffer = io.BytesIO()
    # Each format ignores the other's option.
    Image.fromarray(image).save(buffer, format=image_format.upper(), quality=quality, compress_level=1)
    return buffer.getvalue()


def decode(files: Sequence[bytes]) -> np.ndarray:
    """Images of one size as (N, H, W, 3) uint8 RGB.

    Raises:
        ValueError: there is none, one is no PNG or JPEG, they differ in size, or hold more than ``MOST_PIXELS``.
    """
    if not files:
        raise ValueError("there are no images; give one or more")
    images = [_open(index, data) for index, data in enumerate(files)]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        found = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:4])
        raise ValueError(f"the images differ in size ({found}); give those of one size in one request")
    # Known from the headers, before anything is decoded.
    width, height = images[0].size
    if len(images) * width * height > MOST_PIXELS:
        raise ValueError(
            f"{len(images)} images of {width} x {height} pixels are more than the {MOST_PIXELS} pixels that a request "
            "may hold; give fewer at a time"
        )
    pixels = np.empty((len(images), height, width, 3), np.uint8)
    for index, image in enumerate(images):
        pixels[index] = _pixels(index, image)
        # Pillow keeps what it has decoded as long as the image.
        image.close()
    return pixels


def _open(index: int, data: bytes) -> Image.Image:
    try:
        # Pillow's other formats have a larger surface for attacks, and nobody sends them.
        return Image.open(io.BytesIO(data), formats=[name.upper() for name in FORMATS])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {index} is no PNG or JPEG file that can be read ({type(error).__name__})") from error


def _pixels(index: int, image: Image.Image) -> np.ndarray:
    try:
        # ``convert`` would copy an image that is RGB already.
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"image {index} is damaged ({error})") from error
