"""The rollout engines by name: the table that the configuration checks against. Importing this loads no torch.

A new engine is a class of its own and a row here, and so is another place for engines to run. The class follows
``rollout.base.RolloutEngine`` and has the class method ``from_config(config, model, lora, device)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.models.attention import ATTENTION_BACKENDS
from flowgrpo_rc.rollout.placement import ALONE, Share

if TYPE_CHECKING:
    from flowgrpo_rc.models.base import DiffusionModel
    from flowgrpo_rc.models.config import ModelConfig
    from flowgrpo_rc.rollout.base import RolloutEngine
    from flowgrpo_rc.rollout.config import RolloutConfig


@dataclass(frozen=True)
class EngineEntry:
    """Where an engine is, and what must be known of it before it is loaded."""

    engine: str
    """``module:class`` of the engine."""

    check: str | None = None
    """``module:function`` that takes nothing and raises ``ImportError`` where a package that the engine needs is
    missing; called before anything expensive is loaded. ``None`` where nothing is needed."""

    attention_backends: tuple[str, ...] = ()
    """What ``rollout.rollout_attn_backend`` may be: the names that the engine has for ways to compute attention."""

    quantizes: bool = False
    """Whether the engine acts on ``rollout.quantization``; an engine that does not refuses the setting."""

    takes_actors_transformer: bool = False
    """Whether the engine samples with the actor's own transformer, or a copy of it where its weights must differ. Its
    ``from_config`` also takes ``alone``, which says that there is no actor beside it."""

    reads_weights: bool = False
    """Whether the engine reads the weights from the pipeline's files itself, so that ``model`` may lack them."""

    digest_rule: str | None = None
    """``module:function`` that takes the sections ``rollout`` and ``model`` and gives the engine's ``digest_of``
    without an engine. ``None`` for an engine that samples in the trainer's process alone."""

    handle: str | None = None
    """``module:class`` of a ``RolloutHandle`` for an engine that has a process of its own anyway, with the class method
    ``from_config(config, model, lora, devices, number)``. ``None``: ``ProcessHandle`` puts it into one."""


ENGINES: dict[str, EngineEntry] = {
    "diffusers": EngineEntry(
        "flowgrpo_rc.rollout.diffusers_engine:DiffusersEngine",
        attention_backends=ATTENTION_BACKENDS,
        quantizes=True,
        takes_actors_transformer=True,
        digest_rule="flowgrpo_rc.rollout.diffusers_engine:digest_rule",
    ),
    "vllm_omni": EngineEntry(
        "flowgrpo_rc.rollout.vllm_omni:VllmOmniEngine",
        check="flowgrpo_rc.rollout.vllm_omni.versions:check_versions",
        attention_backends=("TORCH_SDPA", "FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB"),
        reads_weights=True,
        digest_rule="flowgrpo_rc.rollout.vllm_omni.adapter:digest_rule",
        handle="flowgrpo_rc.rollout.vllm_omni.handle:VllmOmniHandle",
    ),
}


@dataclass(frozen=True)
class PlacementEntry:
    """Where engines away from the trainer come from."""

    handles: str
    """``module:function`` that takes the sections ``rollout`` and ``model``, the trainer's device, its share of its
    machine and its model, and gives a ``RolloutHandle`` for each engine."""

    check: str
    """``module:function`` that takes the section ``rollout`` and the trainer's share of its machine, and raises
    ``ImportError`` or ``ValueError`` where there can be no such handles; called before anything expensive is loaded."""


ELSEWHERE: dict[str, PlacementEntry] = {
    "process": PlacementEntry(
        "flowgrpo_rc.rollout.process:process_handles", "flowgrpo_rc.rollout.process:check_process"
    ),
    "ray": PlacementEntry("flowgrpo_rc.rollout.ray.handle:ray_handles", "flowgrpo_rc.rollout.ray.handle:check_cluster"),
}


def check_placement(config: RolloutConfig, share: Share = ALONE) -> None:
    """Make sure that engines can be where ``config.placement`` puts them.

    Raises:
        ImportError, ValueError: they cannot; names the field and the remedy.
    """
    if config.is_elsewhere:
        from flowgrpo_rc.rollout.host import check_elsewhere

        check_elsewhere(config)
        resolve_name(ELSEWHERE[config.placement].check)(config, share)


def check_engine(name: str) -> None:
    """Make sure that the packages of the engine ``name`` are there.

    Raises:
        ImportError: one is missing; the message names it and the remedy.
    """
    check = ENGINES[name].check
    if check is not None:
        resolve_name(check)()


def build_engine(
    config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any, share: Share = ALONE
) -> RolloutEngine:
    """The engine ``config.name`` around the trainer's ``model``, before the actor attaches its adapter; or where
    ``config.placement`` puts engines elsewhere, a ``RolloutPool`` of them.

    Args:
        config, lora: the sections ``rollout`` and ``model``.
        model: the trainer's.
        device: the trainer's.
        share: which of the trainer processes of this machine this one is.

    Raises:
        ImportError, ValueError, RolloutError: see ``check_placement`` and the engine; or one does not start.
    """
    if not config.is_elsewhere:
        return resolve_name(ENGINES[config.name].engine).from_config(config, model, lora, device)
    from flowgrpo_rc.dtypes import torch_dtype
    from flowgrpo_rc.rollout.host import digest_rule
    from flowgrpo_rc.rollout.pool import RolloutPool

    handles = resolve_name(ELSEWHERE[config.placement].handles)(config, lora, device, share, model)
    return RolloutPool(
        handles,
        digest_of=digest_rule(config, lora),
        dtype=torch_dtype(config.dtype),
        micro_batch_size=config.micro_batch_size,
    )
