"""The actor: the policy that is trained.

Floor 4: imports ``correction/``, ``sde/``, ``loss/``, ``batch`` and ``models/``. Names load on first use; the
configuration classes need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.actor.actor import DiffusionActor as DiffusionActor
    from flowgrpo_rc.actor.actor import NonFiniteUpdateError as NonFiniteUpdateError
    from flowgrpo_rc.actor.actor import UpdateResult as UpdateResult
    from flowgrpo_rc.actor.config import DiffusionActorConfig as DiffusionActorConfig
    from flowgrpo_rc.actor.config import DiffusionLossConfig as DiffusionLossConfig
    from flowgrpo_rc.actor.config import OptimizerConfig as OptimizerConfig
    from flowgrpo_rc.actor.mode import ModeInForce as ModeInForce

__getattr__, __dir__ = lazy_names(__name__)
