"""Target size of a reference image, from its own size alone."""

import math

from flowgrpo_rc.prompt import ReferenceImage


def scaled_size(image: ReferenceImage, area: int, multiple: int) -> tuple[int, int]:
    """Width and height of about ``area`` pixels with the image's aspect ratio, rounded to multiples of ``multiple``.

    Raises:
        ValueError: the image is so narrow that a side would have no pixels left.
    """
    ratio = image.width / image.height
    width = math.sqrt(area * ratio)
    height = width / ratio
    size = round(width / multiple) * multiple, round(height / multiple) * multiple
    # A side rounded to 0 would fail inside the VAE.
    if not all(size):
        raise ValueError(
            f"{image.source}: a reference image of {image.width} x {image.height} pixels, scaled to {area:,} in "
            f"multiples of {multiple} a side, has no pixels left; crop it, or raise reference_area"
        )
    return size
