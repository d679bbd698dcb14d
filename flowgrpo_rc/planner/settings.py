"""The part of a configuration that determines memory and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo_rc.actor.config import DiffusionActorConfig
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.config import RolloutConfig, device_groups
from flowgrpo_rc.rollout.engines import EMULATED, ENGINES
from flowgrpo_rc.writer.config import PromptWriterConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ROWS = f"{ACTOR}.ppo_micro_batch_rows"
RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Sections of a configuration, with figures derived from the rest of it."""

    model: ModelConfig
    actor: DiffusionActorConfig
    rollout: RolloutConfig
    prompts: int  # Prompts of a step that are drawn
    scored_share: float = 0.0  # Share of a batch that is scored before the update; 0 in bypass mode
    replayed: float = 0.0  # Rows from the replay buffer for each of new images, once it is full
    autocast: bool = False  # Run the actor's forwards under bfloat16 autocast
    draws: bool = True  # The engine draws the images of a step; false for pairs of a file
    writer: PromptWriterConfig | None = None  # The prompt writer, if there is one

    @property
    def learns_images(self) -> bool:
        """The image model learns; a prompt writer may learn alone."""
        return self.writer is None or not self.writer.learns_alone

    @property
    def records_steps(self) -> bool:
        """Images are drawn with an SDE window whose steps are learned from."""
        return self.learns_images and not self.actor.diffusion_loss.objective.clean

    @property
    def samples_in_trainer(self) -> bool:
        """The engine runs in the trainer's process."""
        return ENGINES[self.rollout.name].takes_actors_transformer and not self.rollout.is_elsewhere

    @property
    def shares_weights(self) -> bool:
        """The engine samples with the actor's own weights."""
        own = self.rollout.quantization is not None or self.rollout.merge_adapter
        return self.samples_in_trainer and self.rollout.dtype == self.model.dtype and not own

    @property
    def scouts(self) -> "PlannedRun | None":
        """The run with the scouts' engine in the place of its own; ``None`` where they have none."""
        return replace(self, rollout=self.rollout.of_scouts) if self.rollout.has_scouts_engine else None

    @property
    def engine_quantization(self) -> str | None:
        """The rounding of the engine's base; only the actor's own transformer is the actor's rounded one."""
        if self.rollout.quantization not in (None, EMULATED):
            return self.rollout.quantization
        return self.model.quantization if ENGINES[self.rollout.name].takes_actors_transformer else None

    @property
    def precisions(self) -> tuple[Any, ...]:
        """Every precision that bytes and operations depend on."""
        model, rollout = self.model, self.rollout
        skipped = None if rollout.quantization_skip is None else tuple(rollout.quantization_skip)
        own = (model.dtype, model.quantization, model.lora_dtype, model.lora_computes_in)
        return *own, rollout.dtype, self.engine_quantization, skipped

    def has_engine_process(self, gpus: int) -> bool:
        """Return true if an engine's process shares one of the trainer's ``gpus`` GPUs. Engines on a Ray cluster, and
        those whose devices come after the trainer's own, are elsewhere."""
        if self.samples_in_trainer or self.rollout.placement == "ray":
            return False
        return on_trainers_gpus(self.rollout.devices, gpus)

    def sharing(self, gpus: int) -> int:
        """Number of GPUs of one machine that share a copy of the frozen transformer."""
        fsdp = self.actor.fsdp_config
        whole = gpus if fsdp.fsdp_size == -1 else min(fsdp.fsdp_size, gpus)
        return whole if fsdp.shard else 1

    def images_of_mini_batch(self, gpus: int) -> int:
        """Images that one GPU brings to an optimizer step."""
        # A plan for more GPUs than images still needs a row to measure.
        return max(1, self.actor.ppo_mini_batch_size * self.rollout.n // gpus)

    @property
    def rows_per_image(self) -> int:
        """Rows of an image: the steps of its window, or the places of a clean image."""
        return self.actor.rows_per_image(self.rollout.window.size)

    def micro_rows(self, gpus: int) -> int:
        """Rows of one forward and backward pass on a GPU."""
        window = self.rows_per_image
        return min(self.actor.micro_batch_rows(window), self.images_of_mini_batch(gpus) * window)

    def sampled_at_once(self, gpus: int) -> int:
        """Images of one forward of the engine."""
        return min(self.rollout.micro_batch_size, self.images_of_batch(gpus))

    def images_of_batch(self, gpus: int) -> int:
        """Images of a step that one GPU draws."""
        return max(1, self.prompts * self.rollout.drawn // gpus)

    def scored_rows(self, gpus: int) -> int:
        """Rows of one scoring forward, for the update or for rescoring; 0: there is none."""
        window = self.rows_per_image
        images = self.images_of_batch(gpus)
        if not self.scored_share:
            images = min(images, -(-self.rescored_images // gpus))
        at_once = self.rollout.log_prob_micro_batch_size_per_gpu
        rows = self.micro_rows(gpus) if at_once is None else at_once * window
        return min(rows, images * window)

    @property
    def rescored_images(self) -> int:
        """Images of a batch that rescoring measures the gap on; without recorded steps there is none to measure."""
        return self.rollout.probe.images if self.records_steps else 0

    @property
    def actor_precision(self) -> str:
        """Precision of the actor's products, by its name in ``DTYPES``."""
        return "bfloat16" if self.autocast else self.model.dtype

    def own_gpus_of_engines(self, gpus: int) -> float:
        """GPUs of engines that take none of the trainer's ``gpus``; 0 if they do."""
        rollout = self.rollout
        if not rollout.is_elsewhere or self.has_engine_process(gpus):
            return 0
        if rollout.placement == "ray":
            return gpus * rollout.engines * rollout.ray.num_gpus
        return sum(device != "cpu" for group in device_groups(rollout.devices or []) for device in group)

    def with_settings(self, settings: Mapping[str, Any]) -> "PlannedRun":
        """The same run with other settings, by their dotted names from ``actor_rollout_ref`` on."""
        run = self
        # Every copy is validated, and a nested section may have to change before the setting that excludes it.
        for key, value in sorted(settings.items(), key=lambda setting: -setting[0].count(".")):
            run = _replaced(run, key.removeprefix("actor_rollout_ref.").split("."), value)
        return run

    def with_rollout(self, **changes: Any) -> "PlannedRun":
        """The same run with other fields of ``actor_rollout_ref.rollout``."""
        return replace(self, rollout=replace(self.rollout, **changes))


def on_trainers_gpus(devices: list[str] | None, gpus: int) -> bool:
    """Return true if engines on ``devices`` take memory of the trainer's ``gpus`` GPUs, as those without devices of
    their own do."""
    if devices is None:
        return True
    numbers = [device.partition(":")[2] for group in device_groups(devices) for device in group]
    return any(number.isdigit() and int(number) < gpus for number in numbers)


def adamw_moments(optimizer: str, parameters: int, itemsize: int) -> int:
    """Bytes of AdamW's two moments of weights of so many bytes each."""
    if optimizer == "adamw_8bit":
        # A byte a number, and a float32 scale for 256.
        return 2 * parameters * 65 // 64
    return 2 * parameters * itemsize


def _replaced(node: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of nested dataclasses with another value at ``path``."""
    name, *rest = path
    return replace(node, **{name: _replaced(getattr(node, name), rest, value) if rest else value})
