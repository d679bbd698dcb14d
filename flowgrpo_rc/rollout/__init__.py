"""Rollout engines: they sample images and record what the actor trains on.

Floor 4: imports ``correction/``, ``sde/``, ``loss/``, ``batch`` and ``models/``. Names load on first use; the
configuration needs no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.rollout.base import (
        Echo,
        RolloutEngine,
        RolloutError,
        RolloutRequest,
        RolloutSyncError,
        Trajectories,
    )
    from flowgrpo_rc.rollout.config import RolloutConfig
    from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
    from flowgrpo_rc.rollout.engines import build_engine

__all__ = [
    "DiffusersEngine",
    "Echo",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "RolloutRequest",
    "RolloutSyncError",
    "Trajectories",
    "build_engine",
]

__getattr__, __dir__ = lazy_names(__name__)
