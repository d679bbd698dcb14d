"""The table of the rollout engines; importing this loads no torch.

To add an engine, write a class that follows ``rollout.base.RolloutEngine``, with the class method
``from_config(config, model, lora, device)``, and add its row to ``ENGINES``.
"""

from dataclasses import dataclass

from flowgrpo_rc.dtypes import EMULATED
from flowgrpo_rc.models.attention import ATTENTION_BACKENDS

QUANTIZATIONS = ("fp8", "int8", EMULATED)
"""Roundings of the ``diffusers`` engine's weights."""


@dataclass(frozen=True)
class EngineEntry:
    """A rollout engine, and the facts about it that are needed before it is loaded."""

    engine: str
    """``module:class`` of the engine."""
    check: str | None = None
    """``module:function`` without arguments that raises ``ImportError`` if a package that the engine needs is missing.
    It runs before anything expensive is loaded."""
    attention_backends: tuple[str, ...] = ()
    """Values that ``rollout.rollout_attn_backend`` may have."""
    quantizes: bool = False
    """The engine acts on ``rollout.quantization`` and ``merge_adapter``, which are refused without this."""
    compiles: bool = False
    """The engine acts on ``rollout.torch_compile``, which is refused without this."""
    takes_actors_transformer: bool = False
    """The engine samples with the actor's own transformer, or with a copy where its weights must differ. Its
    ``from_config`` also takes ``alone``, which is true if there is no actor beside it."""
    reads_weights: bool = False
    """The engine reads the weights from the pipeline's files itself, so that ``model`` may lack them."""
    digest_rule: str | None = None
    """``module:function`` from the sections ``rollout`` and ``model`` to the engine's ``digest_of``, without an engine.
    ``None`` for an engine that runs in the trainer's process only."""
    handle: str | None = None
    """``module:class`` of a ``RolloutHandle`` for an engine that has its own process anyway, called with
    ``(config, model, lora, devices, number)``. With ``None`` a ``ProcessHandle`` runs the engine."""


ENGINES: dict[str, EngineEntry] = {
    "diffusers": EngineEntry(
        "flowgrpo_rc.rollout.diffusers_engine:DiffusersEngine",
        attention_backends=ATTENTION_BACKENDS,
        quantizes=True,
        compiles=True,
        takes_actors_transformer=True,
        digest_rule="flowgrpo_rc.rollout.diffusers_engine:digest_rule",
    ),
    "vllm_omni": EngineEntry(
        "flowgrpo_rc.rollout.vllm_omni:VllmOmniEngine",
        check="flowgrpo_rc.rollout.vllm_omni.registry:check_versions",
        attention_backends=("TORCH_SDPA", "FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB"),
        compiles=True,
        reads_weights=True,
        digest_rule="flowgrpo_rc.rollout.vllm_omni.adapter:digest_rule",
        handle="flowgrpo_rc.rollout.vllm_omni.engine:VllmOmniHandle",
    ),
}
