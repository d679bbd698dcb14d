"""How far float32 results of two kernels may lie apart: another engine, batch or processor adds in another order.

vllm-omni's scheduler puts the images of a rollout into batches as they arrive, so even one engine's two rollouts of one
request need not have the same shapes. Equal bits are demanded of copies alone: adapters, digests, schedules, indices.
"""

import math

ULP = 2.0**-23
"""The unit in the last place of float32 numbers in [1, 2)."""

LATENT = 2 * 4 * math.sqrt(32) * ULP / 2 * 4.0
"""Latents and means of the tiny models, which lie within 4: 1.1e-5. Two sums, each through some 32 products one after
the other that err by half a unit up or down, and by four times the root of their number practically never."""

LOG_RATIO = 2 * 8 * ULP
"""The difference of two log-probs of one sample: 1.9e-6. Each is a mean below 2, rounded in four operations by at most
two units of a number in [1, 2)."""

GRADIENT = LATENT
"""A gradient's rounding over its norm: the same depth, and terms of both signs that cancel to a quarter."""

ADAM = math.sqrt(3.2 * GRADIENT)
"""The same of an update: Adam moves every weight by about the learning rate, also where its gradient is near 0 and its
rounding decides: 6e-3."""


def levels(pixels: int, latent: float = LATENT) -> int:
    """How many of so many grey levels may round to the neighbouring one where latents differ by ``latent``.

    A level's edge lies within ``255 * latent`` levels of a value with twice that probability; three standard deviations
    are added. The VAE of the tiny models changes a difference by a factor of at most 2.
    """
    expected = pixels * 2 * 255 * 2 * latent / 2
    return math.ceil(expected + 3 * math.sqrt(expected))


def reward(pixels: int) -> float:
    """The mean of an image's ``pixels`` grey levels, of which four round to the neighbouring one."""
    return 4 / (255 * pixels)
