"""The actor: the policy that is trained.

Floor 4: imports ``correction/``, ``sde/``, ``loss/``, ``batch`` and ``models/``. Names load on first use; the
configuration classes need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.actor.actor import DiffusionActor, NonFiniteUpdateError, UpdateResult
    from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig, OptimizerConfig
    from flowgrpo_rc.actor.mode import ModeInForce

__all__ = [
    "DiffusionActor",
    "DiffusionActorConfig",
    "DiffusionLossConfig",
    "ModeInForce",
    "NonFiniteUpdateError",
    "OptimizerConfig",
    "UpdateResult",
]

__getattr__, __dir__ = lazy_names(__name__)
