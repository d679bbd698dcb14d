"""Check before a run that it fits the memory of its GPUs, by the planner."""

import warnings
from dataclasses import replace

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.sharding import processes_on_node
from flowgrpo_rc.planner.machines import GIB, Gpus
from flowgrpo_rc.planner.memory import MemoryPlan
from flowgrpo_rc.planner.pipeline import PlanError
from flowgrpo_rc.planner.settings import ACTOR, PlannedRun
from flowgrpo_rc.rollout.engines import EMULATED
from flowgrpo_rc.trainer.config import FlowGRPOConfig


def planned_run(config: FlowGRPOConfig) -> PlannedRun:
    """The settings that memory and time depend on."""
    parts = config.actor_rollout_ref
    writer = config.algorithm.prompt_writer
    replay = config.algorithm.replay
    # Late steps of a window may be cut.
    share = 1.0 if replay.steps is None else min(1.0, replay.steps / parts.rollout.window.size)
    return PlannedRun(
        model=parts.model,
        actor=replace(parts.actor, ppo_mini_batch_size=parts.actor.ppo_mini_batch_size * config.rewrites),
        rollout=parts.rollout,
        prompts=config.prompts,
        scored_share=0.0 if config.rollout_correction.bypass_mode or writer.learns_alone else config.scored_share,
        replayed=share * replay.per_new(parts.rollout.staleness),
        autocast=config.trainer.mixed_precision == "bf16",
        draws=not config.data.preferences,
        writer=None if writer.path is None else writer,
    )


def check_memory(
    config: FlowGRPOConfig, num_processes: int, device_bytes: int, *, emulates_fp8: bool = False
) -> MemoryPlan | None:
    """Warn if the planner finds that the run does not fit GPUs of ``device_bytes`` each; returns the plan. A model
    without known configuration files (on the hub, not yet downloaded) cannot be planned and passes. Raises
    ``PlanError`` if the tensors of the update alone exceed the device's memory, and a smaller micro-batch would fit.
    ``emulates_fp8``: the GPUs have no float8 kernels, so that an fp8 engine's weights take as much as unrounded
    ones."""
    try:
        run = planned_run(config)
        if emulates_fp8 and run.rollout.quantization == "fp8":
            run = run.with_rollout(quantization=EMULATED)
        # Weights are shared within a node alone.
        size = run.actor.fsdp_config.processes_to_a_copy(processes_on_node(num_processes))
        gpus = Gpus(num_processes, device_bytes / GIB)
        plan = MemoryPlan(run.with_settings({f"{ACTOR}.fsdp_config.fsdp_size": size})).settled(gpus)
        memory = plan.memory(plan.run, num_processes)
    # The planner knows no configuration of this model.
    except PlanError:
        return None
    except Exception as error:  # fake tensors know less than real ones; a plan must not keep a run from starting
        warnings.warn(f"this run's memory could not be planned: {one_line(error)}", stacklevel=2)
        return None
    if memory.fits(device_bytes):
        return plan
    largest = plan.largest_micro_batch(plan.run, gpus)
    needs = f"a plan of this run needs {memory.total / GIB:.1f} GiB on each GPU, of {device_bytes / GIB:.1f}"
    # Only what cannot fit in any case is refused: the plan may err by its reserve.
    if memory.tensors > device_bytes and 0 < largest < plan.run.micro_rows(num_processes):
        raise PlanError(
            f"{ACTOR}.ppo_micro_batch_rows: a micro-batch has {plan.run.micro_rows(num_processes)} rows, which cannot "
            f"fit; {needs}. Give at most {largest}"
        )
    warnings.warn(
        f"{needs}, and may end for want of memory; flowgrpo-rc plan --gpus={num_processes}x{device_bytes / GIB:.0f} "
        "with the same settings says what to change",
        stacklevel=2,
    )
    return plan
