"""The whole configuration tree. The dataclasses are the schema and hold every default; YAML sits on top."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.actor.config import DiffusionActorConfig
from flowgrpo_rc.checks import choice, fit_fields, non_negative, path, positive
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.data.config import DataConfig
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.loss.objectives import DEFAULT, Objective
from flowgrpo_rc.models.config import FSDP_FIELD, ModelConfig
from flowgrpo_rc.rewards.config import RewardConfig
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.rollout.placement import IN_TRAINER

LOGGERS: dict[str, str | None] = {"console": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""Where metrics can go besides ``metrics.jsonl``, and the package that each needs; ``console`` is the terminal, all
others are trackers of accelerate."""
LONGEST_TIMEOUT = 1e7
"""Seconds, about four months: libraries count a time-out in nanoseconds, which have an end."""
SHARED_CORRECTION = "${algorithm.rollout_correction}"

if TYPE_CHECKING:
    ResolvedCorrection = RolloutCorrectionConfig
else:
    # Hydra builds its schema from this annotation, and takes presets and the keys of other dialects only below ``Any``.
    ResolvedCorrection = Any


@documented_fields
@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """The section ``algorithm``."""

    adv_estimator: str = "flow_grpo"
    """Advantages within the images of one prompt."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the rewards' standard deviation; false is Dr.GRPO."""

    global_std: bool = True
    """Take that standard deviation over the whole batch instead of the prompt's group."""

    rejection_aware_baseline: bool = False
    """Decoupled mode: an image whose steps were all rejected does not enter its group's mean and standard deviation
    either. Needs the weights and the rejection before the advantages, so every image gets the scoring pass."""

    rollout_correction: ResolvedCorrection = field(default_factory=dict)  # pyright: ignore[reportAssignmentType]
    """Given as keys of ``RolloutCorrectionConfig``, or as a ``preset`` and what differs from it; null switches it off.
    ``FlowGRPOConfig`` resolves it once; from then on it is a ``RolloutCorrectionConfig``, the same as the actor's."""

    def __post_init__(self) -> None:
        fit_fields("algorithm", self)
        choice("algorithm.adv_estimator", self.adv_estimator, ("flow_grpo", "grpo"))


