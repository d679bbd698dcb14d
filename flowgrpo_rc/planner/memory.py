"""Memory of one GPU by component: resident tensors, and those that each stage of a step adds."""

from collections.abc import Callable
from dataclasses import dataclass

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.planner.machines import GIB, Gpus
from flowgrpo_rc.planner.measured import Measured
from flowgrpo_rc.planner.settings import PlannedRun

# Assumed beside tensors: the device's context, libraries' workspaces, fragmentation of the allocator.
RUNTIME = 3 * GIB
# The same in the process of an engine.
ENGINE_RUNTIME = 1 * GIB
# Share of a GPU that a plan leaves free.
MARGIN = 0.1


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    resident: dict[str, int]
    """Resident bytes, by component."""
    stages: dict[str, int]
    """Bytes that each stage adds while it runs; the largest counts, since memory is reused."""
    engine: int
    """Bytes of an engine's own process on the same GPU."""

    @property
    def tensors(self) -> int:
        """The peak of tensors alone."""
        return sum(self.resident.values()) + max(self.stages.values()) + self.engine

    @property
    def total(self) -> int:
        """The peak with ``RUNTIME``."""
        return self.tensors + RUNTIME

    @property
    def largest_stage(self) -> str:
        """The stage of the peak."""
        return max(self.stages, key=lambda name: self.stages[name])

    def fits(self, available: int) -> bool:
        """Return true if it leaves ``MARGIN`` of a GPU of so many bytes free."""
        return fits(self.total, available)


def fits(size: int, available: int) -> bool:
    """Return true if ``size`` bytes leave ``MARGIN`` of a GPU of ``available`` bytes free."""
    return size <= (1 - MARGIN) * available


