"""The effect of other work on the machine on a step of the demo: ratios side by side, in one run of a few minutes.

    python benchmarks/busy_machine.py          # writes benchmarks/results/busy_machine.json

One process for each way of waiting loads the demo; then they take turns, a step each (A B C A B C ...), first on the
machine as it is and then beside processes that compute without end. Figures are medians of the ratios of neighbouring
steps, so that what else the machine does meets all ways alike. "command line" is what ``flowgrpo-rc`` sets for itself;
"libgomp" is what torch's threads do when nobody sets anything. The latter may take minutes a step beside other work: a
way's turns under a load end when it has had ``--seconds`` there, or would with the next step.

The processes of the load end by themselves after their share of the time, and are ended by their ids in any case.
"""

import argparse
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "busy_machine.json"
BASE = "command line"
WAYS: dict[str, dict[str, str] | None] = {
    BASE: None,
    "libgomp": {},
    "sleep at once": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
"""Variables of the environment; ``None``: those that the command line sets."""
SETTLED = ("OMP_", "GOMP_", "KMP_", "MKL_")
OVERRIDES = ("trainer.log_val_generations=0", "trainer.device=cpu")
WARM_UP = 2
START_SECONDS = 300.0
BUSY = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end:\n    pass"

Step = dict[str, Any]
"""``seconds`` and ``cpu_seconds`` of a step, and the ``round`` in which it was taken."""


class Turns:
    """A process that has loaded the demo and takes a step when it is asked to."""

    def __init__(self, way: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--turns", way],
            cwd=HERE.parent,
            env={name: value for name, value in os.environ.items() if not name.startswith(SETTLED)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.threads: int = self._read(START_SECONDS)["threads"]

    def step(self, limit: float) -> Step | None:
        """Its seconds and its processor's; ``None`` after ``limit`` seconds: it must be closed then."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        try:
            return self._read(limit)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _read(self, limit: float) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit):
                raise TimeoutError(f"no answer for {limit:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}")
        return json.loads(line)


def take_turns(way: str) -> None:
    """The process of ``Turns``: a line on stdin is a step, its answer a line of JSON on stdout."""
    from flowgrpo_rc.threads import limit_spinning

    settings = WAYS[way]
    if settings is None:
        limit_spinning(os.environ)
    else:
        os.environ.update(settings)
    import torch  # only now: its threads read the environment when it is loaded

    from flowgrpo_rc.cli.compose import compose
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed
    with tempfile.TemporaryDirectory() as folder:
        config = compose("tiny_qwen_image_ocr", [*OVERRIDES, f"trainer.default_local_dir={folder}/run"])
        trainer = FlowGRPOTrainer(config)
        for _ in range(WARM_UP):
            trainer.train_step()
        print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            processor = time.process_time()
            trainer.train_step()
            taken = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - processor}
            print(json.dumps(taken), file=answers, flush=True)


@contextmanager
def busy(count: int, seconds: float) -> Iterator[None]:
    """``count`` processes that compute, for so many seconds at most."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", BUSY, str(seconds)])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def under_load(turns: dict[str, Turns], count: int, rounds: int, seconds: float) -> dict[str, list[Step]]:
    """Steps of every way beside ``count`` busy processes, by turns; a way that is slow has fewer, or none at last."""
    taken: dict[str, list[Step]] = {way: [] for way in turns}
    with busy(count, seconds * len(turns)):
        for number in range(rounds):
            for way in list(turns):
                left = seconds - sum(step["seconds"] for step in taken[way])
                if left <= max((step["seconds"] for step in taken[way]), default=0.0):
                    continue
                step = turns[way].step(left)
                if step is None:
                    turns.pop(way).close()
                    step = {"seconds": left, "unfinished": True}
                taken[way].append({**step, "round": number})
    return taken


def summarise(taken: dict[str, list[Step]], quiet: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Of each way: median seconds, over the command line's in the same round, and over its own without the load."""
    base = {step["round"]: step["seconds"] for step in taken[BASE]}
    rows = {}
    for way, steps in taken.items():
        if not steps:
            continue
        seconds = statistics.median(step["seconds"] for step in steps)
        ratios = [step["seconds"] / base[step["round"]] for step in steps if step["round"] in base]
        processor = [step["cpu_seconds"] for step in steps if "cpu_seconds" in step]
        rows[way] = {
            "steps": len(steps),
            "seconds": seconds,
            "over_command_line": _median(ratios),
            "over_no_load": seconds / quiet.get(way, seconds),
            "cpu_seconds": _median(processor),
            "at_least": any("unfinished" in step for step in steps),
        }
    return rows


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def measure(loads: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Start every way, and take turns under every load, the smallest first."""
    turns: dict[str, Turns] = {}
    results: dict[str, Any] = {}
    quiet: dict[str, float] = {}
    try:
        for way in WAYS:
            turns[way] = Turns(way)
        threads = {way: process.threads for way, process in turns.items()}
        for count in sorted(loads):
            before = os.getloadavg()[0]
            rows = summarise(under_load(turns, count, rounds, seconds), quiet)
            if count == 0:
                quiet.update({way: row["seconds"] for way, row in rows.items()})
            results[str(count)] = {"load_average_before": before, "ways": rows}
            show(count, rows)
    finally:
        for process in turns.values():
            process.close()
    return {"threads": threads, "loads": results}


def show(count: int, rows: dict[str, dict[str, Any]]) -> None:
    """One line a way."""
    print(
        f"beside {count} busy processes: seconds a step, over the command line's, over its own without load, processor"
    )
    for way, row in rows.items():
        values = [row[name] for name in ("seconds", "over_command_line", "over_no_load", "cpu_seconds")]
        figures = "".join("       -" if value is None else f"{value:8.2f}" for value in values)
        bound = ", not finished: at least" if row["at_least"] else ""
        print(f"  {way:14}{figures}   {row['steps']} steps{bound}", flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0,4,12", help="busy processes beside it, comma-separated (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each way under each load (%(default)s)")
    parser.add_argument("--seconds", type=float, default=70.0, help="at most, a way under a load (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--turns", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns:
        take_turns(arguments.turns)
        return
    from machine import describe

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the load ends with it
    loads = [int(count) for count in arguments.loads.split(",")]
    figures = measure(loads, arguments.rounds, arguments.seconds)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": describe(), "rounds": arguments.rounds, "seconds": arguments.seconds, **figures}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
