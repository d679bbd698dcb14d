"""How the actor's adapter reaches the rollout engine: after every step, late on purpose, or averaged for validation."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import RolloutEngine


class AdapterSync:
    """Keeps the engine at the adapter that rollouts are to be drawn with.

    With ``lag`` above 0 that is the adapter as it was ``lag`` batches ago, as an asynchronous engine would have it;
    the ``lag + 1`` newest states wait on the host. Until so many are known (the first steps, or after a resume, whose
    checkpoint holds the newest alone) it is the oldest one known.

    Args:
        engine: receives adapters; each ``sync`` replaces what it had, also under a version it has seen before.
        actor: whose adapter it is.
        lag: batches between the adapter that samples and the actor's.
    """

    def __init__(self, engine: RolloutEngine, actor: DiffusionActor, lag: int) -> None:
        self._engine, self._actor, self._lag = engine, actor, lag
        self._newest = -1
        self._waiting: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)

    @property
    def version(self) -> int:
        """The version that the next rollouts must report."""
        return self._waiting[0][0] if self._waiting else self._newest

    def push(self, version: int) -> None:
        """The actor's adapter now has this version: give the engine the one whose turn it is."""
        self._newest = version
        if self._lag:
            state = adapter_state(self._actor.transformer)
            self._waiting.append((version, {name: tensor.cpu() for name, tensor in state.items()}))
        self._sync_for_rollouts()

    def metrics(self) -> dict[str, float]:
        """``rollout/adapter_lag``, the steps between the adapter that samples now and the actor's, if there may be."""
        return {"rollout/adapter_lag": float(self._newest - self.version)} if self._lag else {}

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Inside, the engine holds the averaged adapter, or without an average the newest one."""
        averaged = self._actor.averaged_state()
        if averaged is None and self.version == self._newest:
            yield
            return
        self._engine.sync(adapter_state(self._actor.transformer) if averaged is None else averaged, self._newest)
        try:
            yield
        finally:
            self._sync_for_rollouts()

    def _sync_for_rollouts(self) -> None:
        state = self._waiting[0][1] if self._waiting else adapter_state(self._actor.transformer)
        self._engine.sync(state, self.version)
