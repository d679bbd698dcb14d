"""``timeline.jsonl``: stages of the trainer and work of engines in other processes, a line per step."""

import time
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from flowgrpo_rc.rollout import RolloutEngine, RolloutPool
from flowgrpo_rc.rollout.pool import EngineWork
from flowgrpo_rc.trainer.timer import Span

WAIT = "rollout"
"""The stage in which the trainer waits for images."""
DIGITS = 4
"""Decimals of a time in the file, in seconds."""


class Timeline:
    """Collects the stages of the trainer and the work of its engines, step by step; only a ``RolloutPool`` has engines
    that work beside it."""

    def __init__(self, engine: RolloutEngine, accelerator: Any) -> None:
        self._pool = engine if isinstance(engine, RolloutPool) else None
        self._prefix = f"rank {accelerator.process_index}: " if accelerator.num_processes > 1 else ""
        # All processes make this object at the same time, so that their clocks begin together.
        self._zero = time.perf_counter()
        self._started = time.time()
        self._since = self._zero
        self._known: set[str] = set()
        """Engines that have started once."""

    def take(self, spans: Sequence[Span]) -> tuple[dict[str, Any], dict[str, float]]:
        """The line of a step for ``timeline.jsonl``, and the metrics of the engines; all processes call it at a step's
        end.

        The line, without its step, has ``started``, the clock's zero in seconds of Unix time; the ``stages`` of this
        process, from ``spans``; and the ``engines`` of all. The metrics are empty without a pool.
        """
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
    """Seconds of drawing, and share of the time of any work, of each engine that was not abandoned.

    Only what lies between ``since`` and ``now`` counts; the rest of a work belongs to the steps before and after.
    """
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
