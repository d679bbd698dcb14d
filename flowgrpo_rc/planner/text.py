"""A plan in words and tables, for the terminal."""

from collections.abc import Sequence

from flowgrpo_rc.models.config import AUTO
from flowgrpo_rc.planner.advice import advise
from flowgrpo_rc.planner.machines import DEVICES, GIB, UTILISATION, Gpus
from flowgrpo_rc.planner.memory import MARGIN, RUNTIME, TEXT_ENCODERS, Memory, MemoryPlan
from flowgrpo_rc.planner.work import best_split, configured_time, step_flops, step_time, taking_turns
from flowgrpo_rc.planner.writing import REQUEST

_WIDTH = 46
# Share of a step's time by which a split must be faster to count as faster: plans are no more exact.
NOTABLE = 0.01


def describe(plan: MemoryPlan, gpus: Gpus, trainers: Sequence[int] = (), reward: float = 0.0) -> str:
    """Describe a run on these GPUs: memory by component, verdict, changes, time, and a split of the GPUs.

    Args:
        trainers: numbers of trainer processes that the run can have on some of the GPUs.
        reward: seconds that the rewards of a batch take when its images are drawn.
    """
    plan = plan.settled(gpus)
    memory = plan.memory(plan.run, gpus.count)
    lines = [*_heading(plan), "", f"{gpus!s:{_WIDTH}} GiB a GPU", *_components(plan, memory), ""]
    fits = memory.fits(gpus.bytes)
    lines.append(
        f"Verdict: {'fits' if fits else 'does NOT fit'} {gpus}: {memory.total / GIB:.1f} of "
        f"{(1 - MARGIN) * gpus.gigabytes:.1f} GiB ({gpus.gigabytes:g} less a margin of {MARGIN:.0%})"
    )
    largest = plan.largest_micro_batch(plan.run, gpus)
    if largest and plan.run.learns_images:
        lines.append(f"Largest micro-batch that fits: ppo_micro_batch_rows={largest}")
    elif not largest:
        # Then weights alone are too many, and the changes below have to help.
        lines.append("No micro-batch fits, not even one row")
    changed = plan
    if not fits:
        changes = advise(plan, gpus)
        lines.append("What to change, cheapest first, each on top of those before it:")
        lines += [f"  {c.override}: {c.memory.total / GIB:.1f} GiB ({c.why})" for c in changes]
        if changes and changes[-1].memory.fits(gpus.bytes):
            lines.append("  With these it fits")
        else:
            lines.append("  Still too much: take more GPUs, or larger ones")
        # The split is compared for the run that fits, not for the one that was given.
        changed = changes[-1].plan if changes else plan
    times = [_time(plan, gpus, "as configured")]
    if changed is not plan:
        times.append(_time(changed, gpus, "after the changes"))
    return "\n".join([*lines, "", _work(plan), *times, *_split(changed, gpus, trainers, reward)])


def table(plan: MemoryPlan, tried: Sequence[Gpus]) -> str:
    """A table of GPUs: needed memory, fit, and the largest micro-batch in rows."""
    sizes = sorted({gpus.gigabytes for gpus in tried})
    rows = [*_heading(plan), "", "GiB a GPU, whether it fits, and the largest micro-batch in rows that does:", ""]
    rows.append(f"{'GPUs':>6} {'needs':>8}" + "".join(f"{f'{size:g} GB':>14}" for size in sizes))
    for count in sorted({gpus.count for gpus in tried}):
        row = f"{count:>6}"
        for size in sizes:
            gpus = Gpus(count, size)
            settled = plan.settled(gpus)
            memory = settled.memory(settled.run, count)
            if size == sizes[0]:
                row += f" {memory.total / GIB:>8.1f}"
            largest = settled.largest_micro_batch(settled.run, gpus)
            fits = "fits" if memory.fits(gpus.bytes) else "no"
            row += f"{f'{fits} ({largest})' if largest else 'no':>14}"
        rows.append(row)
    return "\n".join([*rows, "", _work(plan)])


def _heading(plan: MemoryPlan) -> list[str]:
    run = plan.run
    kinds = ", ".join(f"{len(kind.blocks)} {kind.name}" for kind in plan.actor.kinds)
    asked = run.rollout.pipeline
    recompute = "recomputed (gradient checkpointing)" if plan.recomputes(run) else "kept"
    if run.model.enable_gradient_checkpointing == AUTO:
        recompute = "recomputed (gradient checkpointing) where they do not fit"
    return [
        f"{run.model.path}: transformer of {plan.sizes.parameters:,} parameters ({kinds}), {run.model.dtype}"
        f"{'' if run.model.quantization is None else f', blocks held in {run.model.quantization}'}",
        f"LoRA of rank {run.model.lora_rank}: {plan.sizes.lora_parameters:,} parameters, {run.model.lora_dtype}, "
        f"products in {run.model.lora_computes_in}",
        f"Images of {asked.width}x{asked.height}, "
        f"{run.rollout.forwards_in_words(clean=not run.records_steps)}, prompts of up to "
        f"{asked.max_sequence_length} tokens, {'guidance' if asked.true_cfg_scale > 1 else 'no guidance'}; engine "
        f"{run.rollout.name}, {run.rollout.dtype}",
        f"Micro-batch: {run.micro_rows(1)} rows, {run.rows_per_image} an image; activations are {recompute}"
        if run.learns_images
        else "The image model does not learn",
        *_writer(plan),
    ]


