"""Bands that follow the measured gap of engine and actor: ``clip_ratio=auto`` and ``rollout_rs_threshold=auto``.

In bypass mode the clip is centred at the engine's log-probs, so it must hold the gap, which grows several-fold
from the noisy to the clean end of the schedule and changes as the adapter grows. The clip band's half width at a
timestep is

    clamp(3 * q90(|log pi_actor - log pi_engine|), auto_clip_min, auto_clip_max)

over the newest samples of the probe at that timestep; the rejection bound of an image is the ``1 - share`` quantile of
its criterion's statistic over the newest probed images of the same timesteps, within bounds too. While these are fewer
than ``2 / share``, that quantile lies beyond what has been seen, and is the one of a normal gap with the same 90 %
quantile. Quantiles of many samples: single outliers do not move them.
"""

from collections import deque
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.numerics.rejection import row_statistic

FACTOR, QUANTILE = 3.0, 0.9
MEMORY = 64
"""Samples kept at each timestep for the clip;"""
IMAGE_MEMORY = 256
"""and images, of each first timestep of a window, for the rejection, or 3 / share where that is more."""
ENOUGH = 8
"""A timestep with fewer takes the quantile over all timesteps."""
_NORMAL = NormalDist()


class RunningQuantile:
    """A quantile of the newest values at each timestep."""

    def __init__(self, quantile: float, memory: int) -> None:
        self._quantile, self._memory = quantile, memory
        self._values: dict[float, deque[float]] = {}

    def observe(self, timestep: float, value: float) -> None:
        """Take in one value."""
        self._values.setdefault(timestep, deque(maxlen=self._memory)).append(value)

    def at(self, timestep: float, quantile: float | None = None) -> float:
        """The quantile there (another one, if it is given), or over all timesteps where too little has been seen.

        Raises:
            RuntimeError: nothing has been observed yet.
        """
        own = self._values.get(timestep, ())
        if len(own) < ENOUGH:
            own = [value for values in self._values.values() for value in values]
        if not own:
            raise RuntimeError("no gap has been measured yet; observe() comes before the bands")
        return float(torch.quantile(torch.tensor(list(own), dtype=torch.float64), quantile or self._quantile))

    def clear(self) -> None:
        """Forget everything."""
        self._values = {}

    def count(self, timestep: float) -> int:
        """How many values are known there."""
        return len(self._values.get(timestep, ()))

    @property
    def timesteps(self) -> list[float]:
        """Where values have been observed."""
        return list(self._values)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"values": {timestep: list(values) for timestep, values in self._values.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self._values = {float(t): deque(values, maxlen=self._memory) for t, values in state["values"].items()}


class ClipBands:
    """Half widths of the clip band by timestep, for ``clip_ratio=auto``.

    Args:
        narrowest, widest: bounds of the half width.
    """

    def __init__(self, narrowest: float, widest: float) -> None:
        self._narrowest, self._widest = narrowest, widest
        self.sizes = RunningQuantile(QUANTILE, MEMORY)

    def observe(self, timesteps: Float[Tensor, "n W"], gaps: Float[Tensor, "n W"]) -> None:
        """Take in log ratios, actor over engine, of steps that were just sampled; the same on every process."""
        for timestep, gap in zip(timesteps.flatten().tolist(), gaps.abs().flatten().tolist(), strict=True):
            self.sizes.observe(timestep, gap)

    def width(self, timestep: float) -> float:
        """The half width at one timestep.

        Raises:
            RuntimeError: nothing has been observed yet.
        """
        return min(max(FACTOR * self.sizes.at(timestep), self._narrowest), self._widest)

    def widths(self, timesteps: Float[Tensor, "B W"]) -> Float[Tensor, "B W"]:
        """The half width of every step of a batch."""
        values = {timestep: self.width(timestep) for timestep in set(timesteps.flatten().tolist())}
        return torch.tensor([[values[t] for t in row] for row in timesteps.tolist()], dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.sizes.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self.sizes.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """``actor/clip_ratio_auto_mean``, ``_min`` and ``_max`` over the timesteps seen so far."""
        return _spread("actor/clip_ratio_auto", [self.width(timestep) for timestep in self.sizes.timesteps])


class RejectionBands:
    """The rejection bound of an image by the first timestep of its window, for ``rollout_rs_threshold=auto``.

    Args:
        config: its one criterion, the target share and the bounds.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        (self._criterion,) = config.plan().criteria
        self._limits = (float(config.rollout_rs_auto_min), float(config.rollout_rs_auto_max))
        self._share = float(config.rollout_rs_auto_share)
        self.sizes = RunningQuantile(1 - self._share, max(IMAGE_MEMORY, round(3 / self._share)))
        self._window = 1

    def observe(self, timesteps: Float[Tensor, "n W"], gaps: Float[Tensor, "n W"]) -> None:
        """Take in log ratios, actor over engine, of whole images; those of another window size are forgotten."""
        if gaps.shape[1] != self._window:
            self._window = gaps.shape[1]
            self.sizes.clear()
        for timestep, size in zip(timesteps[:, 0].tolist(), row_statistic(gaps, self._criterion).tolist(), strict=True):
            self.sizes.observe(timestep, size)

    def bound(self, timestep: float) -> float:
        """The bound of an image whose window starts there: of the log ratio for k1, of the statistic for k2 and k3.

        Raises:
            RuntimeError: nothing has been observed yet.
        """
        low, high = (float(row_statistic(torch.full((1, self._window), h), self._criterion)) for h in self._limits)
        return min(max(self._quantile(timestep), low), high)

    def _quantile(self, timestep: float) -> float:
        if self.sizes.count(timestep) >= 2 / self._share:
            return self.sizes.at(timestep)
        beyond = _NORMAL.inv_cdf(1 - self._share / 2) / _NORMAL.inv_cdf(0.5 + QUANTILE / 2)
        power = 1 if self._criterion.statistic == "k1" else 2  # k2 and k3 go with the square of the log ratio
        return self.sizes.at(timestep, QUANTILE) * beyond**power

    def bounds(self, timesteps: Float[Tensor, "B W"]) -> Float[Tensor, " B"]:
        """The bound of every image of a batch."""
        values = {timestep: self.bound(timestep) for timestep in set(timesteps[:, 0].tolist())}
        return torch.tensor([values[t] for t in timesteps[:, 0].tolist()], dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self.sizes.state_dict(), "of": [self._criterion.name, self._window]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave; values of another criterion are forgotten, and measured anew."""
        name, window = state["of"]
        if name == self._criterion.name:
            self.sizes.load_state_dict(state)
            self._window = window

    def metrics(self) -> dict[str, float]:
        """``actor/rollout_rs_auto_mean``, ``_min`` and ``_max`` over the windows seen so far."""
        return _spread("actor/rollout_rs_auto", [self.bound(timestep) for timestep in self.sizes.timesteps])


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": fmean(values), f"{name}_min": min(values), f"{name}_max": max(values)}