class MemoryPlan:
    """The memory of a run on any number of GPUs, and of its variants in other micro-batches.

    Raises:
        PlanError, ValueError: see ``FakePipeline`` and ``Passes``.
    """

    def __init__(self, run: PlannedRun) -> None:
        self.run = run
        self.actor = Measured(run)
        """Passes of the actor."""
        self.engine = self.actor
        """Passes of the engine."""
        # The same weights in another precision are another copy, with passes of its own.
        if run.rollout.dtype != run.model.dtype:
            self.engine = Measured(run, of_engine=True)
        self.sizes = self.actor.sizes

    def memory(self, run: PlannedRun, gpus: int) -> Memory:
        """Memory of ``run``, which has this plan's model, precisions and images, on one of so many GPUs."""
        return Memory(
            {name: size for name, size in self._resident(run, gpus).items() if size},
            self._stages(run, gpus),
            self._engine_process(run, gpus),
        )

    def largest_micro_batch(self, run: PlannedRun, gpus: Gpus) -> int:
        """Most rows of an update's micro-batch that fit; 0 if not even one does."""
        most = run.images_of_mini_batch(gpus.count) * run.steps_of_window

        def fits(rows: int) -> bool:
            changed = run.with_actor(ppo_micro_batch_rows=rows)
            return self.memory(changed, gpus.count).fits(gpus.bytes)

        return _largest(fits, most)

    def engine_alone(self, run: PlannedRun, trainers: int) -> int:
        """Bytes of tensors of an engine's process on a GPU of its own; it draws for one of ``trainers`` processes."""
        return self._engine_weights() + self._engine_lora(run) + self._engine_work(run, trainers)

    def recomputes(self, run: PlannedRun) -> bool:
        """Return true if the run's update recomputes activations."""
        return run.model.checkpoints_gradients(self.sizes.parameters)

    def _resident(self, run: PlannedRun, gpus: int) -> dict[str, int]:
        sizes = self.sizes
        fsdp = run.actor.fsdp_config
        sharing = run.sharing(gpus)
        lora = sizes.lora_parameters * torch_dtype(run.model.lora_dtype).itemsize
        in_process = run.samples_in_trainer
        own_copy = in_process and not run.shares_weights
        # Shards are padded to equal size.
        own_share = -(-sizes.transformer // sharing)
        if sharing > 1 and fsdp.param_offload:
            own_share = 0
        return {
            "transformer, own shard" if sharing > 1 else "transformer": own_share + sizes.buffers,
            "gathered blocks": self._gathered(run, gpus, keeps=not fsdp.reshard_after_forward),
            "engine's own copy of the transformer": (
                self.engine.sizes.transformer + self.engine.sizes.buffers if own_copy else 0
            ),
            "LoRA": lora,
            "AdamW's two moments": 2 * lora,
            "average of the LoRA": lora if run.actor.ema_decay is not None else 0,
            "engine's LoRA": self._engine_lora(run) if in_process else 0,
            "VAE": sizes.vae,
        }

    def _gathered(self, run: PlannedRun, gpus: int, *, keeps: bool) -> int:
        """Whole weights beside a GPU's own shard: of the blocks at work, or all if gathered blocks stay."""
        if run.sharing(gpus) == 1:
            return 0
        return self.sizes.transformer if keeps else self.sizes.gathered

    def _stages(self, run: PlannedRun, gpus: int) -> dict[str, int]:
        rows = run.micro_rows(gpus)
        # Gradients of earlier micro-batches are then alive during the pass.
        accumulates = run.images_of_mini_batch(gpus) * run.steps_of_window > rows
        lora = self.sizes.lora_parameters * torch_dtype(run.model.lora_dtype).itemsize
        update = self.actor.update(rows, recompute=self.recomputes(run), accumulates=accumulates)
        stages = {
            "update: activations and gradients": update.peak,
            # Gradients twice: they are flattened for the other ranks, and AdamW works on all at once.
            "optimizer step": 2 * lora,
        }
        # Scoring, sampling and the update follow each other, so their memory does not add up.
        scored = run.scored_rows(gpus)
        if scored:
            stages["scoring"] = self.actor.forward(scored).peak
        if run.has_engine_process(gpus) and run.engine_sleeps:
            stages["rollout: the engine's process awake"] = self._engine_weights() + self._engine_work(run, gpus)
        if run.samples_in_trainer:
            stages["sampling"] = self.engine.forward(run.sampled_at_once(gpus)).peak
            stages["decoding"] = self.actor.decode(run.sampled_at_once(gpus)).peak
            if run.rollout.gather_weights:
                # The blocks at work are resident at any time and counted there.
                further = self._gathered(run, gpus, keeps=True) - self._gathered(run, gpus, keeps=False)
                stages["sampling"] += further
                stages["decoding"] += further
        return stages

    def _engine_process(self, run: PlannedRun, gpus: int) -> int:
        """Its transformer, VAE, LoRA and sampling memory; of an engine that sleeps, the part that stays."""
        # An engine elsewhere takes nothing here.
        if not run.has_engine_process(gpus):
            return 0
        stays = self._engine_lora(run) + ENGINE_RUNTIME
        if run.engine_sleeps:
            return stays
        return stays + self._engine_weights() + self._engine_work(run, gpus)

    def _engine_weights(self) -> int:
        sizes = self.engine.sizes
        return sizes.transformer + sizes.buffers + self.sizes.vae

    def _engine_work(self, run: PlannedRun, gpus: int) -> int:
        """Memory of an engine's process to sample and to decode."""
        at_once = run.sampled_at_once(gpus)
        return max(self.engine.forward(at_once).peak, self.engine.decode(at_once).peak)

    def _engine_lora(self, run: PlannedRun) -> int:
        return self.sizes.lora_parameters * torch_dtype(run.rollout.dtype).itemsize


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Largest number from 1 to ``most`` that fits, by bisection; 0 for none."""
    low = 0
    # From below, since a pass of many rows takes long to plan in a transformer that takes them one by one.
    reach = 1
    while reach <= most and fits(reach):
        low = reach
        reach *= 2
    most = min(most, reach - 1)
    while low < most:
        middle = (low + most + 1) // 2
        if fits(middle):
            low = middle
        else:
            most = middle - 1
    return low
