"""The cost of engines elsewhere: CPU seconds and bytes of a rollout, beside the engine in the trainer's process.

    python benchmarks/pool_overhead.py --out benchmarks/results/pool_overhead.json

The tiny Qwen-Image model on the CPU, a thread a process. Every placement draws the same rollouts in the same chunks,
which are checked to be the same bits, so that the engines compute the same and what is left is the cost of the
placement. CPU seconds are user and system time of the trainer and of all processes that it has started: engines, and
with Ray its daemons. Placements take turns, rollout by rollout, and the median is kept, so that other work on the
machine falls on all of them; wall times are not compared, since they are about cores.
Bytes are of the pipes to local engines; Ray sends its own way.
``cpu_s_per_gb`` is what sending a gigabyte to one engine costs, measured with a tensor that no layer takes, so that the
engine reads it and refuses it.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import describe

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, load_model
from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state, attach_lora
from flowgrpo_rc.rollout import RolloutConfig, RolloutPool, RolloutRequest
from flowgrpo_rc.rollout.build import build_engine_alone, digest_rule
from flowgrpo_rc.rollout.config import RayConfig
from flowgrpo_rc.rollout.process import ProcessHandle
from flowgrpo_rc.rollout.ray.handle import ray_handles

MODEL = ModelConfig(path="asset:tiny_qwen_image", lora_rank=64, lora_alpha=64)
PROMPTS = 12
EACH = 8
"""Images of a prompt."""
TICK = os.sysconf("SC_CLK_TCK")
IDLE_S = 10.0
BULK_BYTES = 400_000_000


class InTrainer:
    """The engine of the trainer's process as a handle: what the pool costs by itself."""

    name = "in process"

    def __init__(self, rollout: RolloutConfig) -> None:
        self._host = build_engine_alone(rollout, MODEL, "cpu")
        self.start = lambda: None
        self.sync = self._host.sync
        self.generate = self._host.generate
        self.close = self._host.close


@dataclass
class Placement:
    """An engine or pool, and what it took."""

    name: str
    engine: Any
    handles: list[Any]
    """Of a pool."""
    roots: list[int]
    """The processes that the trainer has started for it."""
    start_s: float
    """CPU seconds until it was there, of all its processes."""
    measured: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """For each rollout."""

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """CPU seconds of the block as ``what``: of the trainer, and with its engines."""
        engines, own = tree_seconds(self.roots), time.process_time()
        yield
        trainer = time.process_time() - own
        self.measured[f"{what}_trainer_cpu_s"].append(trainer)
        self.measured[f"{what}_cpu_s"].append(trainer + tree_seconds(self.roots) - engines)


class Pipes:
    """Bytes that went through this process's pipes since ``read``."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        send, receive = Connection.send_bytes, Connection.recv_bytes

        def counting_send(connection: Any, data: bytes, *more: Any) -> None:
            self.sent += len(data)
            send(connection, data, *more)

        def counting_receive(connection: Any, *more: Any) -> bytes:
            data = receive(connection, *more)
            self.received += len(data)
            return data

        Connection.send_bytes, Connection.recv_bytes = counting_send, counting_receive  # type: ignore[method-assign]

    def read(self) -> tuple[int, int]:
        """Sent and received; starts anew."""
        found = (self.sent, self.received)
        self.sent = self.received = 0
        return found


def children() -> dict[int, list[int]]:
    """All processes of the machine by their parents."""
    found: dict[int, list[int]] = defaultdict(list)
    for pid, values in every_stat():
        found[int(values[1])].append(pid)
    return found


def every_stat() -> Iterator[tuple[int, list[str]]]:
    """``/proc/PID/stat`` of every process, behind its name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()


def tree_seconds(roots: list[int]) -> float:
    """User and system time of these processes and of all that they have started, the ended ones too."""
    below = children()
    times = {pid: sum(map(int, values[11:15])) / TICK for pid, values in every_stat()}
    members = list(roots)
    for known in members:
        members += below[known]
    return sum(times.get(pid, 0.0) for pid in members)


def make_request(model: Any, seed: int) -> RolloutRequest:
    """Images as a run of the tiny model draws them, twice as many steps stochastic."""
    encoder = PromptEncoder(model, 64)
    texts = [f'the text "{number}"' for number in range(10, 10 + PROMPTS)]
    count = PROMPTS * EACH
    return RolloutRequest(
        conditioning=Conditioning(encoder(texts), None, 1.0, None, 32, 32),
        prompt_index=torch.arange(PROMPTS).repeat_interleave(EACH),
        num_inference_steps=6,
        seeds=[1000 * seed + row for row in range(count)],
        window_starts=torch.zeros(count, dtype=torch.long),
        window_size=2,
        noise_level=0.7,
    )


