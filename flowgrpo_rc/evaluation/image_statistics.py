"""Statistics of images that no reward sees: a policy that hacks its reward moves them."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, ImageChops

from flowgrpo_rc.rewards.jpeg import jpeg_bytes

STATISTICS: tuple[str, ...] = (
    "luminance",
    "contrast",
    "saturation",
    "sharpness",
    "dark_share",
    "clipped_share",
    "jpeg_bits",
)
"""Of one image; the keys of ``image_statistics``."""
SPREADS: tuple[str, ...] = ("diversity", "prompt_share")
"""Of groups of images; the keys of ``spread``."""
DARK = 0.1
"""Upper limit of a dark pixel's luminance."""
SIDE = 16
"""Pixels of a thumbnail's side."""
_LEVELS = np.arange(256) / 255


def image_statistics(images: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of each image, in float64. Levels are relative to white; luminance is ITU-R 601's of sRGB values.

    ``luminance``: mean; ``contrast``: its standard deviation over pixels; ``saturation``: mean difference of a pixel's
    largest and smallest channel (HSV's would be noise in dark pixels); ``sharpness``: mean absolute difference of the
    luminance of neighbouring pixels; ``dark_share``: share of pixels with a luminance up to 0.1; ``clipped_share``:
    share of channel values that are 0 or 255; ``jpeg_bits``: bits per pixel of a JPEG of quality 95.

    Args:
        images: (N, H, W, 3) uint8, RGB; H and W at least 2.

    Returns:
        (N,) by name.
    """
    # Pillow releases the interpreter's lock in its C code.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        rows = list(pool.map(_of_image, images))
    columns = np.array(rows, dtype=np.float64).reshape(len(images), len(STATISTICS))
    return dict(zip(STATISTICS, columns.T, strict=True))


def _of_image(pixels: np.ndarray) -> tuple[float, ...]:
    image = Image.fromarray(pixels)
    grey = image.convert("L")
    levels = _histogram(grey)
    luminance = _mean(levels)
    red, green, blue = image.split()
    brightest = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    darkest = ImageChops.darker(ImageChops.darker(red, green), blue)
    channels = np.array(image.histogram()).reshape(3, 256)
    return (
        luminance,
        float(levels @ (_LEVELS - luminance) ** 2) ** 0.5,
        _mean(_histogram(ImageChops.subtract(brightest, darkest))),
        (_neighbours(grey, 1, 0) + _neighbours(grey, 0, 1)) / 2,
        float(levels[_LEVELS <= DARK].sum()),
        float(channels[:, [0, 255]].sum() / channels.sum()),
        8 * jpeg_bytes(image) / (image.width * image.height),
    )


def _histogram(channel: Image.Image) -> np.ndarray:
    """Share of the pixels at each of 256 levels."""
    return np.array(channel.histogram()) / (channel.width * channel.height)


def _mean(shares: np.ndarray) -> float:
    return float(shares @ _LEVELS)


def _neighbours(grey: Image.Image, right: int, down: int) -> float:
    """Mean absolute difference between pixels and their neighbours to the right or below."""
    width, height = grey.size
    first = grey.crop((0, 0, width - right, height - down))
    return _mean(_histogram(ImageChops.difference(first, grey.crop((right, down, width, height)))))


def summary(
    statistics: Mapping[str, np.ndarray], features: np.ndarray, group: Sequence[int] | np.ndarray
) -> dict[str, float]:
    """Means of ``image_statistics`` over the images, and the ``spread`` of their features."""
    return {name: float(values.mean()) for name, values in statistics.items()} | spread(features, group)


def thumbnails(images: np.ndarray) -> np.ndarray:
    """(N, 768) uint8: the images reduced to 16 x 16 pixels, the features of ``spread`` that need no network."""
    small = [Image.fromarray(one).resize((SIDE, SIDE), Image.Resampling.BOX) for one in images]
    return np.array([np.asarray(one).ravel() for one in small], dtype=np.uint8).reshape(len(images), SIDE * SIDE * 3)


def spread(features: np.ndarray, group: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Distances within and between groups of images.

    ``diversity`` is the root mean square difference between two images of a group. ``prompt_share`` is the share of the
    variance between images that the group explains: ``1 - (within / between)^2``, where ``between`` is the root mean
    square difference between images of different groups. It is about 0 where images do not depend on their prompt, 1
    where images of one prompt are equal, and 0 where all images are.

    Args:
        features: (N, D), such as ``thumbnails`` or embeddings; differences are root mean squares over D, and uint8
            counts as relative to 255.
        group: (N,) images of one prompt have one number.

    Returns:
        Both by name; without a group of two images neither, with one group alone no ``prompt_share``.
    """
    values = features.astype(np.float64) / (255.0 if features.dtype == np.uint8 else 1.0)
    numbers = np.asarray(group)
    # Centred, since sums of large squares would cancel.
    values = values - values.mean(0)
    pairs, within = 0, 0.0
    for number in np.unique(numbers):
        of_group = values[numbers == number]
        pairs += len(of_group) * (len(of_group) - 1) // 2
        within += _sum_of_squares(of_group)
    if not pairs:
        return {}
    found = {"diversity": float(np.sqrt(within / pairs))}
    others = len(values) * (len(values) - 1) // 2 - pairs
    if others:
        between = (_sum_of_squares(values) - within) / others
        found["prompt_share"] = float(1 - within / pairs / between) if between > 0 else 0.0
    return found


def _sum_of_squares(values: np.ndarray) -> float:
    """Sum over pairs of rows of the mean square of their difference."""
    # Of n rows, the squared distances of all pairs add up to n times those from their mean.
    return float(len(values) * ((values - values.mean(0)) ** 2).mean(1).sum())