@documented_fields
@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig:
    """The section ``actor_rollout_ref``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: DiffusionActorConfig = field(
        default_factory=lambda: DiffusionActorConfig(rollout_correction=SHARED_CORRECTION)
    )
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    nccl_timeout: float = 600.0
    """Seconds that a process waits for the others (NCCL's and gloo's time-out) before it takes them for hung. Longer
    than any of them may be busy alone, with a reward for instance. An exception of one process ends all of them at
    once, without this wait."""

    def __post_init__(self) -> None:
        fit_fields("actor_rollout_ref", self)
        positive("actor_rollout_ref.nccl_timeout", self.nccl_timeout)
        if self.nccl_timeout > LONGEST_TIMEOUT:
            raise ValueError(
                f"actor_rollout_ref.nccl_timeout: got {self.nccl_timeout:g}; give at most {LONGEST_TIMEOUT:g} seconds"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The section ``trainer``."""

    total_epochs: int = 1
    """Passes over the training prompts, when ``total_training_steps`` is null."""

    total_training_steps: int | None = None
    """Batches of rollouts to train on."""

    save_freq: int = -1
    """Save a checkpoint every so many steps; -1 or 0: at the end only."""

    test_freq: int = -1
    """Validate every so many steps; -1 or 0: before and after training only."""

    val_before_train: bool = True
    """Validate before the first step."""

    logger: list[str] = field(default_factory=lambda: ["console"])
    """Where metrics go besides ``metrics.jsonl``; any of ``LOGGERS``."""

    project_name: str = "flowgrpo_rc"
    """First folder under ``outputs/`` and project of the trackers."""

    experiment_name: str = "run"
    """Second folder under ``outputs/`` and run name of the trackers."""

    default_local_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """The run folder."""

    resume_mode: str = "auto"
    """``auto``: from the run folder's latest checkpoint if there is one; ``disable``: start afresh in a folder of
    its own; ``resume_path``: from ``resume_from_path``."""

    resume_from_path: str | None = None
    """A ``checkpoints/step_N`` folder, for ``resume_mode=resume_path``."""

    max_actor_ckpt_to_keep: int | None = None
    """Keep this many checkpoints, the newest; null: all."""

    log_val_generations: int = 12
    """Validation images in the sample grids."""

    rollout_data_dir: str | None = None
    """Folder, as a whole path, for the images of every rollout, each with its prompt, seed, reward and the reward's
    parts; null writes none."""

    validation_data_dir: str | None = None
    """The same for the images of every validation; another folder."""

    profile_steps: list[int] = field(default_factory=list)
    """Training steps, the first is 1, to run under torch's profiler, which slows them down. Their traces and tables of
    operators go to ``profile/`` in the run folder, a pair for every process."""

    seed: int = 42
    """Seed of the adapter's start and of all rollout noise."""

    mixed_precision: str = "no"
    """``bf16`` runs the actor's forwards under autocast; log-prob arithmetic stays float32."""

    device: str = "auto"
    """``auto`` (an accelerator if there is one) or ``cpu``."""

    def __post_init__(self) -> None:
        fit_fields("trainer", self)
        positive("trainer.total_epochs", self.total_epochs)
        positive("trainer.total_training_steps", self.total_training_steps, optional=True)
        positive("trainer.max_actor_ckpt_to_keep", self.max_actor_ckpt_to_keep, optional=True)
        path("trainer.default_local_dir", self.default_local_dir)
        path("trainer.resume_from_path", self.resume_from_path or None, optional=True)
        self._check_dumps()
        for step in self.profile_steps:
            positive("trainer.profile_steps", step)
        choice("trainer.resume_mode", self.resume_mode, ("auto", "disable", "resume_path"))
        choice("trainer.device", self.device, ("auto", "cpu"))
        choice("trainer.mixed_precision", self.mixed_precision, ("no", "bf16"))
        non_negative("trainer.seed", self.seed)
        non_negative("trainer.log_val_generations", self.log_val_generations)
        for name in self.logger:
            choice("trainer.logger", name, list(LOGGERS))
        for name in ("save_freq", "test_freq"):
            if getattr(self, name) < -1:
                raise ValueError(f"trainer.{name}: got {getattr(self, name)}; give -1 (at the end only) or more")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            raise ValueError("trainer.resume_from_path: is empty; resume_mode=resume_path needs a checkpoint folder")

    def _check_dumps(self) -> None:
        """A relative path would mean another folder for every place that a run is started or resumed from."""
        for name in ("rollout_data_dir", "validation_data_dir"):
            value = getattr(self, name)
            path(f"trainer.{name}", value, optional=True)
            if value is not None and not os.path.isabs(os.path.expanduser(value)):
                raise ValueError(
                    f"trainer.{name}: got {value!r}, a relative path; give the whole one, e.g. {os.path.abspath(value)}"
                )
        given = [folder for folder in (self.rollout_data_dir, self.validation_data_dir) if folder is not None]
        if len({os.path.normpath(os.path.expanduser(folder)) for folder in given}) < len(given):
            raise ValueError(
                f"trainer.validation_data_dir: got {self.validation_data_dir!r}, which is rollout_data_dir too; give "
                "another folder, or one of them null"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class FlowGRPOConfig:
    """Everything a training run is configured by."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        fit_fields("", self)
        self._resolve_correction()
        actor = self.actor_rollout_ref.actor
        objective = actor.diffusion_loss.objective
        self._check_clip(objective)
        self._check_sharding()
        prompts = self.data.train_batch_size
        mini = actor.ppo_mini_batch_size
        if prompts % mini:
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size: got {mini}; it counts prompts and must divide "
                f"data.train_batch_size={prompts}"
            )
        if self.algorithm.rejection_aware_baseline and self.rollout_correction.bypass_mode:
            raise ValueError(
                "algorithm.rejection_aware_baseline: got true with rollout_correction.bypass_mode=true; there the loss "
                "itself rejects, long after the advantages. Set algorithm.rollout_correction.bypass_mode=false, or "
                "rejection_aware_baseline=false"
            )
        calibrated = {
            "actor_rollout_ref.actor.diffusion_loss.clip_ratio": actor.diffusion_loss.clip_ratio == "auto",
            "algorithm.rollout_correction.rollout_rs_threshold": self.rollout_correction.plan().calibrated,
        }
        for name, is_auto in calibrated.items():
            if is_auto and not self.actor_rollout_ref.rollout.probe.images:
                raise ValueError(
                    f"{name}: got auto, which follows what the probe measures; "
                    "set actor_rollout_ref.rollout.probe.images to 1 or more"
                )
        if actor.detach_unconditional and self.actor_rollout_ref.rollout.pipeline.true_cfg_scale <= 1:
            raise ValueError(
                "actor_rollout_ref.actor.detach_unconditional: got true, but there is no unconditional half without "
                "guidance; set actor_rollout_ref.rollout.pipeline.true_cfg_scale above 1, or detach_unconditional=false"
            )
        sde_type = self.actor_rollout_ref.rollout.algo.sde_type
        if objective.sde_type not in (None, sde_type):
            raise ValueError(
                f"actor_rollout_ref.actor.diffusion_loss.loss_mode: got {objective.name} with sde_type={sde_type}; set "
                f"actor_rollout_ref.rollout.algo.sde_type={objective.sde_type} or loss_mode={DEFAULT}"
            )

    def _resolve_correction(self) -> None:
        """One correction for both sections that show it."""
        actor = self.actor_rollout_ref.actor
        if actor.rollout_correction == SHARED_CORRECTION:
            actor.rollout_correction = self.algorithm.rollout_correction
            actor.__post_init__()
        # Where Hydra has followed the reference, the actor's section has been made from the same keys already.
        self.algorithm.rollout_correction = actor.rollout_correction

    def _check_clip(self, objective: Objective) -> None:
        """A ratio never falls below 0, so a clip band that reaches it has no lower side."""
        loss = self.actor_rollout_ref.actor.diffusion_loss
        side = "clip_ratio" if loss.clip_ratio_low is None else "clip_ratio_low"
        width = loss.clip_ratio if loss.clip_ratio_low is None else loss.clip_ratio_low
        if not isinstance(width, str) and width >= 1 and objective.clips:
            raise ValueError(
                f"actor_rollout_ref.actor.diffusion_loss.{side}: got {width:g}, so the lower bound of the band, "
                f"1 - {side}, would be {1 - width:g}, and a ratio is never at 0 or below: nothing would be clipped "
                "there. Ratios here move by 1e-5 to 1e-2; give a number below 1, e.g. 1e-4"
            )

    def _check_sharding(self) -> None:
        """What a divided transformer cannot do: it has no copies, and its blocks are not compiled."""
        parts = self.actor_rollout_ref
        rollout = parts.rollout
        fsdp = parts.actor.fsdp_config
        here = "actor_rollout_ref.rollout"
        if rollout.gather_weights and rollout.is_elsewhere:
            raise ValueError(
                f"{here}.gather_weights: got true with placement={rollout.placement}; an engine away from the trainer "
                f"has whole weights of its own, so set it to false, or {here}.placement={IN_TRAINER}"
            )
        if rollout.gather_weights and not (fsdp.shard and fsdp.reshard_after_forward):
            raise ValueError(
                f"{here}.gather_weights: got true, but no weights are given up between forwards; set it to false, or "
                f"{FSDP_FIELD}.shard=true with reshard_after_forward=true"
            )
        if not fsdp.shard:
            return
        if parts.model.torch_compile:
            raise ValueError(
                "actor_rollout_ref.model.torch_compile: got true with a sharded transformer, whose blocks call out to "
                f"gather their weights; set it to false, or {FSDP_FIELD}.shard=false"
            )
        if not ENGINES[rollout.name].takes_actors_transformer or rollout.is_elsewhere:
            return
        for name, actors in (
            ("quantization", None),
            ("dtype", parts.model.dtype),
            ("rollout_attn_backend", parts.model.attn_backend),
        ):
            value = getattr(rollout, name)
            if value != actors:
                same = "null" if actors is None else actors
                raise ValueError(
                    f"{here}.{name}: got {value}; with {FSDP_FIELD}.shard=true the {rollout.name} engine samples with "
                    f"the actor's own slices, so set it to {same}, as the actor has it, or sample with another engine"
                )

    @property
    def rollout_seed(self) -> int:
        """Seed of the rollouts' noise and window places."""
        own = self.actor_rollout_ref.rollout.seed
        return self.trainer.seed if own is None else own

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
        """Whether the update's own first forward supplies the first mini-batch's old policy in decoupled mode.

        Batch normalisation of the weights and a baseline that knows of rejection need every row's before.
        """
        needs_all = self.rollout_correction.rollout_is_batch_normalize or self.algorithm.rejection_aware_baseline
        return self.actor_rollout_ref.actor.score == "auto" and not needs_all

    @property
    def scored_share(self) -> float:
        """Share of a batch that decoupled mode gives a scoring pass."""
        return 1 - 1 / self.mini_batches if self.first_mini_batch_is_free else 1.0

    def check_processes(self, num_processes: int) -> None:
        """Raise ``ValueError`` unless every process gets whole prompt groups of every mini-batch."""
        mini = self.actor_rollout_ref.actor.ppo_mini_batch_size
        if mini % num_processes:
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size: got {mini} prompts for {num_processes} processes; it "
                "must be a multiple of the number of processes"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries."""
        return asdict(self)
