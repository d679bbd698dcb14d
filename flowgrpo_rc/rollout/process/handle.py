"""An engine in a process of its own on one device of this machine, as a ``RolloutPool`` takes it."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name

from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutHandle, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.rollout.host import check_elsewhere
from flowgrpo_rc.rollout.process.environment import check_devices, engine_environment, inside, with_threads
from flowgrpo_rc.rollout.process.parent import EngineProcess, Launch


def process_handles(
    groups: Sequence[Sequence[str]], rollout: RolloutConfig, model: DiffusionModel, lora: ModelConfig
) -> list[RolloutHandle]:
    """A handle for each group of devices of this machine; nothing is started.

    Args:
        groups: as ``placement.device_groups`` gives them; only an engine with a handle of its own takes several.
        rollout: the section ``actor_rollout_ref.rollout``.
        model: the trainer's, which tells names and shapes.
        lora: the section ``actor_rollout_ref.model``.

    Raises:
        ImportError, ValueError: as ``ProcessHandle`` and the engine's own handle.
    """
    own = ENGINES[rollout.name].handle
    if own is None:
        return [ProcessHandle(rollout, lora, device, number) for number, (device,) in enumerate(groups)]
    make = resolve_name(own).from_config
    return [make(rollout, model, lora, devices, number) for number, devices in enumerate(groups)]


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
        with self._naming():
            self._process.start()

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutHandle.sync``; of a tensor that is a view all that it is a view of would travel."""
        with self._naming():
            return self._process.call("sync", dict(state), version)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutHandle.generate``."""
        with self._naming():
            return self._process.call("generate", request)

    def close(self) -> None:
        """As ``RolloutHandle.close``."""
        self._process.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Adds the engine to an error that ends the run; a pool adds it to the loss of one."""
        try:
            yield
        except EngineLostError:
            raise
        except RolloutError as error:
            raise RolloutError(f"rollout engine {self.name}: {error}") from error
