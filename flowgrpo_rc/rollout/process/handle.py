"""An engine in a process of its own on one device of this machine, as a ``RolloutPool`` takes it."""

import weakref
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.base import RolloutHandle, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.rollout.host import check_elsewhere
from flowgrpo_rc.rollout.placement import Share, device_groups
from flowgrpo_rc.rollout.process.environment import check_devices, engine_environment, inside, with_threads
from flowgrpo_rc.rollout.process.parent import EngineProcess, Launch


class ProcessHandle:
    """An ``EngineHost`` in a process that ``start`` starts, and that ends with the trainer's whatever ends that.

    It has the trainer's number of threads, so that it draws the same bits on the same kind of device, and of GPUs it
    sees its own alone. It is given up by the time-outs of ``rollout.process``.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the section ``actor_rollout_ref.model``.
        device: where it computes, as this process names it.
        number: tells it from the other engines.

    Raises:
        ValueError: this process does not see the device, or the engine runs nowhere but in the trainer's process.
    """

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, device: str, number: int = 0) -> None:
        self.name = f"process {number} ({device})"
        check_elsewhere(rollout)
        check_devices(device)
        launch = Launch(
            module="flowgrpo_rc.rollout.process.host_server",
            settings=(rollout, model, inside(device)),
            environment=with_threads(engine_environment(device)),
        )
        self._process = EngineProcess(launch, rollout.process)
        self._at_exit = weakref.finalize(self, self._process.close)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._process.pid

    def start(self) -> None:
        """As ``RolloutHandle.start``; returns when the model is loaded."""
        self._process.start()

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutHandle.sync``; of a tensor that is a view all that it is a view of would travel."""
        return self._process.call("sync", dict(state), version)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutHandle.generate``."""
        return self._process.call("generate", request)

    def close(self) -> None:
        """As ``RolloutHandle.close``."""
        self._process.close()


def process_handles(
    rollout: RolloutConfig, lora: ModelConfig, device: Any, share: Share, model: DiffusionModel
) -> list[RolloutHandle]:
    """As ``PlacementEntry.handles``: this trainer process's engines on this machine, none of them started.

    Raises:
        ImportError, ValueError: as ``check_process``, ``ProcessHandle`` and the engine's own handle.
    """
    numbered = enumerate(_own_groups(rollout, share) or [(str(device),)])
    groups = {share.index + place * share.count: group for place, group in numbered}
    own = ENGINES[rollout.name].handle
    if own is None:
        return [ProcessHandle(rollout, lora, device, number) for number, (device,) in groups.items()]
    make = resolve_name(own).from_config
    return [make(rollout, model, lora, devices, number) for number, devices in groups.items()]


def check_process(rollout: RolloutConfig, share: Share) -> None:
    """As ``PlacementEntry.check``: this process sees its devices, and there is one for each process."""
    check_devices(*(device for group in _own_groups(rollout, share) for device in group))


def _own_groups(rollout: RolloutConfig, share: Share) -> list[tuple[str, ...]]:
    """The devices of this trainer process's engines; none where they are on its own."""
    if rollout.devices is None:
        return []
    groups = device_groups(rollout.devices)
    if len(groups) < share.count:
        raise ValueError(
            f"actor_rollout_ref.rollout.devices: has {len(groups)} engines for the {share.count} trainer processes of "
            "this machine; name at least one for each, or start fewer processes"
        )
    return groups[share.index :: share.count]
