"""Changes that make a run fit, the cheapest first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flowgrpo_rc.planner.machines import Gpus
from flowgrpo_rc.planner.memory import Memory, MemoryPlan
from flowgrpo_rc.planner.settings import ACTOR, ROLLOUT, PlannedRun

FSDP = f"{ACTOR}.fsdp_config"
MODEL = "actor_rollout_ref.model"
SLEEP = f"{ROLLOUT}.vllm_omni.sleep"


@dataclass(frozen=True)
class Change:
    """One change, on top of those before it."""

    override: str
    """The settings as they are written on the command line."""
    why: str
    """Its gain and cost."""
    run: PlannedRun
    """The changed run."""
    plan: MemoryPlan
    """The plan that measured it."""
    memory: Memory


def advise(plan: MemoryPlan, gpus: Gpus) -> list[Change]:
    """Return changes one upon the other, until the run fits or no further change saves memory."""
    taken: list[Change] = []
    memory = plan.memory(plan.run, gpus.count)
    while not memory.fits(gpus.bytes):
        change = _cheapest(plan, gpus, taken[-1].run if taken else plan.run, memory)
        if change is None:
            break
        # A setting that changes once more, after another one, is listed once.
        keys = [override.partition("=")[0] for override in change.override.split()]
        taken = [*(earlier for earlier in taken if earlier.override.partition("=")[0] not in keys), change]
        memory = change.memory
        plan = change.plan
    return taken


def _cheapest(plan: MemoryPlan, gpus: Gpus, run: PlannedRun, memory: Memory) -> Change | None:
    """The first change in order of its cost that saves memory."""
    for propose, why in _BY_COST:
        settings = propose(plan, run, gpus)
        if not settings:
            continue
        changed = run.with_settings(settings)
        measured = plan
        if (changed.model.dtype, changed.rollout.dtype) != (run.model.dtype, run.rollout.dtype):
            measured = MemoryPlan(changed)
        after = measured.memory(changed, gpus.count)
        if after.total < memory.total:
            # Booleans are lower case in YAML.
            overrides = [f"{key}={str(value).lower()}" for key, value in settings.items()]
            return Change(" ".join(overrides), why, changed, measured, after)
    return None


Settings: TypeAlias = dict[str, Any]
# Returns the settings to change; None if they are in force already or refused in this run.
Propose: TypeAlias = Callable[[MemoryPlan, PlannedRun, Gpus], Settings | None]


def _recompute(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    return None if plan.recomputes(run) else {f"{MODEL}.enable_gradient_checkpointing": True}


def _sampling(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    """Halve the images drawn at once until sampling needs no more than the update, which needs its memory anyway."""
    key = f"{ROLLOUT}.micro_batch_size"
    images = run.sampled_at_once(gpus.count)
    best = plan.memory(run, gpus.count).total
    chosen = None
    while images > 1:
        images //= 2
        total = plan.memory(run.with_settings({key: images}), gpus.count).total
        if total >= best:
            break
        chosen = {key: images}
        best = total
    return chosen


def _scoring(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    scores_pieces = run.scored_rows(gpus.count) > run.steps_of_window
    return {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1} if scores_pieces else None


def _micro_batch(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    rows = max(1, plan.largest_micro_batch(run, gpus))
    return {f"{ACTOR}.ppo_micro_batch_rows": rows} if rows < run.micro_rows(gpus.count) else None


def _engine_dtype(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    wider = run.rollout.dtype == "float32" and run.model.dtype != "float32"
    return {f"{ROLLOUT}.dtype": run.model.dtype} if wider else None


def _sleep(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    can_sleep = run.rollout.name == "vllm_omni" and not run.rollout.is_elsewhere
    return {SLEEP: True} if can_sleep and not run.engine_sleeps else None


def _in_process(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    if run.samples_in_trainer or run.rollout.is_elsewhere:
        return None
    # The engine in the trainer's process has no weights of its own that could sleep.
    return {f"{ROLLOUT}.name": "diffusers", **({SLEEP: False} if run.engine_sleeps else {})}


def _shard(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    # Sharding goes only with an engine that computes with the actor's own transformer, and without compilation.
    same_attention = run.rollout.rollout_attn_backend == run.model.attn_backend
    shares = not run.samples_in_trainer or (run.shares_weights and same_attention)
    possible = gpus.count > 1 and shares and not run.model.torch_compile
    return {f"{FSDP}.shard": True} if possible and not run.actor.fsdp_config.shard else None


def _regather(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    return None if run.actor.fsdp_config.reshard_after_forward else {f"{FSDP}.reshard_after_forward": True}


def _sampled_with_shards(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    return {f"{ROLLOUT}.gather_weights": False} if run.rollout.gather_weights else None


def _offload(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    possible = run.sharing(gpus.count) > 1 and not run.actor.fsdp_config.param_offload
    return {f"{FSDP}.param_offload": True} if possible else None


def _half_precision(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> Settings | None:
    return {f"{MODEL}.dtype": "bfloat16", f"{ROLLOUT}.dtype": "bfloat16"} if run.model.dtype == "float32" else None


# From changes that cost some time to one that changes numbers.
_BY_COST: tuple[tuple[Propose, str], ...] = (
    (_recompute, "the update takes a third more compute"),
    (_scoring, "the scoring pass in smaller pieces"),
    (_sampling, "the engine draws fewer images at a time"),
    (_sampled_with_shards, "the rollout gathers the weights at every forward"),
    (_regather, "weights are gathered again for the backward pass"),
    (_micro_batch, "the same result in more and smaller pieces"),
    (_engine_dtype, "the engine shares the actor's weights"),
    (_shard, "the GPUs share the frozen weights and gather them by blocks"),
    (_sleep, "the engine's weights cross to the host's memory and back in every step"),
    (_in_process, "samples in this process"),
    (_offload, "every block comes from the host's memory at every forward"),
    (_half_precision, "half the weights; log-probs get bfloat16's rounding"),
)
