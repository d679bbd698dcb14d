"""Build a run from its configuration: everything cheap is checked before anything expensive is loaded."""

import importlib.util
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.data import PromptRecord, PromptSampler, file_list, load_prompts
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.guard import Guard
from flowgrpo_rc.models import DiffusionModel, PromptEncoder, check_adapter_file, check_pipeline, load_model
from flowgrpo_rc.models.guidance import embeds_guidance, refuse_guidance_scale
from flowgrpo_rc.models.prompts import check_prompts
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rewards import RewardMix, build_reward
from flowgrpo_rc.rollout import RolloutEngine, build_engine
from flowgrpo_rc.rollout.engines import check_engine
from flowgrpo_rc.trainer.checkpoint import Fingerprint
from flowgrpo_rc.trainer.config import LOGGERS, FlowGRPOConfig
from flowgrpo_rc.trainer.fingerprint import fingerprint


@dataclass
class Run:
    """The parts of a run, checked and loaded."""

    config: FlowGRPOConfig
    accelerator: Any
    train_prompts: list[PromptRecord]
    val_prompts: list[PromptRecord]
    sampler: PromptSampler
    reward: RewardMix
    model: DiffusionModel
    encoder: PromptEncoder
    engine: RolloutEngine
    actor: DiffusionActor
    total_steps: int
    fingerprint: Fingerprint
    guard: Guard
    clip_bands: ClipBands | None = None
    """Calibrated clip bands, with ``clip_ratio=auto``."""
    rejection_bands: RejectionBands | None = None
    """Calibrated rejection bands, with ``rollout_rs_threshold=auto``."""


def build_run(config: FlowGRPOConfig, project_dir: str) -> Run:
    """Check data, rewards, processes and the model's index; then load the model.

    Raises:
        ValueError: the configuration does not fit the data, the processes or the model; names the field.
        FileNotFoundError, ImportError: a file or an extra is missing.
    """
    from accelerate import Accelerator

    rollout = config.actor_rollout_ref.rollout
    data = config.data
    _check_trackers(config.trainer.logger)
    check_engine(rollout.name)
    lora = config.actor_rollout_ref.model
    _check_guidance(config, check_pipeline(lora.path))
    if lora.lora_adapter_path:
        check_adapter_file(lora.lora_adapter_path, lora.lora_rank, lora.lora_alpha)
    train = _prompts(config, "data.train_files", data.train_files, data.train_max_samples)
    if not train:
        raise ValueError("data.train_files: is empty; give a .txt, .jsonl or .parquet file of prompts")
    val = _prompts(config, "data.val_files", data.val_files, data.val_max_samples)
    sampler = PromptSampler(len(train), data.train_batch_size, seed=data.seed, shuffle=data.shuffle)
    reward = build_reward(config.reward)
    for records, pipeline in ((train, rollout.pipeline), (val, rollout.validation_pipeline)):
        if not records:
            continue
        reward.check_prompts(
            [r.prompt for r in records],
            image_size=(pipeline.height, pipeline.width),
            sources=[r.source or str(i) for i, r in enumerate(records)],
            metadata=[r.metadata for r in records],
        )
    accelerator = Accelerator(
        cpu=config.trainer.device == "cpu",
        mixed_precision=config.trainer.mixed_precision,
        log_with=[name for name in config.trainer.logger if LOGGERS[name] is not None] or None,
        project_dir=project_dir,
    )
    config.check_processes(accelerator.num_processes)
    if config.actor_rollout_ref.model.torch_compile:
        _check_compiler(accelerator.device.type)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * sampler.batches_per_epoch
    model, encoder, engine, actor = _load(config, accelerator, total_steps, train, val)
    mode = ModeInForce.configured(config.actor_rollout_ref.actor)
    return Run(
        config=config,
        accelerator=accelerator,
        train_prompts=train,
        val_prompts=val,
        sampler=sampler,
        reward=reward,
        model=model,
        encoder=encoder,
        engine=engine,
        actor=actor,
        total_steps=total_steps,
        fingerprint=fingerprint(config, model),
        guard=Guard(mode),
        clip_bands=ClipBands.configured(mode.diffusion_loss),
        rejection_bands=RejectionBands.configured(mode.rollout_correction),
    )