def _writer(plan: MemoryPlan) -> list[str]:
    if plan.writer is None:
        return []
    config = plan.writer.config
    return [
        f"Prompt writer {config.path}: {plan.writer.parameters:,} parameters, {config.dtype}, engine "
        f"{config.engine.dtype}; requests of {REQUEST} tokens assumed, rewrites of up to {config.max_new_tokens}; its "
        "time is not counted"
    ]


def _components(plan: MemoryPlan, memory: Memory) -> list[str]:
    """The parts of the peak, and stages that need less."""
    peak = max(memory.stages, key=lambda name: memory.stages[name])
    parts = memory.resident | {peak: memory.stages[peak]}
    if memory.engine:
        parts[f"{plan.run.rollout.name}'s process"] = memory.engine
    parts |= {"context, workspaces, fragmentation (assumed)": RUNTIME, "total": memory.total}
    others = dict(memory.stages)
    del others[peak]
    stages = [f"{name} {size / GIB:.2f}" for name, size in others.items()]
    lines = [f"  {name:{_WIDTH}}{size / GIB:>8.2f}" for name, size in parts.items()]
    encoder = f"; text encoder, before training, {plan.sizes.text_encoders / GIB:.2f}"
    return [*lines, f"  At other times: {', '.join(stages)}{'' if TEXT_ENCODERS in memory.resident else encoder}"]


def _work(plan: MemoryPlan) -> str:
    flops = step_flops(plan)
    images = plan.run.prompts * plan.run.rollout.drawn
    return (
        f"PFLOP of a step of {images} images: rollout {flops.rollout / 1e15:.1f}, score "
        f"{flops.score / 1e15:.1f}, update {flops.update / 1e15:.1f}, recomputed {flops.recomputed / 1e15:.1f}"
    )


def _time(plan: MemoryPlan, gpus: Gpus, of: str) -> str:
    run = plan.run
    time = configured_time(step_flops(plan), run, gpus)
    own = run.own_gpus_of_engines(gpus.count)
    where = f" on {own:g} GPU(s) of its own" if own else ""
    total = f"{'both at once' if time.overlaps else 'total'} {time.total:.0f} s"
    device = DEVICES[gpus.device]
    engine = device.peak(run.rollout.dtype) / 1e12
    update = device.peak(run.actor_precision) / 1e12
    return (
        f"Time of a step {of}, {UTILISATION:.0%} of {gpus.device}'s peak assumed: engine {time.engine:.0f} s{where} "
        f"({engine:.0f} TFLOP/s in {run.rollout.dtype}), update {time.update:.0f} s "
        f"({update:.0f} in {run.actor_precision}), {total}; rewards and waiting come on top"
    )


def _split(plan: MemoryPlan, gpus: Gpus, trainers: Sequence[int], reward: float) -> list[str]:
    """Compare taking turns on all GPUs with engines one batch ahead on some of them; nothing for one GPU, nor for
    scouts that are drawn again, nor with a prompt writer, whose time is not known."""
    if gpus.count < 2 or plan.run.rollout.scout.redraw or plan.writer is not None:
        return []
    flops = step_flops(plan)
    split = best_split(plan, flops, gpus, trainers, reward)
    if split is None:
        return [f"Turns or split: no split of the {gpus.count} GPUs into trainer and engines fits"]
    run = taking_turns(plan.run)
    turns = step_time(flops, run, gpus).total + reward
    counted = f"rewards of {reward:g} s counted" if reward else "rewards not counted, see --reward-seconds"
    sides = (
        f"{split.trainers} for the trainer ({split.trainer_bytes / GIB:.2f} GiB, {split.learning:.1f} s) and "
        f"{split.engines} for engines one batch ahead ({split.engine_bytes / GIB:.2f} GiB, {split.rollout:.1f} s)"
    )
    settings = f"{split.trainers} trainer process(es), {split.overrides}"
    if not plan.memory(run, gpus.count).fits(gpus.bytes):
        says = f"taking turns does not fit; {sides} do: {split.total:.1f} s a step ({counted}): {settings}"
    # Plans err by more than the last digit, so a small gain is none.
    elif split.total < (1 - NOTABLE) * turns:
        says = (
            f"a split takes {1 - split.total / turns:.0%} less time than taking turns ({turns:.1f} s a step; "
            f"{counted}): {sides}: {settings}"
        )
    else:
        says = f"taking turns is no slower: {turns:.1f} s a step, {split.total:.1f} s with {sides} ({counted})"
    return [f"Turns or split: {says}"]
