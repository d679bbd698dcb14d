"""Changes that make a run fit, the cheapest first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.planner.machines import Gpus
from flowgrpo_rc.planner.memory import Memory, MemoryPlan
from flowgrpo_rc.planner.settings import ACTOR, RECOMPUTE, ROLLOUT, ROWS

FSDP = f"{ACTOR}.fsdp_config"
MODEL = "actor_rollout_ref.model"
AT_ONCE = f"{ROLLOUT}.micro_batch_size"
SLEEP = f"{ROLLOUT}.vllm_omni.sleep"


@dataclass(frozen=True)
class Change:
    """One change, on top of those before it."""

    override: str  # The settings as they are written on the command line
    why: str  # Its gain and cost
    plan: MemoryPlan  # The plan of the changed run
    memory: Memory


def advise(plan: MemoryPlan, gpus: Gpus) -> list[Change]:
    """Return changes one upon the other, until the run fits or no further change saves memory."""
    taken: dict[str, Change] = {}
    memory = plan.memory(plan.run, gpus.count)
    while not memory.fits(gpus.bytes):
        # The first in order of its cost that saves memory.
        for settings, why in _by_cost(plan, gpus):
            changed = plan.of_run(plan.run.with_settings(settings))
            after = changed.memory(changed.run, gpus.count)
            if after.total < memory.total:
                # Booleans are lower case in YAML.
                override = " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())
                # A setting that changes once more, after another one, is listed once.
                taken = {key: change for key, change in taken.items() if key not in settings}
                taken[next(iter(settings))] = Change(override, why, changed, after)
                plan, memory = changed, after
                break
        else:
            break
    return list(taken.values())


def _by_cost(plan: MemoryPlan, gpus: Gpus) -> Iterator[tuple[dict[str, Any], str]]:
    """Settings that are neither in force nor refused, from those that cost some time to one that changes numbers."""
    run = plan.run
    model, rollout, fsdp = run.model, run.rollout, run.actor.fsdp_config
    # An engine in the trainer's process has no weights of its own that could sleep or be dropped.
    beside = not run.samples_in_trainer and not rollout.is_elsewhere
    if not plan.recomputes(run):
        yield {RECOMPUTE: True}, "the update takes a third more compute"
    if run.scored_rows(gpus.count) > run.rows_per_image:
        yield {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}, "the scoring pass in smaller pieces"
    images = _images_at_once(plan, gpus)
    if images < run.sampled_at_once(gpus.count):
        yield {AT_ONCE: images}, "the engine draws fewer images at a time"
    if rollout.gather_weights:
        yield {f"{ROLLOUT}.gather_weights": False}, "the rollout gathers the weights at every forward"
    if not fsdp.reshard_after_forward:
        yield {f"{FSDP}.reshard_after_forward": True}, "weights are gathered again for the backward pass"
    rows = max(1, plan.largest_micro_batch(run, gpus))
    if rows < run.micro_rows(gpus.count):
        yield {ROWS: rows}, "the same result in more and smaller pieces"
    if rollout.dtype == "float32" and model.dtype != "float32":
        yield {f"{ROLLOUT}.dtype": model.dtype}, "the engine shares the actor's weights"
    # Sharding goes only with an engine that computes with the actor's own transformer, and without compilation.
    same_kernels = rollout.rollout_attn_backend == model.attn_backend and not rollout.torch_compile
    same_kernels &= not rollout.has_scouts_engine
    shares = not run.samples_in_trainer or (run.shares_weights and same_kernels)
    if gpus.count > 1 and shares and not model.torch_compile and not fsdp.shard:
        yield {f"{FSDP}.shard": True}, "the GPUs share the frozen weights and gather them by blocks"
    if beside and rollout.name == "vllm_omni" and not run.rollout.vllm_omni.sleep:
        yield {SLEEP: True}, "the engine's weights cross to the host's memory and back in every step"
    if beside:
        yield (
            {f"{ROLLOUT}.name": "diffusers", **({SLEEP: False} if run.rollout.vllm_omni.sleep else {})},
            "samples in this process",
        )
    if run.sharing(gpus.count) > 1 and not fsdp.param_offload:
        yield {f"{FSDP}.param_offload": True}, "every block comes from the host's memory at every forward"
    if model.dtype == "float32":
        half = {f"{MODEL}.dtype": "bfloat16", f"{ROLLOUT}.dtype": "bfloat16"}
        yield half, "half the weights; log-probs get bfloat16's rounding"
    # Weights are rounded whole and for one engine: the actor's own transformer.
    if model.dtype == "bfloat16" and run.shares_weights and same_kernels and not (fsdp.shard or model.torch_compile):
        if model.quantization is None:
            yield {f"{MODEL}.quantization": "int8"}, "the base in 8 bits"
        if model.quantization != "nf4":
            yield {f"{MODEL}.quantization": "nf4"}, "the base in 4 bits"
    if run.actor.optim.name != "adamw_8bit":
        yield {f"{ACTOR}.optim.name": "adamw_8bit"}, "AdamW's moments in 8 bits"


def _images_at_once(plan: MemoryPlan, gpus: Gpus) -> int:
    """Halve the images drawn at once until sampling needs no more than the update, which needs its memory anyway."""
    chosen = images = plan.run.sampled_at_once(gpus.count)
    best = plan.memory(plan.run, gpus.count).total
    while images > 1:
        images //= 2
        total = plan.memory(plan.run.with_settings({AT_ONCE: images}), gpus.count).total
        if total >= best:
            break
        chosen, best = images, total
    return chosen
