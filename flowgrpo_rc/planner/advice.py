"""What to change where a run does not fit, the cheapest change first."""

from dataclasses import dataclass, replace

from flowgrpo_rc.planner.machines import Gpus
from flowgrpo_rc.planner.memory import Memory, MemoryPlan
from flowgrpo_rc.planner.settings import ACTOR, ROLLOUT, PlannedRun

FSDP = f"{ACTOR}.fsdp_config"
MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class Change:
    """One setting to change, on top of those before it."""

    override: str
    """As it is written on the command line."""
    why: str
    """What it saves and what it costs."""
    run: PlannedRun
    """The run with it."""
    plan: MemoryPlan
    """Where it is measured."""
    memory: Memory
    """Its memory."""


def advise(plan: MemoryPlan, gpus: Gpus) -> list[Change]:
    """Changes one upon the other until the run fits, or until no further one saves anything."""
    taken: list[Change] = []
    memory = plan.memory(plan.run, gpus.count)
    while not memory.fits(gpus.bytes):
        change = _cheapest(plan, gpus, taken[-1].run if taken else plan.run, memory)
        if change is None:
            break
        # A setting that is changed once more, after another one, stands once.
        keys = [override.partition("=")[0] for override in change.override.split()]
        taken = [*(earlier for earlier in taken if earlier.override.partition("=")[0] not in keys), change]
        memory = change.memory
        plan = change.plan
    return taken


def _cheapest(plan: MemoryPlan, gpus: Gpus, run: PlannedRun, memory: Memory) -> Change | None:
    """The first change in order of its cost that saves memory."""
    for propose in _BY_COST:
        proposal = propose(plan, run, gpus)
        if proposal is None:
            continue
        override, why, changed = proposal
        measured = plan
        if (changed.model.dtype, changed.rollout.dtype) != (run.model.dtype, run.rollout.dtype):
            measured = MemoryPlan(changed)
        after = measured.memory(changed, gpus.count)
        if after.total < memory.total:
            return Change(override, why, changed, measured, after)
    return None


_Proposal = tuple[str, str, PlannedRun] | None


def _recompute(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if plan.recomputes(run):
        return None
    changed = run.with_model(enable_gradient_checkpointing=True)
    return f"{MODEL}.enable_gradient_checkpointing=true", "the update takes a third more compute", changed


def _sampling(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    """As many images at once as make sampling smaller than the update, whose memory is there anyway."""
    images = run.sampled_at_once(gpus.count)
    best = plan.memory(run, gpus.count).total
    chosen = None
    while images > 1:
        images //= 2
        changed = run.with_rollout(micro_batch_size=images)
        total = plan.memory(changed, gpus.count).total
        if total >= best:
            break
        chosen = changed
        best = total
    if chosen is None:
        return None
    size = chosen.rollout.micro_batch_size
    return f"{ROLLOUT}.micro_batch_size={size}", "the engine draws fewer images at a time", chosen


def _scoring(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if run.scored_rows(gpus.count) <= run.steps_of_window:
        return None
    changed = run.with_rollout(log_prob_micro_batch_size_per_gpu=1)
    return f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", "the scoring pass in smaller pieces", changed


def _micro_batch(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    rows = max(1, plan.largest_micro_batch(run, gpus))
    if rows >= run.micro_rows(gpus.count):
        return None
    changed = run.with_actor(ppo_micro_batch_rows=rows)
    return f"{ACTOR}.ppo_micro_batch_rows={rows}", "the same result in more and smaller pieces", changed


def _engine_dtype(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if run.rollout.dtype != "float32" or run.model.dtype == "float32":
        return None
    changed = run.with_rollout(dtype=run.model.dtype)
    return f"{ROLLOUT}.dtype={run.model.dtype}", "the engine shares the actor's weights", changed


def _sleep(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    rollout = run.rollout
    if rollout.name != "vllm_omni" or rollout.is_elsewhere or run.engine_sleeps:
        return None
    changed = run.with_rollout(vllm_omni=replace(rollout.vllm_omni, sleep=True))
    why = "the engine's weights cross to the host's memory and back in every step"
    return f"{ROLLOUT}.vllm_omni.sleep=true", why, changed


def _in_process(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if run.samples_in_trainer or run.rollout.is_elsewhere:
        return None
    override = f"{ROLLOUT}.name=diffusers"
    if run.engine_sleeps:
        override += f" {ROLLOUT}.vllm_omni.sleep=false"
    changed = run.with_rollout(name="diffusers", vllm_omni=replace(run.rollout.vllm_omni, sleep=False))
    return override, "samples in this process", changed


def _shard(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    """Where the engine computes with the actor's own transformer and nothing is compiled; nothing else goes with it."""
    same_attention = run.rollout.rollout_attn_backend == run.model.attn_backend
    shares = not run.samples_in_trainer or (run.shares_weights and same_attention)
    if run.actor.fsdp_config.shard or gpus.count == 1 or not shares or run.model.torch_compile:
        return None
    return (
        f"{FSDP}.shard=true",
        "the GPUs share the frozen weights and gather them by blocks",
        run.with_fsdp(shard=True),
    )


def _regather(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if run.actor.fsdp_config.reshard_after_forward:
        return None
    changed = run.with_fsdp(reshard_after_forward=True)
    return f"{FSDP}.reshard_after_forward=true", "weights are gathered again for the backward pass", changed


def _sampled_with_shards(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if not run.rollout.gather_weights:
        return None
    changed = run.with_rollout(gather_weights=False)
    return f"{ROLLOUT}.gather_weights=false", "the rollout gathers the weights at every forward", changed


def _offload(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if run.sharing(gpus.count) == 1 or run.actor.fsdp_config.param_offload:
        return None
    changed = run.with_fsdp(param_offload=True)
    return f"{FSDP}.param_offload=true", "every block comes from the host's memory at every forward", changed


def _half_precision(plan: MemoryPlan, run: PlannedRun, gpus: Gpus) -> _Proposal:
    if run.model.dtype != "float32":
        return None
    changed = run.with_model(dtype="bfloat16").with_rollout(dtype="bfloat16")
    override = f"{MODEL}.dtype=bfloat16 {ROLLOUT}.dtype=bfloat16"
    return override, "half the weights; log-probs get bfloat16's rounding", changed


_BY_COST = (
    _recompute,
    _scoring,
    _sampling,
    _sampled_with_shards,
    _regather,
    _micro_batch,
    _engine_dtype,
    _shard,
    _sleep,
    _in_process,
    _offload,
    _half_precision,
)
"""From what costs nothing but some time to what changes numbers."""
