"""``timeline.jsonl``: stages of the trainer and work of engines in other processes, a line per step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Work of the engines of one trainer process since the last step, in seconds of that process's run."""

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

    Times are seconds of the host's clock since this object was made, which all processes do at the same time.

    Args:
        engine: the trainer's; only a ``RolloutPool`` has engines that work beside it.
        process: number of this trainer process.
        processes: number of trainer processes.
    """

    def __init__(self, engine: RolloutEngine, process: int, processes: int) -> None:
        self._pool = engine if isinstance(engine, RolloutPool) else None
        self._process = process
        self._processes = processes
        self._zero = time.perf_counter()
        self._started = time.time()
        self._since = 0.0
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
        stages = [[span.stage, *self._rounded(span.begin, span.end)] for span in spans]
        line = {"started": round(self._started, DIGITS), "stages": stages}
        # An engine in the trainer's process works inside the stage "rollout", which is in the line already.
        if self._pool is None:
            return line | {"engines": {}}, {}
        accounts = gather_object([self._account(self._pool, spans)])
        engines = {engine.engine: engine.done for account in accounts for engine in account.engines}
        return line | {"engines": {name: _listed(done) for name, done in engines.items()}}, metrics_of(accounts)

    def _account(self, pool: RolloutPool, spans: Sequence[Span]) -> ProcessAccount:
        engines = [self._own(engine) for engine in pool.take_account()]
        starts = [work.engine for engine in engines for work in engine.done if work.what == "start"]
        # The first start of an engine is no restart.
        first = set(starts) - self._known
        self._known |= first
        since = self._since
        self._since = time.perf_counter() - self._zero
        waited = sum(span.end - span.begin for span in spans if span.stage == WAIT)
        return ProcessAccount(engines, since, self._since, waited, len(starts) - len(first))

    def _own(self, engine: EngineWork) -> EngineWork:
        """Convert to times of this run, and to a name that is unique over processes."""
        name = engine.engine if self._processes == 1 else f"rank {self._process}: {engine.engine}"

        def own(work: Work) -> Work:
            return replace(work, engine=name, begin=work.begin - self._zero, end=work.end - self._zero)

        doing = None if engine.doing is None else own(engine.doing)
        return EngineWork(name, [own(work) for work in engine.done], doing, engine.given_up)

    def _rounded(self, *times: float) -> list[float]:
        return [round(value - self._zero, DIGITS) for value in times]


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


def _listed(done: Sequence[Work]) -> list[list[Any]]:
    return [[w.what, round(w.begin, DIGITS), round(w.end, DIGITS), w.rows, w.version] for w in done]
