"""What the trainer and the process that speaks to Ray say to each other, over one pipe, matched by id."""

from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.rollout.placement import EngineTimeouts

LOST = "EngineLostError"
"""``Answer.kind`` where an engine is gone."""
CLOSE = "close"
"""``Ask.method`` that ends the process."""
READY = 0
"""The id of the answer that nothing has asked for: Ray is there."""


@dataclass(frozen=True)
class DriverSettings:
    """What the trainer says at the start."""

    address: str | None
    """Of the cluster; ``None``: Ray is started on this machine."""
    num_gpus: float
    """For each engine."""
    num_cpus: float
    """For each engine."""
    sections: bytes
    """Pickled ``RolloutConfig`` and ``ModelConfig``."""
    threads: int | None
    """For each engine's computations; ``None``: ``num_cpus``, unless a node's environment says something else."""
    timeouts: EngineTimeouts
    parent: int
    """Process id of the trainer."""


@dataclass(frozen=True)
class Ask:
    """What is to be done; answered by the same id."""

    id: int
    engine: int
    """Which of the engines."""
    method: str
    """``start``, ``sync``, ``generate``, ``end`` or, for an adapter that ``sync`` names then, ``keep``."""
    argument: Any = None
    """``sync``: key and version of the adapter. ``keep``: its key, and the keys that are still wanted."""
    has_payload: bool = False
    """Whether a message of plain bytes follows."""


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    id: int
    value: Any = None
    error: str | None = None
    """What went wrong, in a line."""
    kind: str = ""
    """Class of the error."""
    has_payload: bool = False
    """Whether a message of plain bytes follows."""
