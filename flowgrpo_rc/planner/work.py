"""Floating-point operations of a training step by kind, and the time they take at an assumed utilisation."""

from dataclasses import dataclass

from flowgrpo_rc.planner.machines import DEVICES, UTILISATION, Gpus, peak_flops
from flowgrpo_rc.planner.memory import MemoryPlan
from flowgrpo_rc.planner.settings import PlannedRun


@dataclass(frozen=True)
class StepFlops:
    """Operations of one training step, over all GPUs; a multiply-add counts as two."""

    rollout: float
    """Sampling and decoding all images of a batch."""
    score: float
    """The scoring pass before the update, and rescoring."""
    update: float
    """Forward and backward of every recorded step, in every epoch. The weights are frozen, so that a backward costs
    about what a forward does."""
    recomputed: float
    """Operations that gradient checkpointing repeats in the update; model FLOPs utilisation leaves them out."""

    @property
    def total(self) -> float:
        """All of it, recomputation included."""
        return self.rollout + self.score + self.update + self.recomputed


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    engine: float
    update: float
    """The update and its scoring pass."""

    @property
    def total(self) -> float:
        """Of both, one after the other."""
        return self.engine + self.update


def step_flops(plan: MemoryPlan) -> StepFlops:
    """Operations of one step of the plan's run."""
    run = plan.run
    rollout = run.rollout
    images = run.prompts * rollout.n
    window = run.steps_of_window
    rows = run.micro_rows(1)
    # Per row, since passes are linear in their rows.
    forward = plan.actor.forward(rows).forward_flops / rows
    decode = plan.actor.decode(1).forward_flops
    update = plan.actor.update(rows, recompute=plan.recomputes(run), accumulates=False)
    times = images * window * run.actor.ppo_epochs / rows
    return StepFlops(
        rollout=images * (rollout.pipeline.num_inference_steps * forward + decode),
        score=(run.scored_share * images + min(rollout.probe.images, images)) * window * forward,
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
    return StepTime(flops.rollout / engine, (flops.total - flops.rollout) / update)
