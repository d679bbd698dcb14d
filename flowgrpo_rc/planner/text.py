"""A plan in words and tables, for the terminal."""

from collections.abc import Sequence
from copy import copy

from flowgrpo_rc.planner.advice import Change, advise
from flowgrpo_rc.planner.machines import DEVICES, GIB, UTILISATION, Gpus
from flowgrpo_rc.planner.memory import MARGIN, RUNTIME, Memory, MemoryPlan
from flowgrpo_rc.planner.split import best_split, taking_turns, turns_seconds
from flowgrpo_rc.planner.work import StepFlops, step_flops, step_time

_WIDTH = 46
# Share of a step's time by which a split must be faster to count as faster: plans are no more exact.
NOTABLE = 0.01


def describe(plan: MemoryPlan, gpus: Gpus, trainers: Sequence[int] = (), reward: float = 0.0) -> str:
    """Describe a run on these GPUs: memory by component, verdict, changes, time, and a split of the GPUs.

    Args:
        trainers: numbers of trainer processes that the run can have on some of the GPUs.
        reward: seconds that the rewards of a batch take when its images are drawn.
    """
    memory = plan.memory(plan.run, gpus.count)
    changes = [] if memory.fits(gpus.bytes) else advise(plan, gpus)
    lines = [*_heading(plan), "", f"{gpus!s:{_WIDTH}} GiB a GPU", *_components(plan, memory), ""]
    lines += [_verdict(memory, gpus), *_micro_batch(plan, gpus), *_changes(changes, gpus, memory), ""]
    changed = plan
    if changes:
        # The split is compared for the run that fits, not for the one that was given.
        changed = copy(changes[-1].plan)
        changed.run = changes[-1].run
    return "\n".join([*lines, *_time(plan, gpus), *_split(changed, gpus, trainers, reward)])


def table(plan: MemoryPlan, tried: Sequence[Gpus]) -> str:
    """A table of GPUs: needed memory, fit, and the largest micro-batch in rows."""
    counts = sorted({gpus.count for gpus in tried})
    sizes = sorted({gpus.gigabytes for gpus in tried})
    rows = [*_heading(plan), "", "GiB a GPU, whether it fits, and the largest micro-batch in rows that does:", ""]
    rows.append(f"{'GPUs':>6} {'needs':>8}" + "".join(f"{f'{size:g} GB':>14}" for size in sizes))
    for count in counts:
        memory = plan.memory(plan.run, count)
        cells = (_cell(plan, memory, Gpus(count, size)) for size in sizes)
        rows.append(f"{count:>6} {memory.total / GIB:>8.1f}" + "".join(f"{cell:>14}" for cell in cells))
    flops = step_flops(plan)
    return "\n".join([*rows, "", *_work(plan, flops)])


def _cell(plan: MemoryPlan, memory: Memory, gpus: Gpus) -> str:
    largest = plan.largest_micro_batch(plan.run, gpus)
    if memory.fits(gpus.bytes):
        return f"fits ({largest})"
    return f"no ({largest})" if largest else "no"


def _heading(plan: MemoryPlan) -> list[str]:
    run = plan.run
    kinds = ", ".join(f"{number} {name}" for name, number in plan.actor.kinds)
    asked = run.rollout.pipeline
    recompute = "recomputed (gradient checkpointing)" if plan.recomputes(run) else "kept"
    return [
        f"{run.model.path}: transformer of {plan.sizes.parameters:,} parameters ({kinds}), {run.model.dtype}",
        f"LoRA of rank {run.model.lora_rank}: {plan.sizes.lora_parameters:,} parameters, {run.model.lora_dtype}",
        f"Images of {asked.width}x{asked.height}, {asked.num_inference_steps} steps, prompts of up to "
        f"{asked.max_sequence_length} tokens, {'guidance' if run.guided else 'no guidance'}; engine "
        f"{run.rollout.name}, {run.rollout.dtype}",
        f"Micro-batch: {run.micro_rows(1)} rows, steps of an image's window of {run.steps_of_window}; activations are "
        f"{recompute}",
    ]


def _components(plan: MemoryPlan, memory: Memory) -> list[str]:
    lines = [_line(name, size) for name, size in memory.resident.items()]
    lines.append(_line(memory.largest_stage, memory.stages[memory.largest_stage]))
    if memory.engine:
        lines.append(_line(f"{plan.run.rollout.name}'s process", memory.engine))
    lines += [_line("context, workspaces, fragmentation (assumed)", RUNTIME), _line("total", memory.total)]
    others = [f"{name} {size / GIB:.2f}" for name, size in memory.stages.items() if name != memory.largest_stage]
    lines.append(
        f"  At other times: {', '.join(others)}; text encoder, before training, {_gib(plan.sizes.text_encoders)}"
    )
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _line(name: str, size: int) -> str:
    return f"  {name:{_WIDTH}}{_gib(size):>8}"