def make_state(model: Any) -> dict[str, torch.Tensor]:
    """An adapter as it is after some training."""
    attach_lora(model.transformer, model, MODEL, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    own = adapter_state(model.transformer)
    return {name: 0.05 * torch.randn(value.shape, generator=generator) for name, value in own.items()}


def placements(rollout: RolloutConfig, stack: ExitStack) -> Iterator[Placement]:
    """Each of them, started; closed with ``stack``."""

    made: list[Any] = []

    def pool(handles: list[Any]) -> RolloutPool:
        made[:] = handles
        return RolloutPool(
            handles,
            digest_of=digest_rule(rollout, MODEL),
            dtype=getattr(torch, rollout.dtype),
            micro_batch_size=rollout.micro_batch_size,
        )

    def processes(engines: int) -> RolloutPool:
        return pool([ProcessHandle(rollout, MODEL, "cpu", number) for number in range(engines)])

    def on_ray(engines: int) -> RolloutPool:
        ray = RayConfig(num_gpus=0.0, num_cpus=0.5)
        return pool(ray_handles(replace(rollout, placement="ray", engines=engines, ray=ray), MODEL, "cpu"))

    makers: dict[str, Callable[[], Any]] = {
        "in process": lambda: build_engine_alone(rollout, MODEL, "cpu"),
        "pool, in process": lambda: pool([InTrainer(rollout)]),
        "pool, 1 process": lambda: processes(1),
        "pool, 2 processes": lambda: processes(2),
        "pool, 1 on Ray": lambda: on_ray(1),
        "pool, 2 on Ray": lambda: on_ray(2),
    }
    for name, make in makers.items():
        before = set(children()[os.getpid()])
        own = time.process_time()
        engine = make()
        stack.callback(engine.close)
        roots = sorted(set(children()[os.getpid()]) - before)
        yield Placement(name, engine, list(made), roots, time.process_time() - own + tree_seconds(roots))


def draw(one: Placement, pipes: Pipes, state: dict[str, torch.Tensor], version: int, request: RolloutRequest) -> Any:
    """A push and a rollout, measured."""
    pipes.read()
    with one.measure("adapter"):
        one.engine.sync(state, version)
    one.measured["adapter_bytes"].append(pipes.read()[0])
    with one.measure("rollout"):
        answer = one.engine.generate(request)
    asked, answered = pipes.read()
    one.measured["request_bytes"].append(asked)
    one.measured["answer_bytes"].append(answered)
    return answer


def cpu_per_gb(one: Placement) -> float:
    """CPU seconds for a gigabyte on its way to one engine; 0 where nothing is sent."""
    if not one.roots:
        return 0.0
    bulk = {"bulk": torch.zeros(BULK_BYTES // 2, dtype=torch.bfloat16)}
    with one.measure("bulk"), suppress(AdapterMismatchError):
        one.handles[0].sync(bulk, 0)
    one.measured.pop("bulk_trainer_cpu_s")
    return one.measured.pop("bulk_cpu_s")[0] * 1e9 / BULK_BYTES


def check_same(answer: Any, other: Any) -> None:
    """Raise where two answers differ in a bit."""
    same = torch.equal(answer.images, other.images)
    same = same and all(torch.equal(answer.batch[key], value) for key, value in other.batch.items())
    if not same:
        raise SystemExit("two placements drew different images: nothing to compare")


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown: a row a placement."""
    columns = ("rollout_cpu_s", "rollout_trainer_cpu_s", "adapter_cpu_s", "request_bytes", "answer_bytes")
    names = (*columns, "adapter_bytes", "idle_cpu_s_per_s", "start_cpu_s", "cpu_s_per_gb")
    lines = [f"| placement | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    for name, values in found.items():
        lines.append(f"| {name} | {' | '.join(f'{values[column]:.4g}' for column in names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rollout = RolloutConfig(dtype="bfloat16", micro_batch_size=16)
    model = load_model(MODEL.path)
    state = make_state(model)
    requests = [make_request(model, number) for number in range(args.rollouts + 1)]
    pipes = Pipes()
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        every = list(placements(rollout, stack))
        for number, request in enumerate(requests):
            changed = {name: value * (1 + 0.01 * number) for name, value in state.items()}
            answers = [draw(one, pipes, changed, number, request) for one in every]
            for answer in answers[1:]:
                check_same(answer, answers[0])
            print(f"rollout {number} of {args.rollouts}", flush=True)
        for one in every:
            per_gb = cpu_per_gb(one)
            values = {
                name: statistics.median(series[1:]) for name, series in one.measured.items()
            }  # the first warms up
            before = tree_seconds(one.roots)
            time.sleep(IDLE_S)
            idle = (tree_seconds(one.roots) - before) / IDLE_S
            found[one.name] = {**values, "idle_cpu_s_per_s": idle, "start_cpu_s": one.start_s, "cpu_s_per_gb": per_gb}
    print(table(found))
    if args.out:
        settings = {"images": PROMPTS * EACH, "chunk": rollout.micro_batch_size, "rollouts": args.rollouts}
        args.out.write_text(json.dumps({"machine": describe(), **settings, "placements": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
