"""How sure a share is that was measured on a few images: confidence intervals with images as the independent unit.

The steps of one image share its prompt, its noise and its path, so that they may say the same thing several times. A
share over them is a ratio of sums over images; its variance over that of as many independent samples is the *design
effect*, and the number of samples divided by that is how many independent samples say as much (Kish, Survey Sampling,
1965). It is taken for at least 1 and at most what it is where all steps of an image agree, and with few images for as
much more as Student's quantile is wider than the normal's (Korn and Graubard, Survey Methodology 24, 1998). For that
many samples the interval is Agresti and Coull's (The American Statistician 52, 1998): unlike Wald's it is no point at
shares of 0 and 1, unlike Wilson's it does not exclude small shares too often, and unlike Clopper and Pearson's it needs
no quantile of a beta distribution. ``tests/gap/test_intervals.py`` simulates its coverage.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CONFIDENCE = 0.95
"""Of the probe's intervals, all looks at them together."""
MOST_IMAGES = 4096
"""At every place of the window; more tell nothing: a share is known to about a hundredth then."""


@dataclass(frozen=True)
class Interval:
    """Where the true value lies, with the confidence that it was asked for."""

    low: float
    high: float
    effective: float
    """Independent samples that say as much."""


def share_interval(
    hits: Bool[Tensor, " n"], used: Bool[Tensor, " n"], images: Int[Tensor, " n"], confidence: float = CONFIDENCE
) -> Interval:
    """Of the share of ``hits`` among the samples that are ``used``.

    Args:
        hits: the samples counted; those that are not used do not count.
        used: the samples that the share is taken of; without any the interval is that of no knowledge, 0 to 1.
        images: of each sample, the number of its image.
        confidence: of both sides together.
    """
    # Images of which nothing is used say nothing, and are no units of the sample.
    counts = _per_image(used.double(), images)
    found = _per_image((hits & used).double(), images)[counts > 0]
    counts = counts[counts > 0]
    if not len(counts):
        return Interval(0.0, 1.0, 0.0)
    total = float(counts.sum())
    value = float(found.sum()) / total
    all_alike = float(counts.square().sum()) / total
    # Where the share is 0 or 1 the residuals vanish, and nothing tells how alike an image's steps are: the worst case.
    design = all_alike
    binomial = value * (1 - value) / total
    if binomial > 0 and len(counts) > 1:
        design = _variance_of_a_ratio(found, counts, value) / binomial
        design *= (student_quantile(confidence, len(counts) - 1) / normal_quantile(confidence)) ** 2
    effective = total / min(max(design, 1.0), all_alike)
    return Interval(*agresti_coull(value, effective, confidence), effective)


def mean_interval(values: Float[Tensor, " n"], images: Int[Tensor, " n"], confidence: float = CONFIDENCE) -> Interval:
    """Of the mean of ``values``, by Student's t over images; of a single image it is unbounded."""
    counts = _per_image(torch.ones_like(values), images)
    mean = float(values.mean())
    half = math.inf
    if len(counts) > 1:
        variance = _variance_of_a_ratio(_per_image(values, images), counts, mean)
        half = student_quantile(confidence, len(counts) - 1) * math.sqrt(variance)
    return Interval(mean - half, mean + half, float(len(counts)))


def agresti_coull(value: float, effective: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval's ends for a share ``value`` of ``effective`` independent samples, within 0 and 1."""
    square = normal_quantile(confidence) ** 2
    samples = effective + square
    centre = (value * effective + square / 2) / samples
    half = math.sqrt(square * centre * (1 - centre) / samples)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def images_to_settle(
    value: float, effective: float, images: int, limit: float, *, most: int, confidence: float = CONFIDENCE
) -> int | None:
    """How many images, of which ``images`` were as good as ``effective`` samples, put the interval on one side.

    Assumes that the share is what it seems and its design effect stays; None where not even ``most`` images do.
    """

    def settles(count: int) -> bool:
        low, high = agresti_coull(value, effective * count / images, confidence)
        return low > limit or high < limit

    if not effective or not settles(most):
        return None
    return 1 + bisect_left(range(1, most), True, key=settles)


def looks(start: int, end: int) -> Sequence[tuple[int, float]]:
    """Numbers of images at which to look, doubling from ``start`` to ``end``, with the confidence of each look.

    An interval that is looked at until it suits is wrong more often than one that is looked at once. So the chance of
    an error is spent over the looks, half of what is left at each and all of it at the last: whatever look ends the
    measurement, the interval is wrong with a chance of at most ``1 - CONFIDENCE`` (Bonferroni).
    """
    counts = [start]
    while counts[-1] < end:
        counts.append(min(2 * counts[-1], end))
    halvings = [*range(1, len(counts)), len(counts) - 1]
    return [(count, 1 - (1 - CONFIDENCE) / 2**n) for count, n in zip(counts, halvings, strict=True)]


def normal_quantile(confidence: float) -> float:
    """Half width of the central interval of a standard normal variable."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def student_quantile(confidence: float, freedom: int) -> float:
    """The same of Student's t with ``freedom`` degrees of freedom.

    In closed form for 1 and 2, else by the expansion in the normal quantile (Abramowitz and Stegun, 26.7.5), which is
    right to 1 % from 3 degrees on at 95 %.
    """
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = normal_quantile(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4


def _per_image(values: Float[Tensor, " n"], images: Int[Tensor, " n"]) -> Float[Tensor, " images"]:
    """The sum over each image's samples, float64."""
    _, number = torch.unique(images, return_inverse=True)
    return torch.bincount(number, weights=values.double())


def _variance_of_a_ratio(sums: Float[Tensor, " n"], counts: Float[Tensor, " n"], ratio: float) -> float:
    """Of ``sum(sums) / sum(counts)`` over independent images, linearised."""
    residuals = sums - ratio * counts
    images = len(counts)
    return images / (images - 1) * float(residuals.square().sum()) / float(counts.sum()) ** 2
