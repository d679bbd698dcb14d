"""Memory of one GPU by component: resident tensors, and those that each stage of a step adds."""

from bisect import bisect_left
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.config import AUTO
from flowgrpo_rc.planner.machines import ENGINE_RUNTIME, GIB, Gpus
from flowgrpo_rc.planner.passes import Passes, Usage
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.planner.settings import RECOMPUTE, ROWS, PlannedRun, adamw_moments
from flowgrpo_rc.planner.writing import WriterPlan

# Assumed beside tensors: the device's context, libraries' workspaces, fragmentation of the allocator.
RUNTIME = 3 * GIB
# Share of a GPU that a plan leaves free.
MARGIN = 0.1
# Most rows of a measured pass: a transformer that takes its rows one by one, as Z-Image's does, needs a second for
# so many.
MOST_ROWS = 32
OWN_COPY = "engine's own copy of the transformer"
ENGINES_LORA = "engine's LoRA"
TEXT_ENCODERS = "text encoders"


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    resident: dict[str, int]  # Resident bytes, by component
    stages: dict[str, int]  # Bytes that each stage adds while it runs; the largest counts, since memory is reused
    engine: int  # Bytes of an engine's own process on the same GPU

    @property
    def tensors(self) -> int:
        """The peak of tensors alone."""
        return sum(self.resident.values()) + max(self.stages.values()) + self.engine

    @property
    def total(self) -> int:
        """The peak with ``RUNTIME``."""
        return self.tensors + RUNTIME

    def fits(self, available: int) -> bool:
        """Return true if it leaves ``MARGIN`` of a GPU of so many bytes free."""
        return fits(self.total, available)


def fits(size: int, available: int) -> bool:
    """Return true if ``size`` bytes leave ``MARGIN`` of a GPU of ``available`` bytes free."""
    return size <= (1 - MARGIN) * available


