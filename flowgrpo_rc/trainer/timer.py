"""Wall time of a step's stages, its speed, and memory, under verl-omni's names for the metrics that it logs too."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TRAINING_STAGES = ("rollout", "probe", "reward", "score", "correct", "advantage", "update", "sync")
"""The stages of every batch of images; validation, checkpoints and logging are left out."""
_GB = 1024**3


@dataclass(frozen=True)
class Span:
    """Begin and end of a stage by the host's clock."""

    stage: str
    # Seconds of ``time.perf_counter``.
    begin: float
    end: float


class StageTimer:
    """``with timer("rollout"): ...``; times of equal names add up until ``take``.

    On a CUDA device a stage is timed by events in the device's queue, since kernels run on after a call returns: a
    stage is charged with the kernels that it queued, and there is no host sync before ``take``. ``take_spans`` gives
    times of the host's clock on every device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uses_events = device.type == "cuda"
        self._stages: list[tuple[str, Any, Any]] = []
        """Name, begin and end of every finished stage: CUDA events, or seconds of the host's clock."""
        self._beside: dict[str, float] = {}
        self._spans: list[Span] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        event, begin = self._now()
        try:
            with torch.profiler.record_function(stage):  # the stages of a step are spans of its trace
                yield
        finally:
            last_event, end = self._now()
            self._stages.append((stage, event, last_event))
            self._spans.append(Span(stage, begin, end))

    def beside(self, name: str, seconds: float) -> None:
        """Record work of another thread, which adds nothing to the step."""
        self._beside[name] = self._beside.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call, as ``timing_s/<stage>``, with their sum as ``timing_s/step``.

        The work of other threads is included under its names, but not in the sum. Waits once for the device.
        """
        stages = self._stages
        self._stages = []
        # The events of one stream complete in order, so that the last one is enough.
        if self._uses_events and stages:
            stages[-1][2].synchronize()
        times: dict[str, float] = {}
        for name, begin, end in stages:
            seconds = begin.elapsed_time(end) / 1000 if self._uses_events else end - begin
            times[name] = times.get(name, 0.0) + seconds
        beside, self._beside = self._beside, {}
        named = {f"timing_s/{name}": seconds for name, seconds in {**times, **beside}.items()}
        return {**named, "timing_s/step": sum(times.values())}

    def take_spans(self) -> list[Span]:
        """The stages since the last call, in the order of their ends."""
        spans, self._spans = self._spans, []
        return spans

    def _now(self) -> tuple[Any, float]:
        """The time or event that ``take`` subtracts, and the host's clock."""
        now = time.perf_counter()
        if not self._uses_events:
            return now, now
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event, now


def speed(
    times: dict[str, float], images: int, processes: int, seconds_at_peak: float | None = None
) -> dict[str, float]:
    """Time per image by stage, and images per second.

    Args:
        times: seconds as ``timing_s/<stage>``. Without an update there are no metrics.
        images: of the batch, over all processes.
        processes: each has one GPU.
        seconds_at_peak: time of one such GPU at its peak for the transformer's forwards and backwards and for decoding;
            ``None`` if unknown.
    """
    found = {stage: times[f"timing_s/{stage}"] for stage in TRAINING_STAGES if f"timing_s/{stage}" in times}
    # A row of a validation alone has no images of training.
    if "update" not in found:
        return {}
    seconds = sum(found.values())
    metrics = {
        **{f"timing_per_image_ms/{stage}": 1000 * value / images for stage, value in found.items()},
        "perf/total_num_images": float(images),
        "perf/time_per_step": seconds,
        "perf/images_per_second": images / seconds,
        "perf/throughput": images / seconds / processes,
    }
    if seconds_at_peak is not None:
        metrics["perf/mfu"] = seconds_at_peak / (seconds * processes)
    return metrics


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory that this process has held so far, in GiB."""
    # The kernel counts kilobytes on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"perf/max_memory_resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GB}
    if device.type == "cuda":
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / _GB
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / _GB
    return found
