"""Build the parts of a run from its configuration; cheap checks come before expensive loads."""

import importlib.util
import json
import os
import shutil
import sys
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.data import PromptRecord, PromptSampler
from flowgrpo_rc.data.prompts import read_prompt_files
from flowgrpo_rc.dtypes import set_tf32, torch_dtype
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.guard import Guard
from flowgrpo_rc.models import PromptEncoder, check_adapter_file, check_pipeline
from flowgrpo_rc.models.attention import check_attention_backend, kernels_in_words
from flowgrpo_rc.models.base import Conditioning, DiffusionModel
from flowgrpo_rc.models.config import AS_ROLLOUT, ModelConfig
from flowgrpo_rc.models.quantization import check_packages
from flowgrpo_rc.models.sharding import check_sharding, processes_on_node, shard_base
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.planner.work import seconds_at_peak, step_flops
from flowgrpo_rc.replay import ReplayBuffer
from flowgrpo_rc.rewards import RewardMix, build_observers, build_reward
from flowgrpo_rc.rewards.mix import try_own
from flowgrpo_rc.rewards.preference import preference_reward
from flowgrpo_rc.rollout import RolloutEngine, RolloutPool, RolloutRequest, Trajectories, build_engine
from flowgrpo_rc.rollout.build import check_engine, check_placement
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig, Share
from flowgrpo_rc.rollout.engines import EMULATED
from flowgrpo_rc.rollout.proof import check_rollout
from flowgrpo_rc.rollout.weights import check_kernels, on_device
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.agreement import content_of_rewards, require_agreement, settings_of
from flowgrpo_rc.trainer.checkpoint import fingerprint, random_states, restore_random_states
from flowgrpo_rc.trainer.config import LOGGERS, FlowGRPOConfig
from flowgrpo_rc.trainer.dumps import ImageDump
from flowgrpo_rc.trainer.encoding import (
    Encoding,
    PromptSet,
    check_numbers,
    condition,
    fill_store,
    open_checked,
    references_digest,
)
from flowgrpo_rc.trainer.memory import check_memory
from flowgrpo_rc.trainer.writing import WRITTEN, PromptWriting
from flowgrpo_rc.writer.language import RequestTokens
from flowgrpo_rc.writer.process import check_writer_devices