def _verdict(memory: Memory, gpus: Gpus) -> str:
    usable = (1 - MARGIN) * gpus.gigabytes
    verdict = "fits" if memory.fits(gpus.bytes) else "does NOT fit"
    return (
        f"Verdict: {verdict} {gpus}: {memory.total / GIB:.1f} of {usable:.1f} GiB "
        f"({gpus.gigabytes:g} less a margin of {MARGIN:.0%})"
    )


def _micro_batch(plan: MemoryPlan, gpus: Gpus) -> list[str]:
    largest = plan.largest_micro_batch(plan.run, gpus)
    # Then weights alone are too many, and the changes below have to help.
    if not largest:
        return ["No micro-batch fits, not even one row"]
    return [f"Largest micro-batch that fits: ppo_micro_batch_rows={largest}"]


def _changes(changes: Sequence[Change], gpus: Gpus, memory: Memory) -> list[str]:
    if memory.fits(gpus.bytes):
        return []
    lines = ["What to change, cheapest first, each on top of those before it:"]
    lines += [f"  {c.override}: {c.memory.total / GIB:.1f} GiB ({c.why})" for c in changes]
    return [*lines, _remaining(changes, gpus)]


def _remaining(changes: Sequence[Change], gpus: Gpus) -> str:
    if changes and changes[-1].memory.fits(gpus.bytes):
        return "  With these it fits"
    return "  Still too much: take more GPUs, or larger ones"


def _time(plan: MemoryPlan, gpus: Gpus) -> list[str]:
    flops = step_flops(plan)
    run = plan.run
    time = step_time(flops, run, gpus)
    device = DEVICES[gpus.device]
    engine = device.peak(run.rollout.dtype) / 1e12
    update = device.peak(run.actor_precision) / 1e12
    return [
        *_work(plan, flops),
        f"Time of a step, {UTILISATION:.0%} of {gpus.device}'s peak assumed: engine {time.engine:.0f} s ({engine:.0f} "
        f"TFLOP/s in {run.rollout.dtype}), update {time.update:.0f} s ({update:.0f} in {run.actor_precision}), total "
        f"{time.total:.0f} s; rewards and waiting come on top",
    ]


def _split(plan: MemoryPlan, gpus: Gpus, trainers: Sequence[int], reward: float) -> list[str]:
    """Compare taking turns on all GPUs with engines one batch ahead on some of them; nothing for one GPU."""
    if gpus.count < 2:
        return []
    flops = step_flops(plan)
    run = taking_turns(plan.run)
    turns = turns_seconds(flops, run, gpus, reward)
    may_take_turns = plan.memory(run, gpus.count).fits(gpus.bytes)
    split = best_split(plan, flops, gpus, trainers, reward)
    counted = f"rewards of {reward:g} s counted" if reward else "rewards not counted, see --reward-seconds"
    if split is None:
        return [f"Turns or split: no split of the {gpus.count} GPUs into trainer and engines fits"]
    sides = (
        f"{split.trainers} for the trainer ({_gib(split.trainer_bytes)} GiB, {split.learning:.1f} s) and "
        f"{split.engines} for engines one batch ahead ({_gib(split.engine_bytes)} GiB, {split.rollout:.1f} s)"
    )
    settings = f"{split.trainers} trainer process(es), {split.overrides}"
    if not may_take_turns:
        return [
            f"Turns or split: taking turns does not fit; {sides} do: {split.total:.1f} s a step ({counted}): {settings}"
        ]
    # Plans err by more than the last digit, so a small gain is none.
    if split.total < (1 - NOTABLE) * turns:
        return [
            f"Turns or split: a split takes {1 - split.total / turns:.0%} less time than taking turns ({turns:.1f} s a "
            f"step; {counted}): {sides}: {settings}"
        ]
    return [
        f"Turns or split: taking turns is no slower: {turns:.1f} s a step, {split.total:.1f} s with {sides} ({counted})"
    ]


def _work(plan: MemoryPlan, flops: StepFlops) -> list[str]:
    images = plan.run.prompts * plan.run.rollout.n
    return [
        f"PFLOP of a step of {images} images: rollout {flops.rollout / 1e15:.1f}, score {flops.score / 1e15:.1f}, "
        f"update {flops.update / 1e15:.1f}, recomputed {flops.recomputed / 1e15:.1f}"
    ]