class Measured:
    """Passes of one model in one precision, measured once and interpolated in the number of rows.

    Args:
        run: its settings.
        of_engine: measure the engine's transformer, in the engine's precision, LoRA included.
    """

    def __init__(self, run: PlannedRun, *, of_engine: bool = False) -> None:
        self.run = run
        dtype = run.rollout.dtype if of_engine else run.model.dtype
        lora_dtype = dtype if of_engine else run.model.lora_dtype
        computes_in = dtype if of_engine else run.model.lora_computes_in
        quantization = run.engine_quantization if of_engine else run.model.quantization
        skip = run.rollout.quantization_skip if of_engine and run.rollout.quantization is not None else ()
        pipeline = FakePipeline(run.model.path, torch_dtype(dtype), quantization, skip)
        autocast = run.autocast and not of_engine
        passes = Passes(pipeline, run.model, lora_dtype, run.rollout, autocast=autocast, lora_compute_dtype=computes_in)
        self.sizes = passes.sizes
        """Sizes of the pipeline and of the LoRA."""
        self.kinds = passes.kinds
        """The transformer's blocks, by kind."""
        self.decode = cache(passes.decode)
        """Decoding of a micro-batch of the engine, by its number of images."""
        self._forward = cache(passes.forward)
        self._update = cache(passes.update)

    def update(self, rows: int, *, recompute: bool, accumulates: bool) -> Usage:
        """Forward and backward of ``rows``, images times steps of the window."""
        actor = self.run.actor
        given = {"reference": actor.needs_reference, "detached": actor.detach_unconditional}
        return self._at_rows(rows, partial(self._update, recompute=recompute, accumulates=accumulates, **given))

    def forward(self, rows: int) -> Usage:
        """A forward of ``rows`` without gradients."""
        return self._at_rows(rows, self._forward)

    def _at_rows(self, rows: int, measure: Callable[[int], Usage]) -> Usage:
        """Interpolate between the configured micro-batch, or ``MOST_ROWS``, and twice its rows."""
        # Two measurements determine the line; a run's own micro-batch is exact.
        usual = min(self.run.micro_rows(1), MOST_ROWS)
        known = measure(usual)
        if rows == usual:
            return known
        return known.moved(known, measure(2 * usual), rows / usual - 1)


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
        if (run.rollout.dtype, run.engine_quantization) != (run.model.dtype, run.model.quantization):
            self.engine = Measured(run, of_engine=True)
        self.sizes = self.actor.sizes
        # By their precisions: advice comes back to the same ones, and measuring takes seconds.
        self._measured: dict[tuple[Any, ...], MemoryPlan] = {run.precisions: self}

    @cached_property
    def writer(self) -> WriterPlan | None:
        """The prompt writer, measured; ``None`` without one."""
        return None if self.run.writer is None else WriterPlan(self.run.writer)

    def of_run(self, run: PlannedRun) -> "MemoryPlan":
        """The plan of another run of the same model and images, measured once for each set of precisions."""
        found = self._measured.get(run.precisions)
        if found is None:
            found = MemoryPlan(run)
            found.writer = self.writer
            found._measured = self._measured
            self._measured[run.precisions] = found
        plan = copy(found)
        plan.run = run
        return plan

    def memory(self, run: PlannedRun, gpus: int) -> Memory:
        """Memory of ``run``, which has this plan's model, precisions and images, on one of so many GPUs."""
        resident = self._resident(run, gpus)
        stages = self._stages(run, gpus)
        engine = self._engine_process(run, gpus)
        if run.scouts is not None:
            scouts = self.of_run(run.scouts)
            found = scouts._resident(run.scouts, gpus)
            resident |= {name.replace("engine's", "scouts'"): found[name] for name in (OWN_COPY, ENGINES_LORA)}
            stages = {name: max(size, scouts._stages(run.scouts, gpus)[name]) for name, size in stages.items()}
            engine += scouts._engine_process(run.scouts, gpus)
        if self.writer is not None:
            # Its prompts are new ones, so the text encoders stay.
            resident |= self.writer.resident(gpus) | {TEXT_ENCODERS: self.sizes.text_encoders}
            # The prompts that are drawn are its rewrites.
            stages |= self.writer.stages(max(1, run.prompts // gpus), gpus)
        return Memory({name: size for name, size in resident.items() if size}, stages, engine)

    def settled(self, gpus: Gpus) -> "MemoryPlan":
        """This plan with ``enable_gradient_checkpointing=auto`` decided: true where the run does not fit without it."""
        if self.run.model.enable_gradient_checkpointing != AUTO:
            return self
        without = self.of_run(self.run.with_settings({RECOMPUTE: False}))
        return without if without.fits(gpus) else self.of_run(self.run.with_settings({RECOMPUTE: True}))

    def fits(self, gpus: Gpus) -> bool:
        """Return true if the run fits these GPUs."""
        return self.memory(self.run, gpus.count).fits(gpus.bytes)

    def largest_micro_batch(self, run: PlannedRun, gpus: Gpus) -> int:
        """Most rows of an update's micro-batch that fit; 0 if not even one does."""

        def exceeds(rows: int) -> bool:
            return not self.memory(run.with_settings({ROWS: rows}), gpus.count).fits(gpus.bytes)

        most = run.images_of_mini_batch(gpus.count) * run.rows_per_image
        return bisect_left(range(1, most + 1), True, key=exceeds)

    def engine_alone(self, run: PlannedRun, trainers: int) -> int:
        """Bytes of tensors of an engine's process on a GPU of its own; it draws for one of ``trainers`` processes."""
        return self._lora(run.rollout.dtype) + self._engine_awake(run, trainers)

    def recomputes(self, run: PlannedRun) -> bool:
        """Return true if the run's update recomputes activations."""
        return run.model.checkpoints_gradients(self.sizes.parameters)

    def _engine_process(self, run: PlannedRun, gpus: int) -> int:
        """Bytes of an engine's process on one of the GPUs; 0 without one."""
        # An engine elsewhere takes nothing here; the weights of one that sleeps count in a stage.
        if not run.has_engine_process(gpus):
            return 0
        awake = 0 if run.rollout.vllm_omni.sleep else self._engine_awake(run, gpus)
        return self._lora(run.rollout.dtype) + ENGINE_RUNTIME + awake

    def _resident(self, run: PlannedRun, gpus: int) -> dict[str, int]:
        sizes = self.sizes
        sharing = run.sharing(gpus)
        lora = self._lora(run.model.lora_dtype)
        in_process = run.samples_in_trainer
        # Shards are padded to equal size.
        own_share = -(-sizes.transformer // sharing)
        if sharing > 1 and run.actor.fsdp_config.param_offload:
            own_share = 0
        return {
            "transformer, own shard" if sharing > 1 else "transformer": own_share + sizes.buffers,
            "gathered blocks": self._gathered(run, gpus),
            OWN_COPY: self._own_copy(run) if in_process else 0,
            "LoRA": lora,
            # They are made by the first step.
            "AdamW's two moments": run.learns_images
            * adamw_moments(run.actor.optim.name, sizes.lora_parameters, torch_dtype(run.model.lora_dtype).itemsize),
            "average of the LoRA": lora if run.actor.ema_decay is not None else 0,
            "reference LoRA of the KL": lora if run.actor.needs_reference and run.actor.kl_reference == "start" else 0,
            ENGINES_LORA: self._lora(run.rollout.dtype) if in_process else 0,
            "VAE": sizes.vae,
        }

    def _own_copy(self, run: PlannedRun) -> int:
        """Weights of an engine beside the actor that are not the actor's."""
        if run.shares_weights:
            return 0
        same_dtype = run.rollout.dtype == run.model.dtype
        if same_dtype and run.rollout.quantization is None:
            return self._merged(run)
        # The adapter is added to the actor's weights where they have the engine's dtype.
        return self._engine_weights() + (0 if same_dtype else self._merged(run))

    def _engine_weights(self) -> int:
        return self.engine.sizes.transformer + self.engine.sizes.buffers

    def _merged(self, run: PlannedRun) -> int:
        """Weights of the adapted layers once more, since the adapter is added to them anew each time."""
        return self.sizes.adapted * torch_dtype(run.rollout.dtype).itemsize if run.rollout.merge_adapter else 0

    def _gathered(self, run: PlannedRun, gpus: int) -> int:
        """Whole weights beside a GPU's own shard: of the blocks at work, or all if gathered blocks stay."""
        if run.sharing(gpus) == 1:
            return 0
        return self.sizes.gathered if run.actor.fsdp_config.reshard_after_forward else self.sizes.transformer

    def _stages(self, run: PlannedRun, gpus: int) -> dict[str, int]:
        rows = run.micro_rows(gpus)
        # Gradients of earlier micro-batches are then alive during the pass.
        accumulates = run.images_of_mini_batch(gpus) * run.rows_per_image > rows
        stages: dict[str, int] = {}
        if run.learns_images:
            update = self.actor.update(rows, recompute=self.recomputes(run), accumulates=accumulates)
            stages["update: activations and gradients"] = update.peak
            # Gradients twice: they are flattened for the other ranks, and AdamW works on all at once.
            stages["optimizer step"] = 2 * self._lora(run.model.lora_dtype)
        # Scoring, sampling and the update follow each other, so their memory does not add up.
        scored = run.scored_rows(gpus)
        if scored:
            stages["scoring"] = self.actor.forward(scored).peak
        if run.has_engine_process(gpus) and run.rollout.vllm_omni.sleep:
            stages["rollout: the engine's process awake"] = self._engine_awake(run, gpus)
        if run.samples_in_trainer:
            # The blocks at work are resident at any time and counted there.
            gathers = run.rollout.gather_weights and run.sharing(gpus) > 1
            further = self.sizes.transformer - self._gathered(run, gpus) if gathers else 0
            stages["sampling"] = self.engine.forward(run.sampled_at_once(gpus)).peak + further
            stages["decoding"] = self.actor.decode(run.sampled_at_once(gpus)).peak + further
        return stages

    def _engine_awake(self, run: PlannedRun, gpus: int) -> int:
        """An engine's transformer and VAE, and its memory to sample and to decode."""
        at_once = run.sampled_at_once(gpus)
        work = max(self.engine.forward(at_once).peak, self.engine.decode(at_once).peak)
        return self._engine_weights() + self._merged(run) + self.sizes.vae + work

    def _lora(self, dtype: str) -> int:
        return self.sizes.lora_parameters * torch_dtype(dtype).itemsize
