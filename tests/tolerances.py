"""The distance that two right results may have: the one place from which the tests take a tolerance for float32.

Another processor, number of threads or number of rows in a forward pass is another kernel: it adds the terms of a sum
in another order and fuses other products, so the last places of a result differ, and of everything made from it. Equal
bits are demanded only where

- nothing is rounded: copies, masks, counts, a file written and read back, a weight that is exactly 1, or
- the very same kernel sees the very same shapes on one machine: the same rows in a micro-batch, the same number of
  threads. A run that is repeated, and one that is resumed, are of this kind; a run whose images are dealt to another
  number of processes, or rescored in micro-batches of another size, is not.

Everything else takes its bound from here. Each is a count of roundings, times the unit in the last place, times the
size of what is rounded, and is far below the smallest thing that may go wrong: a step's log-prob moves by 1e-5 and more
with an adapter of the step before, by 2e-4 in bfloat16; an Adam step moves every weight by the learning rate.
"""

import math

EPSILON = 2.0**-23
"""The unit in the last place of float32 numbers in [1, 2); a correct rounding errs by half of it."""


def last_places(count: float, size: float = 1.0) -> float:
    """``count`` units in the last place of a float32 number of this size."""
    return count * EPSILON * 2.0 ** math.floor(math.log2(size))


def order_of_sum(terms: int, size: float) -> float:
    """Two orders of adding ``terms`` float32 numbers whose absolute values add up to ``size``.

    Roundings are as often up as down, so that each order errs by about ``sqrt(terms)`` halves of a unit of the whole,
    and by more than four times that practically never (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    return 2 * 4 * math.sqrt(terms) * EPSILON / 2 * size


LOG_PROB = last_places(8)
"""A step's log-prob of the same sample under the same weights: 9.5e-7.

It is a mean over the latent dimensions and below 2. Four operations round a number of that size (the mean of squares,
the division by the variance, two subtractions), at most one unit each, on either side. What the velocity's own
roundings add is a mean of as many independent terms as the latent has dimensions, which is below one unit. Kernels of
SSE4.1, AVX2 and AVX-512 with 1 to 16 rows were apart by two units at most. The README's limit for float32 rollouts is
this number.
"""

RATIO = LOG_PROB + last_places(1)
"""Distance from 1 that the ratio of a sample's probability to itself may have: ``exp`` rounds once more."""

LOG_RATIO = 2 * LOG_PROB
"""A log ratio of two policies, which is the difference of two log-probs; ratios, which are near 1, move as much."""


def nats(dimensions: int, steps: float = 1.0) -> float:
    """A log ratio in nats, which is that of the mean times the latent's ``dimensions``.

    It holds for ``cps`` too, whose log-prob leaves out ``1 / (2 std^2)``: it is smaller, and its last place with it.
    """
    return steps * dimensions * LOG_PROB


def divergence(dimensions: int) -> float:
    """A divergence that is estimated from log ratios of nothing but rounding: ``sqrt(1 + nats^2) - 1``."""
    return nats(dimensions) ** 2 / 2


LATENT = order_of_sum(terms=32, size=4.0)
"""Latents after a sampling loop of the tiny models: 1.1e-5.

They lie within 4. A loop goes once from noise to image (the step lengths add up to 1), through four blocks of about
eight products each, whose roundings go on into the next: as many terms. One product of a hundred terms in vectors of
four to sixteen lanes rounds by a unit or two, which is the factor in ``order_of_sum``. Kernels were apart by 3e-6 at
most.
"""


def guided(tolerance: float, cfg_scale: float) -> float:
    """The ``tolerance`` after guidance, ``negative + cfg_scale * (prompt - negative)`` of two velocities."""
    return (2 * cfg_scale - 1) * tolerance


EMBEDDING = order_of_sum(terms=16, size=4.0)
"""Embeddings of the tiny text encoders, encoded one by one or together: 7.6e-6.

They are normalised, and lie within 4; two layers have about eight products each.
"""


def levels(pixels: int, latent: float = LATENT) -> int:
    """The number of so many grey levels that may round to the neighbouring one where latents differ by ``latent``.

    A level's edge lies within ``255 * latent`` levels of a value with twice that probability; three standard deviations
    are added. The VAE of the tiny models changes a difference by a factor of at most 2.
    """
    expected = pixels * 2 * 255 * 2 * latent / 2
    return math.ceil(expected + 3 * math.sqrt(expected))


def brightness(pixels: int, flipped: int = 4) -> float:
    """A reward that is the mean of an image's ``pixels`` grey levels: so many of them round to the neighbouring level.

    A grey level is 1/255, and latents move by far less (``LATENT``), so that one pixel in about a thousand is near
    enough to an edge between two levels. Kernels flipped nine pixels of sixteen images of 3,072 at most.
    """
    return flipped / (255 * pixels)


GRADIENT = order_of_sum(terms=32, size=4.0)
"""A gradient's rounding over its own norm: 1.1e-5.

The same depth as ``LATENT``. The terms of samples with positive and negative advantages cancel: their norms add up to
about four times the norm of the sum.
"""


def adam(gradient: float = GRADIENT) -> float:
    """The norm of a difference of Adam's updates over the norm of the update, where gradients differ by ``gradient``.

    Adam moves every weight by about the learning rate, however small its gradient is. With a gradient of ``t`` times
    the root mean square, an error of ``e`` root mean squares changes that by ``min(e / t, 2)`` learning rates. Over
    normally distributed gradients the mean square of this is ``3.2 e``.
    """
    return math.sqrt(3.2 * gradient)


def of_metric(name: str, row: dict, *, dimensions: int, pixels: int, steps: int) -> float:
    """The distance that a metric of this ``row`` may have from that of a run with other kernels, an update or two long.

    ``dimensions`` are those of a latent, ``pixels`` those of an image in all its channels, whose brightness is the
    reward, ``steps`` those of an SDE window. Advantages are rewards over the deviation of their group, so what a grey
    level moves there is larger by that, and with it the gradients and all that is learned: log ratios, and how far
    ratios are from 1.
    """
    value = row[name]
    if "images/" in name:
        # A grey level moves the length of a JPEG by bytes, and a share of small variances by more than a mean.
        return 0.05 if "jpeg" in name else 100 * brightness(pixels)
    if "reward/" in name:
        return brightness(pixels)
    relative = GRADIENT + brightness(pixels) / row.get("reward/group_std_mean", 1.0)
    learned = relative * min(abs(value), abs(value - 1))
    if "engine_kl_nats" in name:
        return learned + divergence(dimensions)
    if "nats" in name:
        return learned + 2 * nats(dimensions)
    return learned + (steps if "_seq_" in name or "chi2" in name or "_ppl" in name else 1) * LOG_RATIO