def _load(
    config: FlowGRPOConfig,
    accelerator: Any,
    total_steps: int,
    train: list[PromptRecord],
    val: list[PromptRecord],
) -> tuple[DiffusionModel, PromptEncoder, RolloutEngine, DiffusionActor]:
    parts = config.actor_rollout_ref
    pipeline = parts.rollout.pipeline
    algo = parts.rollout.algo
    torch.manual_seed(config.trainer.seed)
    model = load_model(parts.model.path, dtype=parts.model.dtype, device=accelerator.device)
    model.check_request(pipeline.height, pipeline.width, pipeline.guidance_scale)
    validation = parts.rollout.validation_pipeline
    try:
        model.check_request(validation.height, validation.width, validation.guidance_scale)
    except ValueError as error:
        where = "actor_rollout_ref.rollout."
        raise ValueError(str(error).replace(f"{where}pipeline.", f"{where}val_kwargs.pipeline.")) from error
    encoder = PromptEncoder(model, pipeline.max_sequence_length, parts.model.prompt_cache_size)
    encoder.check_length(validation.max_sequence_length, "val_kwargs.pipeline")
    for records, length in ((train, pipeline.max_sequence_length), (val, validation.max_sequence_length)):
        cut = check_prompts(model, [(r.prompt, r.source) for r in records], length) if records else None
        if cut and accelerator.is_main_process:
            warnings.warn(cut, stacklevel=2)
    engine = build_engine(parts.rollout, model, parts.model, accelerator.device)
    torch.manual_seed(config.trainer.seed)
    mini_batches = config.data.train_batch_size // parts.actor.ppo_mini_batch_size
    actor = DiffusionActor(
        model,
        parts.actor,
        parts.model,
        accelerator,
        sde_type=algo.sde_type,
        noise_level=algo.noise_level,
        total_optimizer_steps=total_steps * mini_batches * parts.actor.ppo_epochs,
        score_batch_size=parts.rollout.log_prob_micro_batch_size_per_gpu,
    )
    if parts.model.lora_adapter_path:
        actor.load_adapter(Path(parts.model.lora_adapter_path))
    return model, encoder, engine, actor


def _check_guidance(config: FlowGRPOConfig, name: str) -> None:
    """Refuse, from the model's folder alone, a guidance scale that pipelines of the class ``name`` do not take."""
    path = config.actor_rollout_ref.model.path
    rollout = config.actor_rollout_ref.rollout
    embeds = embeds_guidance(name, resolve_asset(path))
    if embeds is None:
        return
    refuse_guidance_scale(name, embeds, rollout.pipeline.guidance_scale)
    refuse_guidance_scale(name, embeds, rollout.validation_pipeline.guidance_scale, "val_kwargs.pipeline")


def _prompts(config: FlowGRPOConfig, field: str, files: Any, limit: int | None) -> list[PromptRecord]:
    paths = [resolve_asset(path) for path in file_list(field, files)]
    return load_prompts(paths, prompt_key=config.data.prompt_key, max_samples=limit) if paths else []


def _check_trackers(names: list[str]) -> None:
    packages = [LOGGERS[name] for name in names]
    missing = [package for package in packages if package and importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"trainer.logger: {', '.join(missing)} is not installed; pip install 'flowgrpo_rc[trackers]' or "
            "leave it out"
        )
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.api.api_key:
            raise ValueError("trainer.logger: wandb has no API key; run `wandb login`, or set WANDB_MODE=offline")


def _check_compiler(device: str) -> None:
    """What ``torch.compile`` needs on this kind of device is only missed at the first forward, long after loading."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        remedy = f"the C++ compiler {compiler} is not on the PATH; install it, name another in the variable CXX"
    elif device == "cuda" and importlib.util.find_spec("triton") is None:
        remedy = "triton is not installed; pip install triton"
    else:
        return
    raise ImportError(f"actor_rollout_ref.model.torch_compile: got true, but {remedy}, or set it to false")
