"""What the trainer and an engine's process say to each other: pickled messages over one pipe, matched by id."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Start:
    """The first message: how the process sets itself up."""

    settings: Any
    """What its server is made from."""
    parent: int
    """Process id of the trainer; the process ends when the trainer does."""
    die_with_thread: bool
    """Whether the kernel may end the process with the trainer's thread that starts it: the main thread does."""


READY = 0
"""The id of the reply that no call asked for: the model is loaded, and calls are answered from now on."""
HEARTBEAT = None
"""The message that the process is alive, whatever it computes."""


@dataclass(frozen=True)
class Call:
    """A request to the engine's process; ``id`` counts them from 1."""

    id: int
    method: str
    """``generate``, ``sync`` or ``close``."""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The answer to the call of the same ``id``."""

    id: int
    value: Any = None
    """What the method returned."""
    error: str | None = None
    """What went wrong, in a line; ``None`` where nothing did."""
    error_type: str = ""
    """Class of the error."""


def send(connection: Connection, message: Any) -> None:
    """Plain pickle: torch's own reductions would pass tensors through shared memory files that outlive a kill."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """The next message; ``EOFError`` when the other side is gone. Only for pipes between our own processes."""
    return pickle.loads(connection.recv_bytes())
