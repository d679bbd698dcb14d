"""Floating-point operations of a training step by kind, and the time they take at an assumed utilisation.

Two uses of a machine's GPUs compare: all take turns, or engines on some of them draw one batch ahead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flowgrpo_rc.planner.machines import DEVICES, UTILISATION, Gpus, peak_flops
from flowgrpo_rc.planner.memory import RUNTIME, MemoryPlan, fits
from flowgrpo_rc.planner.settings import ROLLOUT, PlannedRun


@dataclass(frozen=True)
class StepFlops:
    """Operations of one training step, over all GPUs; a multiply-add counts as two."""

    rollout: float  # Sampling and decoding all images of a batch
    score: float  # The scoring pass before the update, and rescoring
    update: float
    """Forward and backward of every recorded step, in every epoch and from the replay buffer. The weights are frozen,
    so that a backward costs about what a forward does."""
    recomputed: float
    """Operations that gradient checkpointing repeats in the update; model FLOPs utilisation leaves them out."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    engine: float
    update: float  # The update and its scoring pass
    overlaps: bool = False  # Engines draw while the actor learns

    @property
    def total(self) -> float:
        """Of both, one after the other; of the slower one if they overlap."""
        return max(self.engine, self.update) if self.overlaps else self.engine + self.update


def step_flops(plan: MemoryPlan) -> StepFlops:
    """Operations of one step of the plan's run."""
    run = plan.run
    rollout = run.rollout
    images = run.prompts * rollout.drawn
    forwards = rollout.forwards_per_image(clean=not run.records_steps)
    window = run.rows_per_image
    rows = run.micro_rows(1)
    # Per row, since passes are linear in their rows.
    forward = plan.actor.forward(rows).forward_flops / rows
    decode = plan.actor.decode(1).forward_flops
    drawing = images * (sum(forwards) * forward + decode)
    if rollout.scout.redraw:
        kept = run.prompts * rollout.n
        drawing = images * (rollout.scout_steps * forward + decode) + kept * (sum(forwards) * forward + decode)
    update = plan.actor.update(rows, recompute=plan.recomputes(run), accumulates=False)
    # Of a group only the best and the worst image are compared.
    learned = run.prompts * (2 if run.actor.diffusion_loss.objective.paired else rollout.n)
    times = run.learns_images * learned * window * (run.actor.ppo_epochs + run.replayed) / rows
    return StepFlops(
        rollout=run.draws * drawing,
        score=(run.scored_share * run.prompts * rollout.n + min(run.rescored_images, images)) * window * forward,
        update=times * (update.forward_flops + update.backward_flops),
        recomputed=times * update.recomputed_flops,
    )


def seconds_at_peak(flops: StepFlops, run: PlannedRun, device_name: str) -> float | None:
    """Seconds of the step on one device at its peak, without recomputation: the reference of MFU.

    With engines elsewhere, only the part of the trainer's devices counts.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.

    Returns:
        ``None`` if the device's peak is not known.
    """
    engine = peak_flops(device_name, run.rollout.dtype)
    actor = peak_flops(device_name, run.actor_precision)
    if engine is None or actor is None:
        return None
    # Utilisation is that of the trainer's devices, which do not draw then.
    drawn = 0.0 if run.rollout.is_elsewhere else flops.rollout
    return drawn / engine + (flops.score + flops.update) / actor


def step_time(flops: StepFlops, run: PlannedRun, gpus: Gpus) -> StepTime:
    """Time of a step whose work all GPUs share evenly, at ``UTILISATION`` of their peak; without rewards."""
    device = DEVICES[gpus.device]
    engine = device.peak(run.rollout.dtype) * UTILISATION * gpus.count
    update = device.peak(run.actor_precision) * UTILISATION * gpus.count
    return StepTime(flops.rollout / engine, (flops.score + flops.update + flops.recomputed) / update)


def configured_time(flops: StepFlops, run: PlannedRun, gpus: Gpus) -> StepTime:
    """Time of a step with the engines where the run has them: on the trainer's GPUs, or on some of their own."""
    time = step_time(flops, run, gpus)
    own = run.own_gpus_of_engines(gpus.count)
    return time if not own else StepTime(time.engine * gpus.count / own, time.update, run.rollout.ahead > 0)


@dataclass(frozen=True)
class Split:
    """GPUs for the trainer, a process on each, and GPUs for engines, one on each."""

    trainers: int
    engines: int
    rollout: float  # Seconds in which the engines draw a batch
    learning: float  # Seconds of rewards and update of a batch
    trainer_bytes: int = 0  # Peak of a trainer's GPU
    engine_bytes: int = 0  # Peak of an engine's GPU

    @property
    def total(self) -> float:
        """Seconds of a step, those of the slower side."""
        return max(self.rollout, self.learning)

    @property
    def overrides(self) -> str:
        """Its settings, besides the number of trainer processes."""
        devices = ",".join(f"cuda:{self.trainers + i}" for i in range(self.engines))
        return f"{ROLLOUT}.placement=process '{ROLLOUT}.devices=[{devices}]' {ROLLOUT}.ahead=1"


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


def split_seconds(flops: StepFlops, run: PlannedRun, gpus: Gpus, trainers: int, reward: float = 0.0) -> Split:
    """Both sides of a step that is split, without their memory.

    Each trainer process gets its share of the images from its share of the engines, a micro-batch at a time; the engine
    with most images determines the time.

    Args:
        reward: seconds that the rewards of a batch take when its images are drawn.
    """
    engines = gpus.count - trainers
    images = run.images_of_batch(trainers)
    at_once = run.sampled_at_once(trainers)
    # Engines draw whole micro-batches, so the last round may be partly empty.
    rounds = -(-images // (at_once * (engines // trainers)))
    most = min(images, rounds * at_once)
    alone = step_time(flops, run, Gpus(1, gpus.gigabytes)).engine
    learning = step_time(flops, run, Gpus(trainers, gpus.gigabytes)).update
    return Split(trainers, engines, alone * most / (run.prompts * run.rollout.drawn), reward + learning)


def best_split(
    plan: MemoryPlan, flops: StepFlops, gpus: Gpus, trainers: Iterable[int], reward: float = 0.0
) -> Split | None:
    """The fastest split that fits; ``None`` if none does.

    Args:
        flops: of a step of the plan's run.
        trainers: numbers of trainer processes that the run can have. Each needs an engine.
        reward: as for ``split_seconds``.
    """
    fsdp = plan.run.actor.fsdp_config
    found = []
    for count in trainers:
        shares_evenly = not fsdp.shard or (count > 1 and (fsdp.fsdp_size == -1 or count % fsdp.fsdp_size == 0))
        # Every trainer process needs an engine of its own to draw for it.
        if not 1 <= count <= gpus.count - count or not shares_evenly:
            continue
        run = one_ahead(plan.run, count, gpus.count - count)
        split = replace(
            split_seconds(flops, run, gpus, count, reward),
            trainer_bytes=plan.memory(run, count).total,
            engine_bytes=plan.engine_alone(run, count) + RUNTIME,
        )
        if fits(max(split.trainer_bytes, split.engine_bytes), gpus.bytes):
            found.append(split)
    return min(found, key=lambda split: (split.total, split.engines), default=None)
