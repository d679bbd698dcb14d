"""Compare two uses of a machine's GPUs: all take turns, or engines on some of them draw one batch ahead."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flowgrpo_rc.planner.machines import Gpus
from flowgrpo_rc.planner.memory import RUNTIME, MemoryPlan, fits
from flowgrpo_rc.planner.settings import ROLLOUT, PlannedRun
from flowgrpo_rc.planner.work import StepFlops, step_time


@dataclass(frozen=True)
class Split:
    """GPUs for the trainer, a process on each, and GPUs for engines, one on each."""

    trainers: int
    engines: int
    rollout: float
    """Seconds in which the engines draw a batch."""
    learning: float
    """Seconds of rewards and update of a batch."""
    trainer_bytes: int = 0
    """Peak of a trainer's GPU."""
    engine_bytes: int = 0
    """Peak of an engine's GPU."""

    @property
    def total(self) -> float:
        """Seconds of a step, those of the slower side."""
        return max(self.rollout, self.learning)

    @property
    def overrides(self) -> str:
        """Its settings, besides the number of trainer processes."""
        devices = ",".join(f"cuda:{self.trainers + i}" for i in range(self.engines))
        return f"{ROLLOUT}.placement=process '{ROLLOUT}.devices=[{devices}]' {ROLLOUT}.ahead=1"

    def fits(self, gpus: Gpus) -> bool:
        """Return true if both sides fit GPUs of this size."""
        return fits(self.trainer_bytes, gpus.bytes) and fits(self.engine_bytes, gpus.bytes)


def taking_turns(run: PlannedRun) -> PlannedRun:
    """The run with its engine beside the actor on every GPU."""
    return run.with_rollout(placement="trainer", devices=None, engines=1, ahead=0)


def one_ahead(run: PlannedRun, trainers: int, engines: int) -> PlannedRun:
    """The run with engines on the GPUs after the trainer's."""
    devices = [f"cuda:{trainers + i}" for i in range(engines)]
    # An engine with a GPU to itself has no reason to sleep.
    awake = replace(run.rollout.vllm_omni, sleep=False)
    placed = {"placement": "process", "devices": devices, "engines": 1, "ahead": 1}
    return run.with_rollout(**placed, gather_weights=False, vllm_omni=awake)


def turns_seconds(flops: StepFlops, run: PlannedRun, gpus: Gpus, reward: float = 0.0) -> float:
    """Seconds of a step in which all GPUs draw, wait for the rewards, and learn.

    Args:
        reward: seconds that the rewards of a batch take when its images are drawn.
    """
    return step_time(flops, run, gpus).total + reward


def split_seconds(flops: StepFlops, run: PlannedRun, gpus: Gpus, trainers: int, reward: float = 0.0) -> Split:
    """Both sides of a step that is split, without their memory.

    Each trainer process gets its share of the images from its share of the engines, a micro-batch at a time; the engine
    with most images determines the time.
    """
    engines = gpus.count - trainers
    images = run.images_of_batch(trainers)
    at_once = run.sampled_at_once(trainers)
    of_each = engines // trainers
    # Engines draw whole micro-batches, so the last round may be partly empty.
    rounds = -(-images // (at_once * of_each))
    most = min(images, rounds * at_once)
    one = Gpus(1, gpus.gigabytes)
    alone = step_time(flops, run, one).engine
    learning = step_time(flops, run, Gpus(trainers, gpus.gigabytes)).update
    return Split(trainers, engines, alone * most / (run.prompts * run.rollout.n), reward + learning)


def best_split(
    plan: MemoryPlan, flops: StepFlops, gpus: Gpus, trainers: Iterable[int], reward: float = 0.0
) -> Split | None:
    """The fastest split that fits; ``None`` if none does.

    Args:
        flops: of a step of the plan's run.
        trainers: numbers of trainer processes that the run can have. Each needs an engine.
        reward: as for ``turns_seconds``.
    """
    found = []
    for count in trainers:
        # Every trainer process needs an engine of its own to draw for it.
        if not 1 <= count <= gpus.count - count or not _shares_evenly(plan.run, count):
            continue
        run = one_ahead(plan.run, count, gpus.count - count)
        split = replace(
            split_seconds(flops, run, gpus, count, reward),
            trainer_bytes=plan.memory(run, count).total,
            engine_bytes=plan.engine_alone(run, count) + RUNTIME,
        )
        if split.fits(gpus):
            found.append(split)
    return min(found, key=lambda split: (split.total, split.engines), default=None)


def _shares_evenly(run: PlannedRun, trainers: int) -> bool:
    """Return true if so many processes can share the weights as configured."""
    fsdp = run.actor.fsdp_config
    return not fsdp.shard or (trainers > 1 and (fsdp.fsdp_size == -1 or trainers % fsdp.fsdp_size == 0))
