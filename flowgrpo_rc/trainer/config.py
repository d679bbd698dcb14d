"""The whole configuration tree. The dataclasses are the schema and hold every default; YAML sits on top."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from flowgrpo_rc.actor.config import DiffusionActorConfig, read_correction
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.data.config import DataConfig
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.loss.objectives import DEFAULT, averages_old_policy
from flowgrpo_rc.models.config import FSDP_FIELD, ModelConfig
from flowgrpo_rc.replay.config import ReplayConfig
from flowgrpo_rc.rewards.config import RewardConfig
from flowgrpo_rc.rollout.config import IN_TRAINER, RolloutConfig, rounded_base_problems, shared_weights_problems
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.section import (
    Check,
    NonNegativeInt,
    PathOrEmpty,
    PathText,
    PositiveFloat,
    PositiveInt,
    Read,
    Section,
    one_of,
)
from flowgrpo_rc.writer.config import PromptWriterConfig

LOGGERS: dict[str, str | None] = {"console": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""Destinations of metrics besides ``metrics.jsonl``, and the package that each needs; ``console`` is the terminal, all
others are trackers of accelerate."""
SHARED_CORRECTION = "${algorithm.rollout_correction}"

OLD_POLICY_SCHEDULES = {
    "copy": (0, 0.0, 0.0),
    "linear_to_0_5": (0, 0.001, 0.5),
    "delayed_linear_to_0_999": (75, 0.0075, 0.999),
}
"""By name, as in verl-omni and DiffusionNFT: the last batch with decay 0, the rise with each batch, and the largest."""

Frequency = Annotated[int, Check(lambda steps: steps >= -1, "give -1 (at the end only) or more")]


