"""Time saved by overlap: scoring while drawing, and drawing the next batch while learning from the last.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json
    python benchmarks/overlap.py --what ahead --out benchmarks/results/overlap_ahead.json
    python benchmarks/overlap.py --what streamed --out benchmarks/results/overlap_streamed.json
    python benchmarks/overlap.py --what server --out benchmarks/results/overlap_server.json
    python benchmarks/overlap.py --what replay --steps 5 --unit 4 --out benchmarks/results/overlap_replay.json
    python benchmarks/overlap.py --what process --out benchmarks/results/overlap_process.json

Steps of the tiny Qwen-Image run. With all but ``process``, engines, scorers and updates sleep, much longer than
anything is computed: so neither the number of cores nor other work on the machine decides.

``rewards``: every micro-batch of the rollout sleeps, and so does the scorer for each micro-batch, equally long.
``ratio`` is the time from the rollout's begin to the end of the reward (timing_s/rollout + probe + reward) over the
slower of the two (timing_s/rollout, timing_s/reward_work). Serial steps take about twice the slower one; overlapped
ones wait for the last micro-batch alone.

``ahead``: so many GPUs take turns, each an engine that sleeps for its micro-batches and then a part of an update that
sleeps; or they are split, engines drawing one batch ahead (``rollout.ahead=1``). ``seconds`` is a step's wall time,
``expected`` what the sleeps come to, ``over_slower`` the wall time over the slower of rollout (of the engine that drew
longest) and update.

``streamed``: the same of machines with slow rewards, which score micro-batch by micro-batch as they are drawn.

``server``: likewise, by a server of ``reward.remote``, which a run that is ahead asks while the actor learns.

``replay``: as ``ahead``, without a replay buffer and with one, whose optimizer steps sleep too.

``process``: nothing sleeps; the engine draws in the trainer's process, or in one of its own, in turn or ahead. The two
processes share the machine's cores, of which each uses as many as it has threads.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from machine import describe

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.rollout import DiffusersEngine, RolloutPool, diffusers_engine
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer import FlowGRPOTrainer, setup

SCORER = """
import time

def sleeps(images, prompts, metadata, seconds):
    time.sleep(seconds)
    return images.reshape(len(images), -1).mean(1) / 255

sleeps.streams = True
"""
IMAGES = 16
PARTS = 8


class Sleeping(diffusers_engine.RequestSampler):
    """Draws, and then sleeps."""

    seconds = 0.0

    def sample(self, rows):
        found = super().sample(rows)
        time.sleep(self.seconds)
        return found


def run(folder: Path, overlap: bool, seconds: float, steps: int) -> list[dict[str, float]]:
    """The rows of so many steps, after one to warm up."""
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER)
    config = compose(
        "tiny_qwen_image_ocr",
        [
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.rollout.n={IMAGES // 4}",
            f"actor_rollout_ref.rollout.micro_batch_size={IMAGES // PARTS}",
            "actor_rollout_ref.rollout.pipeline.num_inference_steps=3",
            "actor_rollout_ref.rollout.algo.sde_window_range=[0,2]",
            "actor_rollout_ref.rollout.probe.images=0",
            f"reward.reward_functions.sleeps={{path: {scorer}, name: sleeps, seconds: {seconds}}}",
            f"reward.overlap={str(overlap).lower()}",
            "trainer.val_before_train=false",
            f"trainer.total_training_steps={steps + 1}",
            "data.val_files=null",
            f"trainer.default_local_dir={folder / 'run'}",
        ],
    )
    return FlowGRPOTrainer(config).fit().rows()[1:]


def ratio(row: dict[str, float]) -> float:
    """Of one step; see the head of this file."""
    together = sum(row.get(f"timing_s/{stage}", 0.0) for stage in ("rollout", "probe", "reward"))
    return together / max(row["timing_s/rollout"], row["timing_s/reward_work"])


def of_rewards(args: argparse.Namespace) -> dict[str, Any]:
    """The part ``rewards``."""
    Sleeping.seconds = args.seconds
    diffusers_engine.RequestSampler = Sleeping  # type: ignore[misc]
    results: dict[str, Any] = {"micro_batches": PARTS, "sleep_s": args.seconds, "steps": args.steps}
    for name, overlap in (("overlapped", True), ("serial", False)):
        with tempfile.TemporaryDirectory() as folder:
            rows = run(Path(folder), overlap, args.seconds, args.steps)
        found = [ratio(row) for row in rows]
        results[name] = {
            "ratio": statistics.median(found),
            "ratios": found,
            **{
                key: statistics.median(row[f"timing_s/{key}"] for row in rows)
                for key in ("rollout", "reward", "reward_work")
            },
        }
        print(f"{name}: {results[name]['ratio']:.3f} times the slower of rollout and scoring")
    return results


# ---------------------------------------------------------------- drawing ahead, asleep

OF_BATCH = """
import time

