"""Noise clean images anew, for objectives that learn from them."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor.config import CleanImagesConfig
from flowgrpo_rc.batch import Key
from flowgrpo_rc.models.base import DiffusionModel

LEVELS = 1000
"""Steps of the schedule that the noise levels of ``distribution=schedule`` are interpolated from."""


def noise_images(
    batch: TensorDict,
    seeds: Sequence[int],
    config: CleanImagesConfig,
    model: DiffusionModel,
    size: tuple[int, int],
    num_steps: int,
) -> None:
    """Add ``noise`` ``(B, K, *L)``, ``sigmas`` and ``timesteps`` ``(B, K)`` to a batch with ``clean_latents``.

    ``seeds`` has one number per image; images with the same one get the same levels and noises. ``size`` is the images'
    height and width, on which the model's schedule depends, ``num_steps`` the rollout's number of steps.
    """
    clean = batch[Key.CLEAN_LATENTS]
    levels = NoiseLevels(config, model.schedule(num_steps if config.distribution == "steps" else LEVELS, *size).sigmas)
    sigmas: list[Tensor] = []
    noises: list[Tensor] = []
    for seed in seeds:
        # On the host and one stream an image, so that the numbers do not depend on device, processes or micro-batches.
        generator = torch.Generator().manual_seed(seed)
        sigmas.append(levels.draw(generator))
        noises.append(torch.randn((config.places, *clean.shape[1:]), generator=generator))
    batch[Key.NOISE] = torch.stack(noises)
    batch[Key.SIGMAS] = torch.stack(sigmas)
    batch[Key.TIMESTEPS] = model.timesteps_of(batch[Key.SIGMAS])


class NoiseLevels:
    """The distribution of noise levels, cut into ``places`` equally likely parts.

    Args:
        config: places, distribution and range.
        schedule: falling noise levels of the model's schedule, with 0 at the end; for ``steps`` the rollout's own.
    """

    def __init__(self, config: CleanImagesConfig, schedule: Float[Tensor, " N"]) -> None:
        steps = len(schedule) - 1
        if config.distribution == "steps" and config.places > steps:
            raise ValueError(
                f"{config.section}.places: got {config.places} with distribution=steps, but a rollout has {steps} "
                f"steps; give at most {steps}"
            )
        self._config = config
        self._schedule = schedule.double().flip(0).numpy()
        low, high = config.range
        if config.distribution != "steps":
            self._low, self._high = self._share_below(low), self._share_below(high)

    def draw(self, generator: torch.Generator) -> Float[Tensor, " K"]:
        """One level from each part, or of each of ``K`` steps, in (0, 1]."""
        places = self._config.places
        if self._config.distribution == "steps":
            chosen = torch.randperm(len(self._schedule) - 1, generator=generator)[:places]
            return torch.from_numpy(self._schedule)[1 + chosen].float()
        uniform = 1 - torch.rand(places, generator=generator, dtype=torch.float64)  # in (0, 1]
        shares = self._low + (self._high - self._low) * (torch.arange(places) + uniform) / places
        low, high = self._config.range
        return torch.tensor([self._level(float(share)) for share in shares]).clamp(low, high).float()

    def _level(self, share: float) -> float:
        """The level below which this share of the levels lies."""
        if self._config.distribution == "uniform":
            return share
        if self._config.distribution == "schedule":
            return float(np.interp(share, np.linspace(0, 1, len(self._schedule)), self._schedule))
        if share in (0.0, 1.0):
            return share
        return 1 / (1 + np.exp(-NormalDist().inv_cdf(share)))

    def _share_below(self, level: float) -> float:
        """The share of the levels below this one."""
        if self._config.distribution == "uniform" or level in (0.0, 1.0):
            return level
        if self._config.distribution == "schedule":
            return float(np.interp(level, self._schedule, np.linspace(0, 1, len(self._schedule))))
        return NormalDist().cdf(float(np.log(level / (1 - level))))
