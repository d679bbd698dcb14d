"""Rollout engines: they sample images and record what the actor trains on.

Floor 4: imports ``correction/``, ``sde/``, ``loss/``, ``batch`` and ``models/``. Names load on first use; the
configuration needs no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.rollout.base import Echo as Echo
    from flowgrpo_rc.rollout.base import EngineLostError as EngineLostError
    from flowgrpo_rc.rollout.base import RolloutEngine as RolloutEngine
    from flowgrpo_rc.rollout.base import RolloutError as RolloutError
    from flowgrpo_rc.rollout.base import RolloutRequest as RolloutRequest
    from flowgrpo_rc.rollout.base import RolloutSyncError as RolloutSyncError
    from flowgrpo_rc.rollout.base import Trajectories as Trajectories
    from flowgrpo_rc.rollout.build import build_engine as build_engine
    from flowgrpo_rc.rollout.config import RolloutConfig as RolloutConfig
    from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine as DiffusersEngine
    from flowgrpo_rc.rollout.pool import RolloutPool as RolloutPool

__getattr__, __dir__ = lazy_names(__name__)
