"""``clip_ratio=auto``: a clip band per timestep that follows the measured gap between rollout engine and actor.

In bypass mode the clip is centred at the engine's log-probs, so it must be wider than the gap, which grows several-fold
from the noisy to the clean end of the schedule and changes as the adapter grows. The band's half width at a timestep is

    clamp(3 * q90(|log pi_actor - log pi_engine|), auto_clip_min, auto_clip_max)

over the newest samples of the probe at that timestep. Quantiles of many samples: single outliers do not move it.
"""

from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

FACTOR, QUANTILE = 3.0, 0.9
MEMORY = 64
"""Samples kept at each timestep."""
ENOUGH = 8
"""A timestep with fewer takes the quantile over all timesteps."""


class ClipBands:
    """Half widths of the clip band by timestep.

    Args:
        narrowest, widest: bounds of the half width.
    """

    def __init__(self, narrowest: float, widest: float) -> None:
        self._narrowest, self._widest = narrowest, widest
        self._samples: dict[float, deque[float]] = {}

    def observe(self, timesteps: Iterable[float], gaps: Iterable[float]) -> None:
        """Take in log ratios, actor over engine, of steps that were just sampled; the same on every process."""
        for timestep, gap in zip(timesteps, gaps, strict=True):
            self._samples.setdefault(float(timestep), deque(maxlen=MEMORY)).append(abs(float(gap)))

    def width(self, timestep: float) -> float:
        """The half width at one timestep.

        Raises:
            RuntimeError: nothing has been observed yet.
        """
        own = self._samples.get(timestep, ())
        if len(own) < ENOUGH:
            own = [value for samples in self._samples.values() for value in samples]
        if not own:
            raise RuntimeError("clip_ratio=auto: no gap has been measured yet; observe() comes before width()")
        quantile = float(torch.quantile(torch.tensor(list(own), dtype=torch.float64), QUANTILE))
        return min(max(FACTOR * quantile, self._narrowest), self._widest)

    def widths(self, timesteps: Float[Tensor, "B W"]) -> Float[Tensor, "B W"]:
        """The half width of every step of a batch."""
        values = {timestep: self.width(timestep) for timestep in set(timesteps.flatten().tolist())}
        return torch.tensor([[values[t] for t in row] for row in timesteps.tolist()], dtype=torch.float32)

    def metrics(self) -> dict[str, float]:
        """``actor/clip_ratio_auto_mean``, ``_min`` and ``_max`` over the timesteps seen so far."""
        widths = [self.width(timestep) for timestep in self._samples]
        if not widths:
            return {}
        named = {"mean": fmean(widths), "min": min(widths), "max": max(widths)}
        return {f"actor/clip_ratio_auto_{name}": value for name, value in named.items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"samples": {timestep: list(samples) for timestep, samples in self._samples.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self._samples = {float(t): deque(samples, maxlen=MEMORY) for t, samples in state["samples"].items()}
