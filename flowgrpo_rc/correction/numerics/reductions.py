"""How metrics reduce: numbers that merge exactly over rows, micro-batches and ranks, and a metric as their function.

So a merged metric equals the metric of the merged batch, which a mean of standard deviations would not.
"""

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

ROUNDING = 2.0**-50
"""Share of the mean square below which a variance is only rounding: that of a deviation of 3e-8 of the mean."""


class Reduction(NamedTuple):
    """How a metric reduces over elements or rows, micro-batches and ranks."""

    finish: Callable[..., float]
    """The metric as a function of the merged numbers."""
    merge: Callable[[float, float], float] = operator.add
    """Merges two of them: a sum, or ``min``."""


def _mean(n: float, total: float) -> float:
    return total / n


def _mean_excess(n: float, total: float) -> float:
    return total / n - 1.0


def _mean_from_one(n: float, excess: float) -> float:
    return 1.0 + excess / n


def _deviation(n: float, total: float, squares: float) -> float:
    """``sqrt(E[x^2] - E[x]^2)``; 0 for a single value."""
    mean = total / n
    variance = squares / n - mean * mean
    # A difference of two equal squares is rounding noise, which the root would make visible.
    return math.sqrt(variance) if n > 1 and variance > ROUNDING * squares / n else 0.0


def _sample_deviation(n: float, total: float, squares: float) -> float:
    """With ``n - 1`` in the denominator."""
    return _deviation(n, total, squares) * math.sqrt(n / (n - 1.0)) if n > 1 else 0.0


def _chi_squared(n: float, excess: float, squares: float) -> float:
    """``E[r^2] - 1`` of ``e = r - 1``."""
    return (squares + 2.0 * excess) / n


# Weights near 1 are exact as w - 1, small ones as w; one half separates them.


def _weight_mean(n: float, weight: float, _: float, excess: float, __: float) -> float:
    return weight / n if weight / n <= 0.5 else 1.0 + excess / n


def _weight_square(n: float, weight: float, squares: float, excess: float, excess_squares: float) -> float:
    return squares / n if weight / n <= 0.5 else 1.0 + 2.0 * (excess / n) + excess_squares / n


def _weight_deviation(n: float, weight: float, squares: float, excess: float, excess_squares: float) -> float:
    return _deviation(n, weight, squares) if weight / n <= 0.5 else _deviation(n, excess, excess_squares)


def _weight_sample_deviation(n: float, *sums: float) -> float:
    return _weight_deviation(n, *sums) * math.sqrt(n / (n - 1.0)) if n > 1 else 0.0


def _effective_size(n: float, *sums: float) -> float:
    mean = _weight_mean(n, *sums)
    square = _weight_square(n, *sums)
    return mean * mean / square if square > 0.0 and mean > 0.0 else 0.0


def batch_divisor(count: float, weight: float, excess: float) -> float:
    """The mean weight, by which batch normalisation divides, from sums of 1, ``w`` and ``w - 1``; 1 where it is tiny.

    Below one half ``sum w / n`` is exact, from there on ``1 + sum(w - 1) / n``.
    """
    mean = weight / max(count, 1.0)
    # Weights of 1e-6 would be lost in 1 + (w - 1).
    if mean >= 0.5:
        mean = 1.0 + excess / count
    return mean if mean > 1e-8 else 1.0


def _least(least: float) -> float:
    return least


# Maxima are kept as minima of the negative, so that a table needs one kind of end.


def _most(minus_most: float) -> float:
    return -minus_most


MEAN = Reduction(_mean)
MEAN_EXCESS = Reduction(_mean_excess)
MEAN_FROM_ONE = Reduction(_mean_from_one)
DEVIATION = Reduction(_deviation)
SAMPLE_DEVIATION = Reduction(_sample_deviation)
CHI_SQUARED = Reduction(_chi_squared)
WEIGHT_MEAN = Reduction(_weight_mean)
WEIGHT_DEVIATION = Reduction(_weight_deviation)
WEIGHT_SAMPLE_DEVIATION = Reduction(_weight_sample_deviation)
EFFECTIVE_SIZE = Reduction(_effective_size)
BATCH_DIVISOR = Reduction(batch_divisor)
LEAST = Reduction(_least, min)
MOST = Reduction(_most, min)