class Run:
    """The parts of a run. Data, rewards, processes and the model's index are checked before the model is loaded.

    ``project_dir`` is the folder of the trackers. Without ``trains`` it draws and scores validation prompts alone: no
    training prompts are read, and what an update needs is not checked. Raises ``ValueError`` with the field if the
    configuration does not fit the data, the processes or the model; ``FileNotFoundError``, ``ImportError`` if a file or
    an extra is missing.
    """

    def __init__(self, config: FlowGRPOConfig, project_dir: str, *, trains: bool = True) -> None:
        self.config = config
        self._trains = trains
        lora = config.actor_rollout_ref.model
        _check_trackers(config.trainer.logger)
        # An engine that is not installed is refused before anything is loaded.
        check_engine(config.actor_rollout_ref.rollout.name)
        check_packages(lora.quantization, config.actor_rollout_ref.actor.optim.name)
        writer = config.algorithm.prompt_writer
        if writer.path is not None:
            check_packages(optimizer=writer.actor.optim.name, optimizer_of="algorithm.prompt_writer.actor")
        pipeline_class = check_pipeline(lora.path)
        if lora.lora_adapter_path:
            check_adapter_file(lora.lora_adapter_path, lora.lora_rank, lora.lora_alpha)
        data = config.data
        self.train_prompts, self.val_prompts = read_prompts(config, trains=trains)
        self.prompt_sets = prompt_sets(config, self.train_prompts, self.val_prompts)
        changed = None
        if writer.path is not None:
            requests = [(record.prompt, record.source) for one in self.prompt_sets for record in one.records]
            changed = RequestTokens(writer).check_requests(requests)
        if trains:
            self.sampler = PromptSampler(len(self.train_prompts), data.train_batch_size, data.seed, data.shuffle)
        for one in self.prompt_sets:
            check_numbers(pipeline_class, one.records)
        # Of pairs of a file no image is scored, and without validation none at all.
        scores = not trains or not data.preferences or bool(self.val_prompts)
        self.reward = build_reward(config.reward) if scores else preference_reward()
        self.observers: RewardMix | None = None
        """Scorers of validation images that do not enter the reward; ``None`` without any."""
        self.scouts_engine: RolloutEngine | None = None
        """The engine of scouts that are drawn again; ``None`` where ``engine`` draws them."""
        self.writer: PromptWriting | None = None
        """The prompt writer; ``None`` if the data's own prompts are drawn."""
        try:
            self._prepare(pipeline_class, project_dir, changed)
        except BaseException:
            if hasattr(self, "engine"):  # a later part has failed
                self.close_engines()
            self.end_rewards()
            raise

    def kernels_in_words(self) -> str:
        """Attention and products of the actor on this device."""
        model = self.model
        backend = self.config.actor_rollout_ref.model.attn_backend
        head = model.transformer.config.get("attention_head_dim")
        masks = model.masks_prompts or model.masks_attention
        return kernels_in_words(backend, head, masks, _attention_dtype(self.config), self.accelerator.device)

    def close_engines(self) -> None:
        """End the engines of images, scouts and prompts."""
        with ExitStack() as closing:  # all of them, also where one raises
            for engine in (self.engine, self.scouts_engine, None if self.writer is None else self.writer.engine):
                if engine is not None:
                    closing.callback(engine.close)

    def end_rewards(self) -> None:
        """End the server of a reward model and the worker processes of rewards."""
        self.reward.close()
        if self.observers is not None:
            self.observers.close()

    def _prepare(self, pipeline_class: str, project_dir: str, note: str | None) -> None:
        """Build everything that comes after the rewards, which must be able to score each prompt."""
        config = self.config
        trainer = config.trainer
        # Observers may use the reward model's server, which the reward has started.
        self.observers = build_observers(config.reward, self.reward.server) if self.val_prompts else None
        # Preferences are not scored.
        unscored = self.train_prompts if config.data.preferences else None
        scored = [(self.reward, one) for one in self.prompt_sets if one.records is not unscored]
        if self.observers is not None:
            scored += [(self.observers, one) for one in self.prompt_sets if one.records is self.val_prompts]
        for mix, one in scored:
            mix.check_prompts(
                [record.prompt for record in one.records],
                image_size=(one.pipeline.height, one.pipeline.width),
                sources=[record.source or str(i) for i, record in enumerate(one.records)],
                metadata=[record.metadata for record in one.records],
            )
        # Accelerate knows no tracker ``console``, and takes ``None`` for no trackers.
        trackers = [name for name in trainer.logger if LOGGERS[name] is not None] or None
        self.accelerator = make_accelerator(config, log_with=trackers, project_dir=project_dir)
        # A fresh run may have had to take another folder, which the main process alone knows.
        self.folder = RunFolder(Path(broadcast_object_list([project_dir])[0]))
        """Paths of the run, the same on all processes."""
        if note is not None and self.accelerator.is_main_process:
            warnings.warn(note, stacklevel=3)
        require_agreement(settings_of(config, self.train_prompts, self.val_prompts))
        if self._trains:
            config.check_processes(self.accelerator.num_processes)
        self._share = Share(self.accelerator.local_process_index, processes_on_node(self.accelerator.num_processes))
        check_placement(config.actor_rollout_ref.rollout, self._share)
        check_writer_devices(config.algorithm.prompt_writer, self._share)
        self.seconds_at_peak: float | None = None
        """Time of a step on a GPU of this kind at its peak; ``None`` if unknown."""
        self._planned = config.actor_rollout_ref.model
        """With ``enable_gradient_checkpointing=auto`` decided by the plan, where there is one."""
        if self._trains and self.accelerator.device.type == "cuda":
            self._plan()
        check_sharding(
            config.actor_rollout_ref.actor.fsdp_config, self.accelerator.num_processes, self.accelerator.device
        )
        parts = config.actor_rollout_ref
        for name, section in (("model", parts.model), ("rollout", parts.rollout)):
            if section.torch_compile:
                _check_compiler(f"actor_rollout_ref.{name}.torch_compile", self.accelerator.device.type)
        check_kernels(parts.rollout.quantization, torch_dtype(parts.rollout.dtype), self.accelerator.device)
        if parts.rollout.has_scouts_engine:
            scouts, where = parts.rollout.of_scouts, f"{parts.rollout.section}.scout.engine"
            check_kernels(scouts.quantization, torch_dtype(scouts.dtype), self.accelerator.device, where)
        _check_attention(config, pipeline_class, self.accelerator.device)
        if config.actor_rollout_ref.rollout.cache.name is not None:
            config.actor_rollout_ref.rollout.cache.checked()  # its options; the engine checks the transformer
        # Write the images of every rollout and of every validation; ``None`` if none are kept.
        self.rollout_dump, self.validation_dump = (
            None if folder is None else ImageDump(f"trainer.{field}", folder, self.accelerator)
            for field in ("rollout_data_dir", "validation_data_dir")
            for folder in [getattr(trainer, field)]
        )
        self.total_steps = trainer.total_training_steps or 1
        if self._trains and trainer.total_training_steps is None:
            self.total_steps = trainer.total_epochs * self.sampler.batches_per_epoch
        # A function that asks a served model is left out: it costs more than a trial should.
        if self.accelerator.is_main_process and self.reward.server is None:
            # Each mix once, with the first of its sets.
            self._try_own_rewards(dict(reversed(scored)))
        self._load_model()
        self.fingerprint = fingerprint(config, self.model, self.reward, references_digest(self.train_prompts))
        if self.writer is not None:
            self.fingerprint["writer"] = self.writer.fingerprint()
        require_agreement({"model or reward": self.fingerprint})
        mode = ModeInForce.configured(config.actor_rollout_ref.actor)
        self.guard = Guard(mode)
        self.clip_bands = ClipBands.configured(mode.diffusion_loss)
        """Calibrated clip bands; ``None`` without ``clip_ratio=auto``."""
        self.rejection_bands = RejectionBands.configured(mode.rollout_correction)
        """Calibrated rejection bands; ``None`` without ``rollout_rs_threshold=auto``."""

    def _plan(self) -> None:
        """Check memory and count the work, on the main process: the plan is the same for all, with its warnings."""
        if self.accelerator.is_main_process:
            device = torch.cuda.get_device_properties(self.accelerator.device)
            emulates = on_device("fp8", self.accelerator.device) == EMULATED
            processes = self.accelerator.num_processes
            plan = check_memory(self.config, processes, device.total_memory, emulates_fp8=emulates)
            if plan is not None:
                self.seconds_at_peak = seconds_at_peak(step_flops(plan), plan.run, device.name)
                self._planned = plan.run.model
        # All processes recompute or none: those that share weights gather a block for every forward.
        self._planned = broadcast_object_list([self._planned])[0]

    def conditioning(self, prompts: list[PromptRecord], pipeline: PipelineConfig) -> Conditioning:
        """Embeddings of ``prompts``, one row each, with negative prompts when guidance is on."""
        return condition(self.model, self.encoder, PromptSet(prompts, pipeline))

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample, and check that the engine used the adapter pushed last, and the requested schedule, guidance and
        noise."""
        trajectories = self.engine.generate(request)
        held = self.adapter.held
        check_rollout(request, trajectories, self.model, held, self.config.actor_rollout_ref.rollout.dtype)
        return trajectories

    def _try_own_rewards(self, scored: dict[RewardMix, PromptSet]) -> None:
        """Try the user's own functions of each mix with the first row of its prompts."""
        states = random_states()
        for mix, one in scored.items():
            row = one.records[0]
            metadata = dict(row.metadata)
            if self.config.algorithm.prompt_writer.path is not None:
                metadata[WRITTEN] = row.prompt
            size = (one.pipeline.height, one.pipeline.width)
            try_own(self.config.reward, mix.functions, row.prompt, metadata, source=row.source or "0", image_size=size)
        restore_random_states(states)
        # Engines in other processes need the memory of models that the trial has loaded.
        torch.cuda.empty_cache()

    def _load_model(self) -> None:
        """Load the model, and build encoder, engine and actor. Prompts are encoded before the transformer is read, so
        that it and the text encoders are never in memory together."""
        parts = self.config.actor_rollout_ref
        # Equal seeds on every process: the adapters must start equal.
        torch.manual_seed(self.config.trainer.seed)
        loader, self.store = open_checked(parts.model, self.prompt_sets, self.accelerator)
        self.encoding: Encoding | None = None
        """Counts of the prompts; ``None`` with a prompt writer, whose prompts are encoded as they come."""
        writes = self.config.algorithm.prompt_writer.path is not None
        if not writes:
            self.encoding = fill_store(loader.model, self.store, self.prompt_sets, self.accelerator)
        fsdp = parts.actor.fsdp_config
        # By the loader, before the engine and the actor are built around the transformer.
        shard = partial(shard_base, config=fsdp, device=self.accelerator.device) if fsdp.shard else None
        self.model = loader.load(shard)
        self.model.batch_guidance = parts.model.batch_guidance
        self.model.prompt_multiple = parts.model.prompt_length_multiple
        if writes:
            loader.read_text_encoders()  # for the whole run
        store = None if writes else self.store
        self.encoder = PromptEncoder(self.model, parts.rollout.pipeline.max_sequence_length, store)
        where = (self.model, parts.model, self.accelerator.device, self._share)
        self.engine = build_engine(parts.rollout, *where)
        if parts.rollout.has_scouts_engine and self._trains:
            self.scouts_engine = build_engine(parts.rollout.of_scouts, *where)
        # Again: loaders and engines draw different amounts, and the adapter must not depend on them.
        torch.manual_seed(self.config.trainer.seed)
        replay = self.config.algorithm.replay
        steps = self.total_steps * self.config.mini_batches * parts.actor.ppo_epochs
        steps += replay.optimizer_steps(self.total_steps, self.config.mini_batches, parts.rollout.staleness)
        self.actor = build_actor(self.model, self._planned, parts.rollout, parts.actor, self.accelerator, steps)
        algorithm, rollout = self.config.algorithm, parts.rollout
        # Without training the adapters that an engine gets have nothing to do with each other.
        decay = algorithm.old_decay if self._trains and algorithm.averages_old_policy else None
        # An engine in this process draws a batch when the trainer comes to it.
        ahead = rollout.ahead if isinstance(self.engine, RolloutPool) else 0
        self.adapter = AdapterSync(self.engine, self.actor, rollout.staleness, ahead, decay, self.scouts_engine)
        if writes:
            self.writer = PromptWriting(self.config, self.model, self.accelerator, self.total_steps, self._share)
        together = 2 if parts.actor.diffusion_loss.objective.paired else 1
        seed = self.config.rollout_seed
        self.replay = ReplayBuffer(self.folder.replay, replay, seed, recorded_settings(self.config), together)


