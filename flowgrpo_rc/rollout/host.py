"""An engine away from the trainer: what a process of its own, or an actor on another machine, runs.

The trainer's side needs ``digest_rule`` alone, which says what an adapter's digest must be without an engine.
"""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.rollout.base import RolloutEngine, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engines import ENGINES


class EngineHost:
    """The engine ``rollout.name`` with a model of its own, loaded here from the files that the trainer loads.

    It draws the bits that the engine draws in the trainer's process on the same kind of device: the weights go from
    the files through ``model.dtype`` to ``rollout.dtype``, and images are decoded in ``model.dtype``. No text encoder
    is read, since requests bring embeddings. Memory holds one copy of the transformer; an engine that reads the weights
    itself, in a process below this one, is given none here.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the section ``actor_rollout_ref.model``; its path must lead to the same pipeline from here.
        device: where this process computes, e.g. ``cuda:0``.

    Raises:
        UnsupportedModelError, ImportError, ValueError, RolloutError: as ``PipelineLoader`` and the engine.
    """

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: str) -> None:
        entry = ENGINES[rollout.name]
        loader = PipelineLoader(model.path, dtype=model.dtype, device=device)
        loaded = loader.model if entry.reads_weights else loader.load()
        loaded.batch_guidance = model.batch_guidance
        options: dict[str, Any] = {"alone": True} if entry.takes_actors_transformer else {}
        self.engine: RolloutEngine = resolve_name(entry.engine).from_config(rollout, loaded, model, device, **options)

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Take over an adapter; returns the digest of what the engine then holds.

        Raises:
            AdapterMismatchError, RolloutError: as the engine's.
        """
        return self.engine.sync(state, version)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request, whose tensors are on the host.

        Raises:
            RolloutError: as the engine's.
        """
        return self.engine.generate(request)

    def close(self) -> None:
        """Release the model, and what the engine has started."""
        self.engine.close()


def check_elsewhere(rollout: RolloutConfig) -> None:
    """Refuse an engine that samples in the trainer's process alone.

    Raises:
        ValueError: names the engine.
    """
    if ENGINES[rollout.name].digest_rule is None:
        able = ", ".join(name for name, entry in ENGINES.items() if entry.digest_rule)
        raise ValueError(
            f"actor_rollout_ref.rollout.name: got {rollout.name}, which has no digest_rule in ENGINES and samples in "
            f"the trainer's process alone; elsewhere there are {able}"
        )


def digest_rule(rollout: RolloutConfig, model: ModelConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """``RolloutEngine.digest_of`` of the engine that a host with these sections has, from ``state`` alone.

    Raises:
        ValueError: see ``check_elsewhere``.
    """
    check_elsewhere(rollout)
    return resolve_name(str(ENGINES[rollout.name].digest_rule))(rollout, model)
