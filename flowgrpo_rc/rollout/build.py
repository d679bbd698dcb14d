"""Build the engine of a configuration, beside the actor or elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.dtypes import set_tf32, torch_dtype
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.rollout.base import RolloutEngine
from flowgrpo_rc.rollout.config import ALONE, RolloutConfig, Share
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.rollout.pool import RolloutPool
from flowgrpo_rc.rollout.process import check_process, process_handles
from flowgrpo_rc.rollout.ray.handle import check_cluster, ray_handles
from flowgrpo_rc.rollout.weights import on_device


def build_engine(
    config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any, share: Share = ALONE
) -> RolloutEngine:
    """The engine ``config.name`` around the trainer's ``model``, before the actor attaches its adapter. With another
    ``config.placement`` than ``trainer``, a ``RolloutPool`` of engines.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        model: the trainer's model.
        lora: the section ``actor_rollout_ref.model``.
        device: the trainer's device.
        share: which of the trainer processes of this machine this one is.

    Raises:
        ImportError, ValueError, RolloutError: see ``check_placement`` and the engine; or one does not start.
    """
    # Engines elsewhere compute on the trainer's kind of device, and the proof needs to know how they round.
    config = replace(config, quantization=on_device(config.quantization, torch.device(device)))
    # An engine beside the actor needs no pool: the trainer's thread calls it.
    if not config.is_elsewhere:
        return resolve_name(ENGINES[config.name].engine).from_config(config, model, lora, device)
    digest_of = digest_rule(config, lora)
    handles = ray_handles if config.placement == "ray" else process_handles
    return RolloutPool(
        handles(config, lora, device, share, model),
        digest_of=digest_of,
        dtype=torch_dtype(config.dtype),
        micro_batch_size=config.micro_batch_size,
    )


def build_engine_alone(rollout: RolloutConfig, model: ModelConfig, device: str) -> RolloutEngine:
    """The engine ``rollout.name`` in a process without a trainer, with a model of its own from the same files.

    On the same kind of device it draws the same bits as in the trainer's process: the weights go from the files through
    ``model.dtype`` to ``rollout.dtype``, and images are decoded in ``model.dtype``. No text encoder is read, since
    requests contain embeddings. Memory holds one copy of the transformer, and none if the engine reads the weights
    itself in a process below this one.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the section ``actor_rollout_ref.model``; its path must lead to the same pipeline from here.
        device: where this process computes, e.g. ``cuda:0``.

    Raises:
        UnsupportedModelError, ImportError, ValueError, RolloutError: as ``PipelineLoader`` and the engine.
    """
    entry = ENGINES[rollout.name]
    set_tf32(model.allow_tf32)
    loader = PipelineLoader(model.path, dtype=model.dtype, device=device, quantization=model.quantization)
    # An engine that reads the weights itself would otherwise hold them twice.
    loaded = loader.model if entry.reads_weights else loader.load()
    # The trainer sets this after loading, so it is not in the pipeline's files.
    loaded.batch_guidance = model.batch_guidance
    # Without an actor beside it the engine may convert the weights in place, which halves its memory.
    options: dict[str, Any] = {"alone": True} if entry.takes_actors_transformer else {}
    return resolve_name(entry.engine).from_config(rollout, loaded, model, device, **options)


def digest_rule(rollout: RolloutConfig, model: ModelConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """``RolloutEngine.digest_of`` of the engine with these settings, without an engine.

    Raises:
        ValueError: the engine runs in the trainer's process only.
    """
    return resolve_name(_rule_of(rollout))(rollout, model)


def check_placement(config: RolloutConfig, share: Share = ALONE) -> None:
    """Check that engines can run where ``config.placement`` puts them.

    Raises:
        ImportError, ValueError: they cannot; names the field and the remedy.
    """
    if config.is_elsewhere:
        # Both checks come before the model is loaded, which may take minutes.
        _rule_of(config)
        check = check_cluster if config.placement == "ray" else check_process
        check(config, share)


def check_engine(name: str) -> None:
    """Check that the packages of the engine ``name`` are installed.

    Raises:
        ImportError: one is missing; the message names it and the remedy.
    """
    check = ENGINES[name].check
    if check is not None:
        resolve_name(check)()


def _rule_of(rollout: RolloutConfig) -> str:
    """``EngineEntry.digest_rule`` of an engine that can run elsewhere."""
    rule = ENGINES[rollout.name].digest_rule
    if rule is None:
        able = ", ".join(name for name, entry in ENGINES.items() if entry.digest_rule)
        raise ValueError(
            f"actor_rollout_ref.rollout.name: got {rollout.name}, which has no digest_rule in ENGINES and samples in "
            f"the trainer's process alone; elsewhere there are {able}"
        )
    return rule
