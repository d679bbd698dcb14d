"""The class of Ray's actors. Importing this loads neither torch nor Ray."""

import os
from typing import Any

from flowgrpo_rc.processes import without_process_group
from flowgrpo_rc.threads import limit_spinning

LIFE = "life"
"""The concurrency group that answers while the engine computes."""


class EngineActor:
    """One engine on one node of the cluster; ``load`` comes before ``sync`` and ``generate``."""

    def __init__(self) -> None:
        self._engine: Any = None

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def alive(self) -> None:
        """Return at once, whatever the engine computes."""

    def load(self, rollout: Any, model: Any, device: str, threads: int | None) -> None:
        """Load the model.

        Args:
            rollout: the section ``actor_rollout_ref.rollout``.
            model: the section ``actor_rollout_ref.model``.
            device: as ``build_engine_alone``.
            threads: number of threads on the host; ``None`` leaves it to Ray, which sets ``num_cpus``.
        """
        # torch reads these variables when it is imported. The node's daemon may have been started by a trainer that
        # has a process group, and Ray's workers inherit its environment.
        for name in os.environ.keys() - without_process_group(os.environ).keys():
            del os.environ[name]
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        limit_spinning(os.environ)

        from flowgrpo_rc.rollout.build import build_engine_alone

        self._engine = build_engine_alone(rollout, model, device)

    def sync(self, state: Any, version: int) -> str:
        """As ``RolloutEngine.sync``."""
        return self._engine.sync(state, version)

    def generate(self, request: Any) -> Any:
        """As ``RolloutEngine.generate``."""
        return self._engine.generate(request)