SCORES_ALIKE = ("val_functions", "reward_model", "num_workers", "overlap", "timeout_s")
"""Fields of ``reward`` with which an image keeps its score."""


def recorded_settings(config: FlowGRPOConfig) -> dict[str, Any]:
    """Settings that recorded steps or noised images, and their advantages, must have in common with those that are
    learned from beside them."""
    parts, algorithm = config.actor_rollout_ref, config.algorithm
    rewards = {name: value for name, value in asdict(config.reward).items() if name not in SCORES_ALIKE}
    loss, algo, pipeline = parts.actor.diffusion_loss, parts.rollout.algo, parts.rollout.pipeline
    settings = {
        "loss_mode": loss.loss_mode,
        "awm_weighting": loss.awm_weighting,
        "noise_level": algo.noise_level,
        "sde_type": algo.sde_type,
        "model.timestep_dtype": parts.model.timestep_dtype,
        "rollout.dtype": parts.rollout.dtype,
        "algorithm.norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        "algorithm.global_std": algorithm.global_std,
        **{f"reward.{name}": value for name, value in rewards.items()},
        "content of rewards": content_of_rewards(config.reward),
        **{f"pipeline.{name}": value for name, value in asdict(pipeline).items()},
    }
    # As a checkpoint gives them back.
    return json.loads(json.dumps(settings, default=repr))


