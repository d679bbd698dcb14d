"""Confidence intervals of shares and means that were measured on a few images, with images as the independent unit.

The steps of one image share its prompt, its noise and its path, so that they are correlated. A share over them is a
ratio of sums over images; its variance over that of as many independent samples is the *design effect*, and the number
of samples divided by it is the effective sample size (Kish, Survey Sampling, 1965). The design effect is clamped
between 1 and its value if all steps of an image agree, and widened for few images by Student's quantile over the
normal's (Korn and Graubard, Survey Methodology 24, 1998). The interval is Agresti and Coull's of the effective sample
size (The American Statistician 52, 1998): unlike Wald's it is no point at shares of 0 and 1, unlike Wilson's it does
not exclude small shares too often, and unlike Clopper and Pearson's it needs no quantile of a beta distribution.
``tests/gap/test_intervals.py`` simulates its coverage.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

# The health report reads limits through this module and must not load torch; tensors are only used by their methods.
if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

CONFIDENCE = 0.95
"""Of the probe's intervals, all looks together."""
MOST_IMAGES = 4096
"""Most images at every place of the window. More add nothing, since a share is then known to about a hundredth."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float
    effective: float
    """Effective sample size."""


def share_interval(
    hits: Bool[Tensor, " n"], used: Bool[Tensor, " n"], images: Int[Tensor, " n"], confidence: float = CONFIDENCE
) -> Interval:
    """Interval of the share of ``hits`` among the ``used`` samples.

    Args:
        hits: the samples counted; unused ones are ignored.
        used: the denominator; if it is empty the interval is 0 to 1.
        images: number of each sample's image.
        confidence: of both sides together.
    """
    # Drop images without a used step; they must not count towards n.
    counts = _per_image(used.double(), images)
    found = _per_image((hits & used).double(), images)[counts > 0]
    counts = counts[counts > 0]
    if not len(counts):
        return Interval(0.0, 1.0, 0.0)
    total = float(counts.sum())
    value = float(found.sum()) / total
    all_alike = float(counts.square().sum()) / total
    # At shares of 0 and 1 the residuals vanish and do not show how alike an image's steps are: take the worst case.
    design = all_alike
    binomial = value * (1 - value) / total
    if binomial > 0 and len(counts) > 1:
        design = _variance_of_a_ratio(found, counts, value) / binomial
        design *= (student_quantile(confidence, len(counts) - 1) / normal_quantile(confidence)) ** 2
    effective = total / min(max(design, 1.0), all_alike)
    return Interval(*agresti_coull(value, effective, confidence), effective)


def mean_interval(values: Float[Tensor, " n"], images: Int[Tensor, " n"], confidence: float = CONFIDENCE) -> Interval:
    """Interval of the mean of ``values``, by Student's t over images; unbounded for a single image."""
    counts = _per_image(values.new_ones(values.shape), images)
    mean = float(values.mean())
    half = math.inf
    if len(counts) > 1:
        variance = _variance_of_a_ratio(_per_image(values, images), counts, mean)
        half = student_quantile(confidence, len(counts) - 1) * math.sqrt(variance)
    return Interval(mean - half, mean + half, float(len(counts)))


def agresti_coull(value: float, effective: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Ends of the interval for a share ``value`` of ``effective`` independent samples, within 0 and 1."""
    square = normal_quantile(confidence) ** 2
    samples = effective + square
    centre = (value * effective + square / 2) / samples
    half = math.sqrt(square * centre * (1 - centre) / samples)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def images_to_settle(
    value: float, effective: float, images: int, limit: float, *, most: int, confidence: float = CONFIDENCE
) -> int | None:
    """Number of images that would put the interval on one side of ``limit``; None if ``most`` are too few. Assumes that
    share and design effect stay as measured on ``images``, which counted as ``effective`` samples."""

    def settles(count: int) -> bool:
        low, high = agresti_coull(value, effective * count / images, confidence)
        return low > limit or high < limit

    if not effective or not settles(most):
        return None
    return 1 + bisect_left(range(1, most), True, key=settles)


def looks(start: int, end: int) -> Sequence[tuple[int, float]]:
    """Numbers of images at which to look, doubling from ``start`` to ``end``, with the confidence of each look.

    An interval that is looked at until it suits is wrong more often than one that is looked at once. So the chance of
    an error is spent over the looks, half of the rest at each and all of it at the last: the final interval is wrong
    with a chance of at most ``1 - CONFIDENCE`` whichever look ends the measurement (Bonferroni).
    """
    # Doubling keeps the number of looks, and with it the price of looking, logarithmic.
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

    In closed form for 1 and 2, else by the expansion in the normal quantile (Abramowitz and Stegun, 26.7.5), accurate
    to 1 % from 3 degrees on at 95 %.
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
    """Sum over each image's samples, float64."""
    _, number = images.unique(return_inverse=True)
    return number.bincount(weights=values.double())


def _variance_of_a_ratio(sums: Float[Tensor, " n"], counts: Float[Tensor, " n"], ratio: float) -> float:
    """Variance of ``sum(sums) / sum(counts)`` over independent images, linearised."""
    residuals = sums - ratio * counts
    images = len(counts)
    return images / (images - 1) * float(residuals.square().sum()) / float(counts.sum()) ** 2
