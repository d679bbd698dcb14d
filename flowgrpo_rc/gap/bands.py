"""Clip and rejection bands that follow the measured gap: ``clip_ratio=auto`` and ``rollout_rs_threshold=auto``.

In bypass mode the clip must hold the gap, which grows several-fold from the noisy to the clean end of the schedule and
changes as the adapter grows. The clip band's half width at a timestep is

    clamp(3 * q90(|log pi_actor - log pi_engine|), auto_clip_min, auto_clip_max)

over the newest rescored samples at that timestep. The rejection bound of an image is the ``1 - share`` quantile of its
criterion's statistic over the newest rescored images of the same timesteps, within bounds too. With fewer than
``2 / share`` images that quantile is extrapolated from the 90 % quantile of a normal gap. Single outliers move neither.
"""

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.actor.config import DiffusionLossConfig
from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.numerics.rejection import row_statistic
from flowgrpo_rc.gap.intervals import normal_quantile
from flowgrpo_rc.gap.safety import CLIP_FACTOR, GAP_QUANTILE

# Samples kept at each timestep for the clip band.
MEMORY = 64
# Images kept at each first timestep of a window for the rejection band; 3 / share if that is more.
IMAGE_MEMORY = 256
# Values that a timestep needs for a quantile of its own.
ENOUGH = 8


class NewestValues:
    """The newest values at each timestep, and their quantiles."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._values: dict[float, deque[float]] = {}

    def _take_in(self, timesteps: Float[Tensor, "..."], values: Float[Tensor, "..."]) -> None:
        for timestep, value in zip(timesteps.flatten().tolist(), values.flatten().tolist(), strict=True):
            # Old values drop out by themselves, so the band follows an adapter that grows.
            self._values.setdefault(timestep, deque(maxlen=self._memory)).append(value)

    def _quantile(self, timestep: float, quantile: float) -> float:
        """The quantile there, or over all timesteps with fewer than ``ENOUGH`` values."""
        own = self._values.get(timestep, ())
        # A quantile of a few values would follow each of them; all timesteps together are at least of the right size.
        if len(own) < ENOUGH:
            own = [value for values in self._values.values() for value in values]
        if not own:
            raise RuntimeError("no gap has been measured yet; observe() comes before the bands")
        return float(torch.quantile(torch.tensor(list(own), dtype=torch.float64), quantile))

    @staticmethod
    def _each(timesteps: Float[Tensor, "..."], at: Callable[[float], float]) -> Float[Tensor, "..."]:
        """``at`` of every timestep, float32."""
        # A batch has few distinct timesteps, and a quantile for each step would be computed many times.
        distinct, place = torch.unique(timesteps, return_inverse=True)
        return torch.tensor([at(timestep) for timestep in distinct.tolist()], dtype=torch.float32)[place]

    def _spread(self, name: str, at: Callable[[float], float]) -> dict[str, float]:
        """Mean, least and largest of ``at`` over the timesteps seen so far."""
        if not (values := [at(timestep) for timestep in self._values]):
            return {}
        return {f"{name}_mean": fmean(values), f"{name}_min": min(values), f"{name}_max": max(values)}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"values": {timestep: list(values) for timestep, values in self._values.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        # A checkpoint may come from a version with another memory.
        self._values = {float(t): deque(values, maxlen=self._memory) for t, values in state["values"].items()}


class ClipBands(NewestValues):
    """Half widths of the clip band by timestep, for ``clip_ratio=auto``.

    Args:
        narrowest, widest: bounds of the half width.
    """

    def __init__(self, narrowest: float, widest: float) -> None:
        super().__init__(MEMORY)
        self._narrowest = narrowest
        self._widest = widest

    @classmethod
    def configured(cls, loss: DiffusionLossConfig) -> "ClipBands | None":
        """New bands for ``clip_ratio=auto``; None if the clip band is not calibrated."""
        return cls(loss.auto_clip_min, loss.auto_clip_max) if loss.clip_ratio == "auto" else None

    def observe(self, timesteps: Float[Tensor, "n W"], gaps: Float[Tensor, "n W"]) -> None:
        """Add log ratios, actor over engine, of steps that were just sampled; the same on every process."""
        self._take_in(timesteps, gaps.abs())

    def width(self, timestep: float) -> float:
        """The half width at one timestep.

        Raises:
            RuntimeError: nothing has been observed yet.
        """
        return min(max(CLIP_FACTOR * self._quantile(timestep, GAP_QUANTILE), self._narrowest), self._widest)

    def widths(self, timesteps: Float[Tensor, "B W"]) -> Float[Tensor, "B W"]:
        """The half width of every step of a batch."""
        return self._each(timesteps, self.width)

    def metrics(self) -> dict[str, float]:
        """``actor/clip_ratio_auto_mean``, ``_min`` and ``_max`` over the timesteps seen so far."""
        return self._spread("actor/clip_ratio_auto", self.width)


class RejectionBands(NewestValues):
    """The rejection bound of an image by the first timestep of its window, for ``rollout_rs_threshold=auto``.

    Args:
        config: its one criterion, the target share and the bounds.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        (self._criterion,) = config.plan().criteria
        self._limits = (float(config.rollout_rs_auto_min), float(config.rollout_rs_auto_max))
        self._share = float(config.rollout_rs_auto_share)
        # A tail quantile needs a few values beyond it.
        super().__init__(max(IMAGE_MEMORY, round(3 / self._share)))
        self._window = 1

    @classmethod
    def configured(cls, correction: RolloutCorrectionConfig) -> "RejectionBands | None":
        """New bands for ``rollout_rs_threshold=auto``; None if the rejection band is not calibrated."""
        return cls(correction) if correction.plan().calibrated else None

    def observe(self, timesteps: Float[Tensor, "n W"], gaps: Float[Tensor, "n W"]) -> None:
        """Add log ratios, actor over engine, of whole images; values of another window size are dropped."""
        # The statistic of an image is over its window, so values of different window sizes do not compare.
        if gaps.shape[1] != self._window:
            self._window = gaps.shape[1]
            self._values = {}
        self._take_in(timesteps[:, 0], row_statistic(gaps, self._criterion))

    def bound(self, timestep: float) -> float:
        """The bound of an image whose window starts there, of the log ratio for k1, of the statistic for k2 and k3.

        Raises:
            RuntimeError: nothing has been observed yet.
        """
        low, high = (float(row_statistic(torch.full((1, self._window), h), self._criterion)) for h in self._limits)
        if len(self._values.get(timestep, ())) >= 2 / self._share:
            exceeded = self._quantile(timestep, 1 - self._share)
        else:
            # Ratio of the target share's quantile to the known one, if the gap is normal.
            beyond = normal_quantile(1 - self._share) / normal_quantile(GAP_QUANTILE)
            power = 1 if self._criterion.statistic == "k1" else 2  # k2 and k3 grow with the square of the log ratio
            exceeded = self._quantile(timestep, GAP_QUANTILE) * beyond**power
        return min(max(exceeded, low), high)

    def bounds(self, timesteps: Float[Tensor, "B W"]) -> Float[Tensor, " B"]:
        """The bound of every image of a batch."""
        return self._each(timesteps[:, 0], self.bound)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**super().state_dict(), "of": [self._criterion.name, self._window]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; values of another criterion are dropped, and measured anew."""
        name, window = state["of"]
        if name == self._criterion.name:
            super().load_state_dict(state)
            self._window = window

    def metrics(self) -> dict[str, float]:
        """``actor/rollout_rs_auto_mean``, ``_min`` and ``_max`` over the windows seen so far."""
        return self._spread("actor/rollout_rs_auto", self.bound)
