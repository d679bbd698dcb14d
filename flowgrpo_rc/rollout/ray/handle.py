"""Engines on a Ray cluster, as a ``RolloutPool`` has them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.host import check_elsewhere
from flowgrpo_rc.rollout.placement import ALONE, Share
from flowgrpo_rc.rollout.ray import check_ray
from flowgrpo_rc.rollout.ray.connection import RayConnection, cluster_address


def check_cluster(rollout: RolloutConfig, share: Share) -> None:
    """As ``PlacementEntry.check``; reaches for no cluster.

    Raises:
        ImportError: Ray is not installed.
        ValueError: no cluster is named, and several trainer processes would each start a Ray of their own.
    """
    check_ray()
    if cluster_address(rollout) is None and share.count > 1:
        field = "actor_rollout_ref.rollout.ray.address"
        raise ValueError(
            f"{field}: got null with {share.count} trainer processes on this machine, each of which would start a Ray "
            f"of its own; start one with `ray start --head` and set {field}=auto"
        )


def ray_handles(
    rollout: RolloutConfig,
    lora: ModelConfig,
    device: Any,
    share: Share = ALONE,
    model: DiffusionModel | None = None,
) -> list["RayHandle"]:
    """As ``PlacementEntry.handles``: the ``rollout.engines`` engines of one trainer process, none of them started.

    A Ray that is started here keeps off the trainer's ``device``; nothing is asked of its ``model``.

    Raises:
        ImportError, ValueError: see ``check_cluster``; or the engine runs nowhere but in the trainer's process.
    """
    check_cluster(rollout, share)
    check_elsewhere(rollout)
    connection = RayConnection(rollout, lora, device)
    return [RayHandle(connection, index) for index in range(rollout.engines)]


class RayHandle:
    """An engine in an actor of a Ray cluster.

    An actor that dies, hangs or is on a node that is gone raises ``EngineLostError``. ``start`` has Ray find a place
    for another one, which may be on another node.
    """

    def __init__(self, connection: RayConnection, index: int) -> None:
        self.name = f"ray {index}"
        self._has_worked = False
        self._connection = connection
        self._index = index
        connection.join(index)
        self.place: tuple[str, int] | None = None
        """The node's name and the process there, of the engine that was started last."""

    def start(self) -> None:
        """Have Ray find a place for the engine, and load the model there.

        Raises:
            EngineLostError: no cluster answers, or no node has room; or the model, which has been loaded before, cannot
                be loaded in this place.
            RolloutError: the model cannot be loaded.
        """
        try:
            self.place = self._connection.start(self._index)
        except RolloutError as error:
            if self._has_worked:
                raise EngineLostError(str(error)) from error
            raise
        self._has_worked = True

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