def sleeps(images, prompts, metadata, seconds):
    time.sleep(seconds * len(images) / 12)
    return images.reshape(len(images), -1).mean(1) / 255

sleeps.streams = STREAMS
"""
CHUNKS = 12
"""Micro-batches of a batch: 1, 2, 3 and 4 engines share them evenly."""


@dataclass(frozen=True)
class Machine:
    """GPUs that take turns, or are split, and how long their work takes; in units."""

    name: str
    rollout: float
    """Of a batch on the GPUs that take turns."""
    update: float
    """Likewise."""
    reward: float
    """Of a batch; no GPU of these scores."""
    turns: int
    """GPUs that take turns."""
    trainer: int
    """GPUs of the trainer, where they are split."""
    engines: int
    """GPUs of engines."""

    def expected(self, kind: str, *, split: bool) -> float:
        """Of a step, in units. Images that were drawn ahead are scored when the trainer comes to them, by a server
        before that.

        Engines that began together deliver together, in rounds: rewards that stream begin after the first round and end
        after those of the last.
        """
        if not split:
            rounds = CHUNKS / self.turns
            scored = self.rollout + self.reward
            if kind != "ahead":
                scored = max(self.rollout + self.reward / rounds, self.rollout / rounds + self.reward)
            return scored + self.update
        rollout = self.rollout * self.turns / self.engines
        update = self.update * self.turns / self.trainer
        return max(rollout, self.reward, update) if kind == "server" else max(rollout, self.reward + update)


MACHINES = (
    Machine("2 GPUs, rollout = update", 1, 1, 0, 2, 1, 1),
    Machine("3 GPUs, rollout = 2 updates", 1, 0.5, 0, 3, 1, 2),
    Machine("4 GPUs, rollout = 2 updates", 1, 0.5, 0, 4, 2, 2),
    Machine("4 GPUs, rollout = 4 updates, reward = update", 1, 0.25, 0.25, 4, 1, 3),
    Machine("4 GPUs, rollout = 4 updates, reward = 4 updates", 1, 0.25, 1, 4, 2, 2),
    Machine("a second GPU for the engine, rollout = update", 1, 1, 0, 1, 1, 1),
    Machine("a second GPU for the engine, rollout = update = reward", 1, 1, 1, 1, 1, 1),
)


REPLAY_MACHINES = (
    Machine("rollout = 1.7 updates", 1, 0.6, 0, 1, 1, 1),
    Machine("rollout = 4 updates", 1, 0.25, 0, 1, 1, 1),
)
BUFFERS: dict[str, tuple[float, tuple[str, ...]]] = {
    "no buffer": (0, ()),
    "two batches": (2, ("algorithm.replay.batches=2", "algorithm.replay.share=0.75")),
}
"""Name -> optimizer steps from the buffer for each of a new batch, and settings."""


class SleepingHandle:
    """An engine elsewhere: draws with a model of its own, and then sleeps."""

    loading = threading.Lock()
    """Libraries change classes while they load."""

    def __init__(self, rollout: Any, model: Any, name: str, seconds: float) -> None:
        self.name = name
        self._rollout = rollout
        self._model = model
        self._seconds = seconds

    def start(self) -> None:
        """Load."""
        torch.set_num_threads(1)
        with self.loading:
            model = PipelineLoader(self._model.path, dtype=self._model.dtype).load()
            self._engine = DiffusersEngine.from_config(self._rollout, model, self._model, "cpu")

    def sync(self, state: Any, version: int) -> str:
        """Take an adapter."""
        return self._engine.sync(state, version)

    def generate(self, request: Any) -> Any:
        """Draw, and sleep for what is left of the time."""
        begin = time.perf_counter()
        found = self._engine.generate(request)
        time.sleep(max(0.0, self._seconds - (time.perf_counter() - begin)))
        return found

    def close(self) -> None:
        """Nothing to end."""


@contextlib.contextmanager
def server_that_sleeps(seconds: float) -> Iterator[str]:
    """A reward server that takes so long for a batch; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            files = asked["images"]
            time.sleep(seconds * len(files) / CHUNKS)
            body = json.dumps({"scores": [len(file) / 1e4 for file in files]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def slow_reward(folder: Path, kind: str, seconds: float) -> Iterator[tuple[str, ...]]:
    """The settings of a reward that sleeps so long for a batch."""
    if kind == "server":
        with server_that_sleeps(seconds) as url:
            far = "reward.remote.far"
            yield (f"{far}.url={url}", f"{far}.streams=true", "reward.functions.far=1", "reward.functions.ocr=0")
        return
    scorer = folder / "scorer.py"
    scorer.write_text(OF_BATCH.replace("STREAMS", str(kind == "streamed")))
    yield (
        f"reward.reward_functions.sleeps={{path: {scorer}, name: sleeps, seconds: {seconds}}}",
        "reward.functions.ocr=0",
    )


MINIS = 2
"""Mini-batches of a batch."""


def asleep(
    folder: Path,
    machine: Machine,
    kind: str,
    *,
    split: bool,
    unit: float,
    steps: int,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """A run on such a machine: seconds of its steps, without the first, and of their parts.

    Args:
        more: settings besides those of the machine.
    """
    engines = machine.engines if split else machine.turns
    chunk_s = machine.rollout * machine.turns * unit / CHUNKS
    update_s = machine.update * unit * (machine.turns / machine.trainer if split else 1)
    compute_update = DiffusionActor.update

    def build(rollout: Any, model: Any, lora: Any, device: Any, *_: Any) -> RolloutPool:
        own = DiffusersEngine.from_config(rollout, model, lora, device)
        digest_of = own.digest_of
        own.close()
        handles = [SleepingHandle(rollout, lora, f"engine {i}", chunk_s) for i in range(engines)]
        dtype = getattr(torch, rollout.dtype)
        return RolloutPool(handles, digest_of=digest_of, dtype=dtype, micro_batch_size=rollout.micro_batch_size)

    def update(actor: Any, batch: Any, cond: Any, minis: Any, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        found = compute_update(actor, batch, cond, minis, *arguments, **options)
        time.sleep(max(0.0, update_s * len(minis) / MINIS - (time.perf_counter() - begin)))
        return found

    setup.build_engine = build
    DiffusionActor.update = update  # type: ignore[method-assign]
    settings = [
        "data.train_batch_size=4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={4 // MINIS}",
        f"actor_rollout_ref.rollout.n={CHUNKS // 4}",
        "actor_rollout_ref.rollout.micro_batch_size=1",
        f"actor_rollout_ref.rollout.ahead={int(split)}",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=3",
        "actor_rollout_ref.rollout.algo.sde_window_range=[0,2]",
        "actor_rollout_ref.rollout.probe.images=0",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={steps + 1}",
        "data.val_files=null",
        f"trainer.default_local_dir={folder / 'run'}",
        *more,
    ]
    try:
        with slow_reward(folder, kind, machine.reward * unit) as reward:
            return measured(FlowGRPOTrainer(compose("tiny_qwen_image_ocr", [*settings, *reward])).fit())
    finally:
        DiffusionActor.update = compute_update


def measured(folder: RunFolder) -> dict[str, Any]:
    """Wall time of every step but the first, and what it was spent on."""
    rows = folder.rows()[1:]
    ends = [line["stages"][-1][2] for line in folder.timeline_lines()]
    walls = [end - begin for begin, end in itertools.pairwise(ends)]
    found: dict[str, Any] = {"seconds": statistics.median(walls), "steps": walls}
    for name in ("timing_s/rollout", "timing_s/update", "timing_s/reward", *OF_ENGINES):
        if all(name in row for row in rows):
            found[name] = statistics.median(row[name] for row in rows)
    return found


OF_ENGINES = ("timing_s/engine_draw", "timing_s/engine_draw_max", "perf/engines_busy", "perf/trainer_waits")


def of_ahead(args: argparse.Namespace) -> dict[str, Any]:
    """The parts ``ahead``, ``streamed`` and ``server``."""
    kind = args.what
    results: dict[str, Any] = {"unit_s": args.unit, "streams": kind != "ahead", "machines": []}
    for machine in MACHINES:
        if (kind != "ahead" and not machine.reward) or args.only not in machine.name:
            continue
        entry: dict[str, Any] = {**asdict(machine), "load_average": os.getloadavg()}
        for name, split in (("take_turns", False), ("split_ahead", True)):
            with tempfile.TemporaryDirectory() as folder:
                found = asleep(Path(folder), machine, kind, split=split, unit=args.unit, steps=args.steps)
            found["expected"] = args.unit * machine.expected(kind, split=split)
            slower = max(found["timing_s/engine_draw_max"], found["timing_s/update"])
            found["over_slower"] = found["seconds"] / slower
            entry[name] = found
            print(
                f"{machine.name}, {name}: {found['seconds']:.2f} s a step, expected {found['expected']:.2f}, "
                f"{found['over_slower']:.3f} times the slower of rollout and update",
                flush=True,
            )
        results["machines"].append(entry)
    return results


def of_replay(args: argparse.Namespace) -> dict[str, Any]:
    """The part ``replay``."""
    results: dict[str, Any] = {"unit_s": args.unit, "machines": []}
    for machine in REPLAY_MACHINES:
        entry: dict[str, Any] = {**asdict(machine), "load_average": os.getloadavg()}
        for kind, split in (("take_turns", False), ("split_ahead", True)):
            for buffer, (replayed, settings) in BUFFERS.items():
                with tempfile.TemporaryDirectory() as folder:
                    found = asleep(
                        Path(folder), machine, "ahead", split=split, unit=args.unit, steps=args.steps, more=settings
                    )
                working = replace(machine, update=machine.update * (1 + replayed))
                found["expected"] = args.unit * working.expected("ahead", split=split)
                entry.setdefault(kind, {})[buffer] = found
                print(
                    f"{machine.name}, {kind}, {buffer}: {found['seconds']:.2f} s a batch, "
                    f"expected {found['expected']:.2f}",
                    flush=True,
                )
        results["machines"].append(entry)
    return results


# ---------------------------------------------------------------- computing, in a local process

PLACES = {
    "in the trainer's process": (),
    "in a process of its own, in turn": ("placement=process", "devices=[cpu]"),
    "in a process of its own, one batch ahead": ("placement=process", "devices=[cpu]", "ahead=1"),
}


def of_process(args: argparse.Namespace) -> dict[str, Any]:
    """The part ``process``."""
    results: dict[str, Any] = {"threads": args.threads, "places": {name: [] for name in PLACES}}
    # In turn, since what else runs on the machine changes.
    for name, settings in list(PLACES.items()) * args.rounds:
        with tempfile.TemporaryDirectory() as folder:
            config = compose(
                "tiny_qwen_image_ocr",
                [
                    *(f"actor_rollout_ref.rollout.{setting}" for setting in settings),
                    "trainer.val_before_train=false",
                    f"trainer.total_training_steps={args.steps + 1}",
                    "data.val_files=null",
                    f"trainer.default_local_dir={Path(folder) / 'run'}",
                ],
            )
            found = measured(FlowGRPOTrainer(config).fit())
        results["places"][name].append({"load_average": os.getloadavg(), **found})
        print(f"{name}: {found['seconds']:.2f} s a step", flush=True)
    results["median_seconds"] = {
        name: statistics.median(wall for found in runs for wall in found["steps"])
        for name, runs in results["places"].items()
    }
    return results


WHAT = {
    "rewards": of_rewards,
    "ahead": of_ahead,
    "streamed": of_ahead,
    "server": of_ahead,
    "replay": of_replay,
    "process": of_process,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=WHAT, default="rewards")
    parser.add_argument("--seconds", type=float, default=1.0, help="rewards: sleep of a micro-batch")
    parser.add_argument("--unit", type=float, default=8.0, help="ahead: seconds of a unit, which a rollout takes")
    parser.add_argument("--only", default="", help="ahead, streamed, server: machines whose names hold this")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="process: runs of each kind")
    parser.add_argument("--threads", type=int, default=1, help="threads of the trainer, and of each engine's process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {"machine": describe(), **WHAT[args.what](args)}
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