def build_actor(
    model: DiffusionModel,
    lora: ModelConfig,
    rollout: RolloutConfig,
    config: DiffusionActorConfig,
    accelerator: Any,
    total_optimizer_steps: int,
) -> DiffusionActor:
    """The actor of the sections ``model``, ``rollout`` and ``actor``, with the adapter that training starts from."""
    actor = DiffusionActor(
        model,
        config,
        lora,
        accelerator,
        sde_type=rollout.algo.sde_type,
        noise_level=rollout.algo.noise_level,
        total_optimizer_steps=total_optimizer_steps,
        score_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
        timestep_dtype=torch_dtype(rollout.dtype) if lora.timestep_dtype == AS_ROLLOUT else None,
    )
    if lora.lora_adapter_path:
        actor.load_adapter(Path(lora.lora_adapter_path).expanduser())
    return actor


def make_accelerator(config: FlowGRPOConfig, **more: Any) -> Any:
    """The ``Accelerator`` of a configuration; ``more`` are further arguments, as accelerate names them.

    A command that succeeds calls its ``end_training`` last: a thread of gloo that still runs when Python ends can abort
    the process.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    set_tf32(config.actor_rollout_ref.model.allow_tf32)
    return Accelerator(
        cpu=config.trainer.device == "cpu",
        mixed_precision=config.trainer.mixed_precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.longest_wait))],
        **more,
    )


def read_prompts(config: FlowGRPOConfig, *, trains: bool = True) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """The prompts of training and of validation. There may be no validation prompts; without ``trains`` there are no
    training prompts.

    Raises:
        ValueError: a file is missing or damaged, or there are no prompts.
    """
    data = config.data
    train: list[PromptRecord] = []
    if trains:
        files = data.preferences or data.train_files
        pairs = bool(data.preferences)
        train = read_prompt_files(files, data.prompt_key, data.train_max_samples, pairs=pairs)
    validation = read_prompt_files(data.val_files, data.prompt_key, data.val_max_samples)
    if not (train if trains else validation):
        files = "train_files" if trains else "val_files"
        raise ValueError(f"data.{files}: is empty; give a .txt, .jsonl or .parquet file of prompts")
    return train, validation


def prompt_sets(config: FlowGRPOConfig, train: list[PromptRecord], validation: list[PromptRecord]) -> list[PromptSet]:
    """The prompts of training and of validation, each if there are any, with their pipeline settings."""
    rollout = config.actor_rollout_ref.rollout
    sets = [
        PromptSet(train, rollout.pipeline, "pipeline"),
        PromptSet(validation, rollout.validation_pipeline, "val_kwargs.pipeline"),
    ]
    return [one for one in sets if one.records]


def _attention_dtype(config: FlowGRPOConfig) -> torch.dtype:
    """Precision of the actor's queries, keys and values."""
    # Under autocast the outputs of linear layers are bfloat16, for weights of any dtype.
    return torch_dtype("bfloat16" if config.trainer.mixed_precision == "bf16" else config.actor_rollout_ref.model.dtype)


