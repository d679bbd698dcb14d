"""Time of a step: its stages, its speed, memory, and ``timeline.jsonl`` with the work of engines in other processes.
Metrics that verl-omni logs too have its names."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from flowgrpo_rc.rollout import RolloutEngine, RolloutPool
from flowgrpo_rc.rollout.pool import EngineWork

WAIT = "rollout"
"""The stage in which the trainer waits for images."""
DIGITS = 4
"""Decimals of a time in the file, in seconds."""
TRAINING_STAGES = ("rollout", "probe", "reward", "score", "correct", "advantage", "update", "replay", "writer", "sync")
"""The stages of every batch of images; validation, checkpoints and logging are left out."""
_GB = 1024**3


class Span(NamedTuple):
    """Begin and end of a stage by the host's clock, ``time.perf_counter``."""

    stage: str
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
        """Seconds per stage since the last call, as ``timing_s/<stage>``, with their sum as ``timing_s/step``. The work
        of other threads is included under its names, but not in the sum. Waits once for the device."""
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
    """Time per image by stage, and images per second, of ``images`` over all ``processes`` with a GPU each. ``times``
    are seconds as ``timing_s/<stage>``; without an update of either side there are no metrics. ``seconds_at_peak``, if
    known, is the time of one such GPU at its peak for the transformer's forwards and backwards and for decoding."""
    found = {stage: times[f"timing_s/{stage}"] for stage in TRAINING_STAGES if f"timing_s/{stage}" in times}
    # A row of a validation alone has no images of training.
    if not found.keys() & {"update", "writer"}:
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


class Timeline:
    """Collects the stages of the trainer, and the work of the engines of a ``RolloutPool``, which work beside it."""

    def __init__(self, engine: RolloutEngine, accelerator: Any) -> None:
        self._pool = engine if isinstance(engine, RolloutPool) else None
        self._prefix = f"rank {accelerator.process_index}: " if accelerator.num_processes > 1 else ""
        # All processes make this object at the same time, so that their clocks begin together.
        self._zero = time.perf_counter()
        self._started = time.time()
        self._since = self._zero
        self._known: set[str] = set()  # engines that have started once

    def take(self, spans: Sequence[Span]) -> tuple[dict[str, Any], dict[str, float]]:
        """The line of a step for ``timeline.jsonl``, and the metrics of the engines; all processes call it at a step's
        end. The line, without its step, has ``started``, the clock's zero in seconds of Unix time; the ``stages`` of
        this process, from ``spans``; and the ``engines`` of all. The metrics are empty without a pool."""
        stages = [[span.stage, self._time(span.begin), self._time(span.end)] for span in spans]
        line = {"started": round(self._started, DIGITS), "stages": stages, "engines": {}}
        # An engine in the trainer's process works inside the stage "rollout", which is in the line already.
        if self._pool is None:
            return line, {}
        engines = self._pool.take_account()
        since, now = self._since, time.perf_counter()
        self._since = now
        starts = [work.engine for engine in engines for work in engine.done if work.what == "start"]
        # The first start of an engine is no restart.
        first = set(starts) - self._known
        self._known |= first
        waited = sum(span.end - span.begin for span in spans if span.stage == WAIT)
        line["engines"] = {
            self._prefix + engine.engine: [
                [work.what, self._time(work.begin), self._time(work.end), work.rows, work.version]
                for work in engine.done
            ]
            for engine in engines
        }
        own = (engine_use(engines, since, now), _share(waited, now - since), len(starts) - len(first), line["engines"])
        uses, waits, restarts, everyones = zip(*gather_object([own]), strict=True)
        drawn, busy = zip(*(one for use in uses for one in use), strict=True) if any(uses) else ((), ())
        line["engines"] = {name: work for engines in everyones for name, work in engines.items()}
        return line, {
            # ``max(..., 1)``: with no engine left the run ends, but this row is still written.
            "timing_s/engine_draw": sum(drawn) / max(len(drawn), 1),
            "timing_s/engine_draw_max": max(drawn, default=0.0),
            "perf/engines_busy": sum(busy) / max(len(busy), 1),
            "perf/engines_left": float(len(drawn)),
            "perf/engine_restarts": float(sum(restarts)),
            "perf/trainer_waits": sum(waits) / len(waits),
        }

    def _time(self, value: float) -> float:
        return round(value - self._zero, DIGITS)


def engine_use(engines: Sequence[EngineWork], since: float, now: float) -> list[tuple[float, float]]:
    """Seconds of drawing, and share of the time of any work, of each engine that was not abandoned. Only what lies
    between ``since`` and ``now`` counts; the rest of a work belongs to the steps before and after."""
    used = []
    for engine in engines:
        if not engine.given_up:
            drawn = busy = 0.0
            for work in [*engine.done, *([engine.doing] if engine.doing else [])]:
                seconds = max(0.0, min(work.end, now) - max(work.begin, since))
                busy += seconds
                drawn += seconds if work.what == "draw" else 0.0
            used.append((drawn, _share(busy, now - since)))
    return used


def _share(seconds: float, passed: float) -> float:
    return min(1.0, seconds / passed) if passed > 0 else 0.0
