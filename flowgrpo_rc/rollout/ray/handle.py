"""Engines on a Ray cluster, as a ``RolloutPool`` has them."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.base import RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.ray.connection import RayConnection

_HERE = "actor_rollout_ref.rollout"


def check_ray() -> None:
    """Make sure that Ray is installed; imports nothing of it.

    Raises:
        ImportError: it is not; names the extra.
    """
    if find_spec("ray") is None:
        raise ImportError(
            f"{_HERE}.placement=ray needs Ray, which is not installed: pip install 'flowgrpo_rc[ray]' on every node, "
            f"or set {_HERE}.placement=process"
        )


def ray_handles(rollout: RolloutConfig, model: ModelConfig, device: Any) -> list["RayHandle"]:
    """The ``rollout.engines`` engines of one trainer process, which a ``RolloutPool`` starts.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the section ``actor_rollout_ref.model``.
        device: the trainer's own, of which a Ray that is started here keeps off.

    Raises:
        ImportError: Ray is not installed.
        ValueError: no cluster is named, and several trainer processes would each start a Ray of their own.
    """
    check_ray()
    connection = RayConnection(rollout, model, device)
    return [RayHandle(connection, index) for index in range(rollout.engines)]


class RayHandle:
    """An engine in an actor of a Ray cluster.

    An actor that dies, hangs or is on a node that is gone raises ``EngineLostError``. ``start`` has Ray find a place
    for another one, which may be on another node.
    """

    def __init__(self, connection: RayConnection, index: int) -> None:
        self.name = f"ray {index}"
        self._connection = connection
        self._index = index
        connection.join(index)
        self.place: tuple[str, int] | None = None
        """The node's name and the process there, of the engine that was started last."""

    def start(self) -> None:
        """Have Ray find a place for the engine, and load the model there.

        Raises:
            EngineLostError: no cluster answers, or no node has room.
            RolloutError: the model cannot be loaded there.
        """
        self.place = self._connection.start(self._index)

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Send the adapter, which goes to Ray once for all engines; returns the digest read back from the engine.

        Raises:
            EngineLostError, AdapterMismatchError, RolloutError: see ``RolloutHandle``.
        """
        return self._connection.sync(self._index, state, version)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            EngineLostError, RolloutError: see ``RolloutHandle``.
        """
        return self._connection.generate(self._index, request)

    def close(self) -> None:
        """End the actor, and with that of the last handle the connection to Ray."""
        self._connection.leave(self._index)