def _check_attention(config: FlowGRPOConfig, name: str, device: torch.device) -> None:
    """Refuse attention backends that do not work on this device or with pipelines of the class ``name``."""
    parts = config.actor_rollout_ref
    folder = resolve_asset(parts.model.path)
    check = partial(check_attention_backend, pipeline_class=name, folder=folder, device=device)
    own = parts.model.attn_backend
    check("actor_rollout_ref.model.attn_backend", own, dtype=_attention_dtype(config), trains=True)
    field = "actor_rollout_ref.rollout.rollout_attn_backend"
    backend = parts.rollout.rollout_attn_backend
    if parts.rollout.name == "diffusers":
        for dtype in {parts.rollout.dtype, parts.rollout.of_scouts.dtype}:
            check(field, backend, dtype=torch_dtype(dtype), trains=False)
    elif device.type == "cpu" and backend not in (None, "TORCH_SDPA"):
        raise ValueError(f"{field}: got {backend}, which vllm-omni has on a GPU alone; set it to TORCH_SDPA or null")


def _check_trackers(names: list[str]) -> None:
    missing = [package for name in names if (package := LOGGERS[name]) and importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"trainer.logger: {', '.join(missing)} is not installed; pip install '.[trackers]' in a checkout, or "
            "leave it out"
        )
    # Without a key, wandb would ask at the terminal, which a job on a cluster does not have.
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.api.api_key:
            raise ValueError("trainer.logger: wandb has no API key; run `wandb login`, or set WANDB_MODE=offline")


def _check_compiler(field: str, device: str) -> None:
    """Refuse a machine without the compiler of ``torch.compile``, which would fail at the first forward."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        remedy = f"the C++ compiler {compiler} is not on the PATH; install it, name another in the variable CXX"
    # On a GPU torch.compile generates Triton kernels.
    elif device == "cuda" and importlib.util.find_spec("triton") is None:
        remedy = "triton is not installed; pip install triton"
    else:
        return
    raise ImportError(f"{field}: got true, but {remedy}, or set it to false")