@documented_fields
@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Section):
    """The section ``algorithm``."""

    section = "algorithm"

    adv_estimator: Annotated[str, one_of(("flow_grpo", "grpo"))] = "flow_grpo"
    """Advantages within the images of one prompt."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the rewards' standard deviation; false is Dr.GRPO."""
    global_std: bool = True
    """Take that standard deviation over the whole batch instead of the prompt's group."""
    old_policy_decay_schedule: Annotated[str, one_of(OLD_POLICY_SCHEDULES)] = "copy"
    """Objectives on clean images: the old policy, which draws the images, follows the actor after every batch by
    ``old <- d old + (1 - d) actor``. ``copy`` has ``d`` 0; ``linear_to_0_5`` .001 times the number of the batch, up to
    .5; ``delayed_linear_to_0_999`` .0075 for each batch after the 75th, up to .999."""
    old_policy_decay: Annotated[float, Check(lambda decay: 0 <= decay <= 1, "give a number from 0 to 1")] | None = None
    """A constant ``d`` in place of the schedule's."""
    old_policy_update_interval: PositiveInt = 1
    """The old policy follows after every so many batches and stays as it is in between."""
    rejection_aware_baseline: bool = False
    """Decoupled mode: an image whose steps were all rejected does not enter its group's mean and standard deviation
    either. Needs the weights and the rejection before the advantages, so every image gets the scoring pass."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    prompt_writer: PromptWriterConfig = field(default_factory=PromptWriterConfig)
    rollout_correction: Annotated[Any, Read(read_correction)] = field(default_factory=dict)
    """Given as keys of ``RolloutCorrectionConfig``, or as a ``preset`` and what differs from it; null switches it off.
    The object holds it as a ``RolloutCorrectionConfig``; within ``FlowGRPOConfig`` it is the actor's too."""

    @property
    def averages_old_policy(self) -> bool:
        """The old policy is not simply the actor as it was before the batch."""
        schedule, decay = self.old_policy_decay_schedule, self.old_policy_decay
        return averages_old_policy(schedule, decay, self.old_policy_update_interval)

    def old_decay(self, batches: int) -> float:
        """Share of the old policy's weights that remains when it follows the actor after ``batches`` batches."""
        if batches % self.old_policy_update_interval:
            return 1.0
        if self.old_policy_decay is not None:
            return self.old_policy_decay
        last, rise, largest = OLD_POLICY_SCHEDULES[self.old_policy_decay_schedule]
        return min(max(batches - last, 0) * rise, largest)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig(Section):
    """The section ``actor_rollout_ref``."""

    section = "actor_rollout_ref"

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: DiffusionActorConfig = field(
        default_factory=lambda: DiffusionActorConfig(rollout_correction=SHARED_CORRECTION)
    )
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    nccl_timeout: PositiveFloat = 600.0
    """Seconds that a process waits for the others (NCCL's and gloo's time-out) before it takes them for hung. Longer
    than any of them may be busy alone, with a reward for instance. It is raised to a minute above the
    ``start_timeout_s`` of engines and reward servers that the run starts. An exception of one process ends all of them
    at once, without this wait."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class TrainerConfig(Section):
    """The section ``trainer``."""

    section = "trainer"

    total_epochs: PositiveInt = 1
    """Passes over the training prompts, when ``total_training_steps`` is null."""
    total_training_steps: PositiveInt | None = None
    """Batches of rollouts to train on."""
    save_freq: Frequency = -1
    """Save a checkpoint every so many steps; -1 or 0: at the end only."""
    test_freq: Frequency = -1
    """Validate every so many steps; -1 or 0: before and after training only."""
    val_before_train: bool = True
    """Validate before the first step."""
    logger: list[Annotated[str, one_of(LOGGERS)]] = field(default_factory=lambda: ["console"])
    """Destinations of metrics besides ``metrics.jsonl``; any of ``LOGGERS``."""
    project_name: str = "flowgrpo_rc"
    """First folder under ``outputs/`` and project of the trackers."""
    experiment_name: str = "run"
    """Second folder under ``outputs/`` and run name of the trackers."""
    default_local_dir: PathText = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """The run folder."""
    resume_mode: Annotated[str, one_of(("auto", "disable", "resume_path"))] = "auto"
    """``auto``: from the run folder's latest checkpoint if there is one; ``disable``: start afresh in a folder of
    its own; ``resume_path``: from ``resume_from_path``."""
    resume_from_path: PathOrEmpty | None = None
    """A ``checkpoints/step_N`` folder, for ``resume_mode=resume_path``."""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Keep this many checkpoints, the newest; null: all."""
    log_val_generations: NonNegativeInt = 12
    """Validation images in the sample grids."""
    rollout_data_dir: PathText | None = None
    """Folder, as a whole path, for the images of every rollout, each with its prompt, seed, reward and the reward's
    parts; null writes none."""
    validation_data_dir: PathText | None = None
    """The same for the images of every validation; another folder."""
    profile_steps: list[PositiveInt] = field(default_factory=list)
    """Training steps, the first is 1, to run under torch's profiler, which slows them down. Their traces and tables of
    operators go to ``profile/`` in the run folder, a pair for every process."""
    seed: NonNegativeInt = 42
    """Seed of the adapter's start and of all rollout noise."""
    mixed_precision: Annotated[str, one_of(("no", "bf16"))] = "no"
    """``bf16`` runs the actor's forwards under autocast; log-prob arithmetic stays float32."""
    device: Annotated[str, one_of(("auto", "cpu"))] = "auto"
    """``auto`` (an accelerator if there is one) or ``cpu``."""

    def problems(self) -> Iterator[str]:
        """Combinations of fields that cannot work."""
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            yield "resume_from_path: is empty; resume_mode=resume_path needs a checkpoint folder"
        dumps = {name: getattr(self, name) for name in ("rollout_data_dir", "validation_data_dir")}
        given = {name: os.path.expanduser(folder) for name, folder in dumps.items() if folder is not None}
        for name, folder in given.items():
            # A relative path would mean another folder wherever a run is started or resumed.
            if not os.path.isabs(folder):
                whole = os.path.abspath(folder)
                yield f"{name}: got {dumps[name]!r}, a relative path; give the whole one, e.g. {whole}"
        if len({os.path.normpath(folder) for folder in given.values()}) < len(given):
            yield (
                f"validation_data_dir: got {self.validation_data_dir!r}, which is rollout_data_dir too; give another "
                "folder, or one of them null"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class FlowGRPOConfig(Section):
    """Everything a training run is configured by."""

    section = ""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def problems(self) -> Iterator[str]:
        """Combinations of sections that cannot work together."""
        parts = self.actor_rollout_ref
        actor = parts.actor
        # One object for both sections: verl-omni's actor has a copy, and the two must not drift apart.
        if actor.rollout_correction == SHARED_CORRECTION:
            actor.rollout_correction = self.algorithm.rollout_correction
            yield from (f"actor_rollout_ref.actor.{problem}" for problem in actor.problems())
        self.algorithm.rollout_correction = actor.rollout_correction
        yield from self._loss_problems()
        if self.algorithm.replay.batches:
            yield from self._replay_problems()
        if self.algorithm.prompt_writer.path is not None:
            yield from self._writer_problems()
        if parts.rollout.scout.n and self.algorithm.rejection_aware_baseline:
            yield (
                "algorithm.rejection_aware_baseline: got true with actor_rollout_ref.rollout.scout.n="
                f"{parts.rollout.scout.n}, which chooses images by their advantages before any is scored; set it to "
                "false, or scout.n to 0"
            )
        yield from (f"actor_rollout_ref.{problem}" for problem in self._sharding_problems())
        prompts = self.data.train_batch_size
        mini = actor.ppo_mini_batch_size
        # Advantages need whole groups, so mini-batches are cut between prompts.
        if prompts % mini:
            yield (
                f"actor_rollout_ref.actor.ppo_mini_batch_size: got {mini}; it counts prompts and must divide "
                f"data.train_batch_size={prompts}"
            )
        # In bypass mode the loss rejects, after the advantages are known.
        if self.algorithm.rejection_aware_baseline and self.rollout_correction.bypass_mode:
            yield (
                "algorithm.rejection_aware_baseline: got true with rollout_correction.bypass_mode=true; there the loss "
                "itself rejects, long after the advantages. Set algorithm.rollout_correction.bypass_mode=false, or "
                "rejection_aware_baseline=false"
            )
        if actor.detach_unconditional and parts.rollout.pipeline.true_cfg_scale <= 1:
            yield (
                "actor_rollout_ref.actor.detach_unconditional: got true, but there is no unconditional half without "
                "guidance; set actor_rollout_ref.rollout.pipeline.true_cfg_scale above 1, or detach_unconditional=false"
            )

    def _preference_problems(self, rollout: RolloutConfig) -> Iterator[str]:
        """Settings of images that are drawn, where pairs of a file take their place."""
        objective = self.actor_rollout_ref.actor.diffusion_loss.objective
        if not objective.paired:
            yield (
                f"data.preferences: got files with loss_mode={objective.name}, which does not learn from pairs; set "
                "actor_rollout_ref.actor.diffusion_loss.loss_mode=dpo, or leave them out"
            )
        if self.reward.normalization is not None:
            yield (
                f"reward.normalization: got {self.reward.normalization} with data.preferences, which no reward scores; "
                "set it to null"
            )
        if self.trainer.rollout_data_dir is not None:
            yield (
                f"trainer.rollout_data_dir: got {self.trainer.rollout_data_dir} with data.preferences, whose images "
                "are in files already; set it to null"
            )
        late = {"ahead": rollout.ahead, "adapter_lag": rollout.adapter_lag, "scout.n": rollout.scout.n}
        for name, value, plain in (("n", rollout.n, 2), *((name, value, 0) for name, value in late.items())):
            if value != plain:
                yield (
                    f"actor_rollout_ref.rollout.{name}: got {value} with data.preferences, whose two images of a "
                    f"prompt are in a file; set it to {plain}"
                )

    def _writer_problems(self) -> Iterator[str]:
        """Settings of a run whose prompts are written anew for each batch."""
        rollout = self.actor_rollout_ref.rollout
        here = "algorithm.prompt_writer.path"
        if self.data.preferences:
            yield f"{here}: got a prompt writer with data.preferences, whose images are not drawn; set it to null"
        if self.algorithm.replay.batches:
            yield (
                f"algorithm.replay.batches: got {self.algorithm.replay.batches} with a prompt writer, whose prompts "
                "are in no file; set it to 0"
            )
        if self.reward.normalization is not None:
            yield (
                f"reward.normalization: got {self.reward.normalization} with a prompt writer, which learns from the "
                "weighted sum of the rewards as they are; set it to null"
            )
        shared = set(self.algorithm.prompt_writer.engine.devices or ()) & set(rollout.devices or ()) - {"cpu"}
        if shared:
            yield (
                f"algorithm.prompt_writer.engine.devices: names {', '.join(sorted(shared))}, as "
                "actor_rollout_ref.rollout.devices does; two engines would share its memory, so give each its own"
            )
        if rollout.scout.n and self.algorithm.prompt_writer.learns == "writer":
            yield (
                f"actor_rollout_ref.rollout.scout.n: got {rollout.scout.n} with prompt_writer.learns=writer, where no "
                "image is learned from; set it to 0"
            )

    def _replay_problems(self) -> Iterator[str]:
        """Settings of the buffer against the run that fills it."""
        replay = self.algorithm.replay
        rollout = self.actor_rollout_ref.rollout
        here = "algorithm.replay"
        if self.data.preferences:
            yield f"{here}.batches: got {replay.batches} with data.preferences, whose images are not drawn; set it to 0"
        if replay.old_policy == "current":
            if self.rollout_correction.bypass_mode:
                yield (
                    f"{here}.old_policy: got current with rollout_correction.bypass_mode=true, where the old policy is "
                    "the rollout's; set it to kept, or bypass_mode=false"
                )
            if self.algorithm.averages_old_policy:
                yield f"{here}.old_policy: got current with an old policy that is an average; set it to kept"
        if replay.max_staleness is not None and replay.max_staleness <= rollout.staleness:
            yield (
                f"{here}.max_staleness: got {replay.max_staleness}, but new images are {rollout.staleness} batches "
                f"stale; give {rollout.staleness + 1} or more, or null"
            )
        clean = self.actor_rollout_ref.actor.diffusion_loss.objective.clean
        if replay.steps is not None and (clean or replay.steps > rollout.window.size):
            reason = "objectives on clean images have no steps" if clean else f"a window has {rollout.window.size}"
            yield f"{here}.steps: got {replay.steps}, but {reason}; set it to null"
        elif replay.steps is not None and self.rollout_correction.plan().calibrated:
            yield (
                f"{here}.steps: got {replay.steps} with rollout_correction.rollout_rs_threshold=auto, whose bounds are "
                "those of whole windows; set it to null"
            )

    def _loss_problems(self) -> Iterator[str]:
        """Objective and limits against the rollouts that they are computed from."""
        rollout = self.actor_rollout_ref.rollout
        loss = self.actor_rollout_ref.actor.diffusion_loss
        objective = loss.objective
        here = "actor_rollout_ref.actor.diffusion_loss"
        # The quantiles of the gap come from rescored steps, which only the probe has.
        calibrated = {
            f"{here}.clip_ratio": loss.clip_ratio == "auto",
            "algorithm.rollout_correction.rollout_rs_threshold": self.rollout_correction.plan().calibrated,
        }
        for name, is_auto in calibrated.items():
            if is_auto and not rollout.probe.images:
                yield (
                    f"{name}: got auto, which follows what the probe measures; set "
                    "actor_rollout_ref.rollout.probe.images to 1 or more"
                )
        if not rollout.calculate_log_probs and self.records_steps:
            yield (
                "actor_rollout_ref.rollout.calculate_log_probs: got False; the rollout/training gap is measured from "
                "these log-probs, so leave it true"
            )
        clean, steps = self.actor_rollout_ref.actor.clean, rollout.pipeline.num_inference_steps
        if objective.clean and clean.distribution == "steps" and clean.places > steps:
            yield (
                f"actor_rollout_ref.actor.clean.places: got {clean.places} with distribution=steps, but a rollout has "
                f"{steps} steps; give at most {steps}"
            )
        for name, plain in (("decay_schedule", "copy"), ("decay", None), ("update_interval", 1)):
            value = getattr(self.algorithm, f"old_policy_{name}")
            if value != plain and not (objective.clean and objective.needs_old):
                yield (
                    f"algorithm.old_policy_{name}: got {value} with loss_mode={loss.loss_mode}, whose old policy is no "
                    f"average; leave it out, or set {here}.loss_mode to awm or diffusion_nft"
                )
        if self.data.preferences:
            yield from self._preference_problems(rollout)
        without_steps = f"loss_mode={loss.loss_mode}" if objective.clean else "prompt_writer.learns=writer"
        if not self.records_steps and rollout.algo.init_same_noise:
            yield (
                f"actor_rollout_ref.rollout.algo.init_same_noise: got true with {without_steps}, whose "
                "rollouts have no stochastic step, so that all images of a prompt would be the same; set it to false"
            )
        whole = rollout.window.size == rollout.pipeline.num_inference_steps
        if rollout.cache.name is not None and whole and self.records_steps and not rollout.cache.in_window:
            yield (
                f"actor_rollout_ref.rollout.cache.name: got {rollout.cache.name} with a window of all steps, outside "
                "of which nothing is left to cache; set it to null, cache.in_window=true, or a shorter window"
            )
        if not self.records_steps and self.algorithm.rejection_aware_baseline:
            yield (
                f"algorithm.rejection_aware_baseline: got true with {without_steps}, whose images are "
                "compared with no engine's log-probs before the advantages; set it to false"
            )
        sde_type = rollout.algo.sde_type
        if objective.sde_type not in (None, sde_type):
            yield (
                f"{here}.loss_mode: got {objective.name} with sde_type={sde_type}; set "
                f"actor_rollout_ref.rollout.algo.sde_type={objective.sde_type} or loss_mode={DEFAULT}"
            )
        side = "clip_ratio" if loss.clip_ratio_low is None else "clip_ratio_low"
        width = getattr(loss, side)
        # A ratio never falls below 0, so a clip band that reaches it has no lower side.
        if not isinstance(width, str) and width >= 1 and objective.clips:
            yield (
                f"{here}.{side}: got {width:g}, so the lower bound of the band, 1 - {side}, would be {1 - width:g}, "
                "and a ratio is never at 0 or below: nothing would be clipped there. Ratios here move by 1e-5 to 1e-2; "
                "give a number below 1, e.g. 1e-4"
            )

    def _sharding_problems(self) -> Iterator[str]:
        """Settings that a sharded or quantised transformer rules out: it has no copies, nor compiled blocks."""
        parts = self.actor_rollout_ref
        rollout = parts.rollout
        fsdp = parts.actor.fsdp_config
        if rollout.gather_weights and rollout.is_elsewhere:
            yield (
                f"rollout.gather_weights: got true with placement={rollout.placement}; an engine away from the trainer "
                f"has whole weights of its own, so set it to false, or actor_rollout_ref.rollout.placement={IN_TRAINER}"
            )
        elif rollout.gather_weights and not (fsdp.shard and fsdp.reshard_after_forward):
            yield (
                "rollout.gather_weights: got true, but no weights are given up between forwards; set it to false, or "
                f"{FSDP_FIELD}.shard=true with reshard_after_forward=true"
            )
        # Gathering hooks break the compiled graph at every block.
        if fsdp.shard and parts.model.torch_compile:
            yield (
                "model.torch_compile: got true with a sharded transformer, whose blocks call out to gather their "
                f"weights; set it to false, or {FSDP_FIELD}.shard=false"
            )
        rounded = parts.model.quantization
        if fsdp.shard and rounded is not None:
            yield (
                f"model.quantization: got {rounded} with a sharded transformer, whose slices are not rounded; set it "
                f"to null, or {FSDP_FIELD}.shard=false"
            )
        yield from rounded_base_problems(parts.model, rollout)
        if not fsdp.shard or rollout.is_elsewhere or not ENGINES[rollout.name].takes_actors_transformer:
            return
        if rollout.cache.name is not None:
            yield (
                f"rollout.cache.name: got {rollout.cache.name} with a sharded transformer; a process that skips a "
                f"block leaves the others waiting for its weights. Set it to null, or {FSDP_FIELD}.shard=false"
            )
        # Sharded weights exist once, so engine and actor cannot hold them in two forms.
        reason = f"with {FSDP_FIELD}.shard=true the {rollout.name} engine samples with the actor's own slices"
        yield from shared_weights_problems(parts.model, rollout, reason)

    @property
    def longest_wait(self) -> float:
        """Seconds that a process waits for the others: ``nccl_timeout``, or until all that one of them starts is up."""
        rollout = self.actor_rollout_ref.rollout
        server = self.reward.reward_model
        writer = self.algorithm.prompt_writer
        starts = [
            (rollout.is_elsewhere, rollout.process),
            (rollout.name == "vllm_omni", rollout.vllm_omni),
            (server.enable, server),
            (writer.path is not None and writer.engine.placement != IN_TRAINER, writer.engine.process),
        ]
        # A process that waits in a collective would end the run before the start's own message comes.
        longest = [one.start_timeout_s + 60 for starts_here, one in starts if starts_here]
        return max([self.actor_rollout_ref.nccl_timeout, *longest])

    @property
    def rollout_seed(self) -> int:
        """Seed of the rollouts' noise and window places."""
        own = self.actor_rollout_ref.rollout.seed
        return self.trainer.seed if own is None else own

    @property
    def records_steps(self) -> bool:
        """Images are drawn with an SDE window whose steps are learned from."""
        clean = self.actor_rollout_ref.actor.diffusion_loss.objective.clean
        return not clean and not self.algorithm.prompt_writer.learns_alone

    @property
    def rewrites(self) -> int:
        """Prompts that are drawn for each row of the data."""
        writer = self.algorithm.prompt_writer
        return 1 if writer.path is None else writer.rewrites

    @property
    def prompts(self) -> int:
        """Prompts of a batch that are drawn, over all processes."""
        return self.data.train_batch_size * self.rewrites

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of one pass over a batch."""
        return self.data.train_batch_size // self.actor_rollout_ref.actor.ppo_mini_batch_size

    @property
    def rollout_correction(self) -> RolloutCorrectionConfig:
        """The run's rollout correction."""
        return self.algorithm.rollout_correction

    @property
    def first_mini_batch_is_free(self) -> bool:
        """The update's own first forward supplies the first mini-batch's old policy in decoupled mode."""
        # Their mean and baseline are over the whole batch, before the first update.
        needs_all = self.rollout_correction.rollout_is_batch_normalize or self.algorithm.rejection_aware_baseline
        # An average is not the actor, not even before the first update.
        needs_all = needs_all or self.algorithm.averages_old_policy
        return self.actor_rollout_ref.actor.score == "auto" and not needs_all

    @property
    def scored_share(self) -> float:
        """Share of a batch that decoupled mode gives a scoring pass."""
        if not self.actor_rollout_ref.actor.diffusion_loss.objective.needs_old:
            return 0.0
        return 1 - 1 / self.mini_batches if self.first_mini_batch_is_free else 1.0

    def check_processes(self, num_processes: int) -> None:
        """Raise ``ValueError`` unless every process gets whole prompt groups of every mini-batch."""
        mini = self.actor_rollout_ref.actor.ppo_mini_batch_size
        # Advantages compare the images of one prompt, so that a group stays on one process.
        if mini % num_processes:
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size: got {mini} prompts for {num_processes} processes; it "
                "must be a multiple of the number of processes"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries."""
        return asdict(self)
