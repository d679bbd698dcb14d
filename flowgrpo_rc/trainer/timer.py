"""Wall time per stage of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """``with timer("rollout"): ...``; times of equal names add up until ``take``."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._clock()
        try:
            with torch.profiler.record_function(stage):  # the stages of a step are spans of its trace
                yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call, as ``timing_s/<stage>``, with their sum as ``timing_s/step``."""
        times = self._seconds
        self._seconds = {}
        return {**{f"timing_s/{k}": v for k, v in times.items()}, "timing_s/step": sum(times.values())}

    def _clock(self) -> float:
        # Kernels run on after a call returns; a stage ends when its own have ended.
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
