"""What the trainer and the engine's process say to each other: pickled messages over one pipe, matched by id."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from flowgrpo_rc.rollout.base import Echo

PIPELINES = {"QwenImagePipeline": "QwenImageRollout", "StableDiffusion3Pipeline": "StableDiffusion3Rollout"}
"""What draws each kind of pipeline: a class in ``pipeline.py``, which imports vllm."""


@dataclass(frozen=True)
class Settings:
    """How the engine's process sets itself up."""

    model: str
    """Folder or hub name of the diffusers pipeline."""
    pipeline: str
    """Its class, a key of ``PIPELINES``."""
    dtype: str
    vae_dtype: str
    max_batch: int
    """Images per forward."""
    batch_wait_ms: float
    init_timeout: float
    parent: int
    """Process id of the trainer; the engine ends when it does."""
    die_with_thread: bool
    """The trainer's main thread starts the engine, so the kernel may end it with that thread."""


@dataclass(frozen=True)
class Call:
    """A request to the engine's process."""

    id: int
    method: str
    argument: Any


@dataclass(frozen=True)
class Reply:
    """The answer to the call of the same id."""

    id: int
    value: Any = None
    error: str | None = None
    """One line: what went wrong."""
    error_type: str = ""


@dataclass(frozen=True)
class Heartbeat:
    """The process is alive, whatever it computes."""


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    pid: int
    seconds: float
    """From the start of the process."""
    versions: dict[str, str]


@dataclass(frozen=True)
class Sampled:
    """Images of one rollout, in the order of its rows, all tensors on the host."""

    images: Tensor
    record: dict[str, Tensor]
    echo: Echo


def send(connection: Connection, message: Any) -> None:
    """Plain pickle: torch's own reductions would pass tensors through shared memory files that outlive a kill."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """The next message; ``EOFError`` when the other side is gone. Only for pipes between our own processes."""
    return pickle.loads(connection.recv_bytes())
