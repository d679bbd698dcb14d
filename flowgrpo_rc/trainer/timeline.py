"""``timeline.jsonl``: stages of the trainer and work of engines in other processes, a line per step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from flowgrpo_rc.rollout import RolloutEngine, RolloutPool
from flowgrpo_rc.rollout.pool import EngineWork, Work
from flowgrpo_rc.trainer.timer import Span

WAIT = "rollout"
"""The stage in which the trainer waits for images."""
DIGITS = 4
"""Decimals of a time in the file, in seconds."""


@dataclass(frozen=True)
class ProcessAccount:
    """Work of the engines of one trainer process since the last step, in seconds of its ``time.perf_counter``."""

    engines: list[EngineWork]
    since: float
    """End of the last step."""
    now: float
    """End of this step."""
    waited: float
    """Time that the process waited for images."""
    restarts: int
    """Starts of engines, without the first of each."""


class Timeline:
    """Collects the stages of the trainer and the work of its engines, step by step.

    Args:
        engine: the trainer's; only a ``RolloutPool`` has engines that work beside it.
        accelerator: number of this trainer process, and of all.
    """

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
        """The line of a step and the metrics of the engines; all processes call it at the end of the step.

        Args:
            spans: the stages of this process since then.

        Returns:
            A line for ``timeline.jsonl``, without its step: ``started``, the clock's zero in seconds of Unix time; the
            ``stages`` of this process; and the ``engines`` of all. The metrics are empty without a pool.
        """
        stages = [[span.stage, self._time(span.begin), self._time(span.end)] for span in spans]
        line = {"started": round(self._started, DIGITS), "stages": stages, "engines": {}}
        # An engine in the trainer's process works inside the stage "rollout", which is in the line already.
        if self._pool is None:
            return line, {}
        engines = self._pool.take_account()
        since = self._since
        self._since = time.perf_counter()
        starts = [work.engine for engine in engines for work in engine.done if work.what == "start"]
        # The first start of an engine is no restart.
        first = set(starts) - self._known
        self._known |= first
        waited = sum(span.end - span.begin for span in spans if span.stage == WAIT)
        account = ProcessAccount(engines, since, self._since, waited, len(starts) - len(first))
        done = {
            self._prefix + engine.engine: [
                [work.what, self._time(work.begin), self._time(work.end), work.rows, work.version]
                for work in engine.done
            ]
            for engine in engines
        }
        everyones = gather_object([(account, done)])
        for _, done in everyones:
            line["engines"] |= done
        return line, metrics_of([account for account, _ in everyones])

    def _time(self, value: float) -> float:
        return round(value - self._zero, DIGITS)


def metrics_of(accounts: Sequence[ProcessAccount]) -> dict[str, float]:
    """Utilisation of engines and trainer over all processes, as shares of the time between the ends of two steps.

    Engines that were abandoned do not count.
    """
    drawn: list[float] = []
    busy: list[float] = []
    for account in accounts:
        for engine in account.engines:
            if not engine.given_up:
                # Unfinished work counts up to now; the rest is counted in the next step.
                work = [*engine.done, *([engine.doing] if engine.doing else [])]
                drawn.append(_seconds([one for one in work if one.what == "draw"], account))
                busy.append(_share(_seconds(work, account), account))
    left = len(drawn)
    return {
        # ``max(left, 1)``: with no engine left the run ends, but this row is still written.
        "timing_s/engine_draw": sum(drawn) / max(left, 1),
        "timing_s/engine_draw_max": max(drawn, default=0.0),
        "perf/engines_busy": sum(busy) / max(left, 1),
        "perf/engines_left": float(left),
        "perf/engine_restarts": float(sum(account.restarts for account in accounts)),
        "perf/trainer_waits": sum(_share(account.waited, account) for account in accounts) / len(accounts),
    }


def _seconds(work: Sequence[Work], account: ProcessAccount) -> float:
    """The part of the work within the step; the rest belongs to the steps before and after."""
    return sum((max(0.0, min(one.end, account.now) - max(one.begin, account.since)) for one in work), 0.0)


def _share(seconds: float, account: ProcessAccount) -> float:
    passed = account.now - account.since
    return min(1.0, seconds / passed) if passed > 0 else 0.0
