"""How the actor's adapter reaches the rollout engine: after every step, late on purpose, or averaged for validation."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.models.lora import adapter_state, load_adapter_state
from flowgrpo_rc.rollout import RolloutEngine
from flowgrpo_rc.rollout.proof import HeldAdapter, check_adapter
from flowgrpo_rc.transfers import to_host


class AdapterSync:
    """Keeps the engine at the adapter that rollouts are to be drawn with, and checks that it holds it.

    With ``lag`` above 0 that is the adapter as it was ``lag`` batches ago, as an asynchronous engine would have it;
    the ``lag + 1`` newest states wait on the host. Until so many are known (the first steps, or after a resume, whose
    checkpoint holds the newest alone) it is the oldest one known.

    Args:
        engine: receives adapters; each ``sync`` replaces what it had, also under a version it has seen before.
        actor: whose adapter it is.
        lag: batches between the adapter that samples and the actor's.
    """

    def __init__(self, engine: RolloutEngine, actor: DiffusionActor, lag: int) -> None:
        self._engine = engine
        self._actor = actor
        self._lag = lag
        self._waiting: deque[tuple[int, dict[str, Tensor] | None]] = deque(maxlen=lag + 1)
        """Versions and states, the oldest first; it is the one to sample with. ``None``: the actor has it."""
        self.held = HeldAdapter(-1, "")
        """What the engine holds now."""

    @property
    def behind(self) -> int:
        """Steps between the adapter that draws rollouts and the actor's; 0 before the first ``push``."""
        if not self._waiting:
            return 0
        return self._waiting[-1][0] - self._waiting[0][0]

    def push(self, version: int) -> None:
        """The actor's adapter now has this version: give the engine the one whose turn it is.

        Raises:
            RolloutSyncError: the engine does not hold what it was given.
        """
        state = None
        if self._lag:
            # On the host: many adapters would fill the device, and only the oldest is needed there.
            state = to_host(adapter_state(self._actor.transformer))
        self._waiting.append((version, state))
        self._sync(self._state_for_rollouts(), self._waiting[0][0])

    def metrics(self) -> dict[str, float]:
        """``rollout/adapter_lag``, the steps between the adapter that samples now and the actor's, if there may be."""
        return {"rollout/adapter_lag": float(self.behind)} if self._lag else {}

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Inside, the engine holds the averaged adapter, or without an average the newest one.

        Before the first ``push`` it holds none, and says so itself when it is asked for images.
        """
        averaged = self._actor.averaged_state()
        if not self._waiting or (averaged is None and not self.behind):
            yield
            return
        self._sync(adapter_state(self._actor.transformer) if averaged is None else averaged, self._waiting[-1][0])
        try:
            yield
        finally:
            self._sync(self._state_for_rollouts(), self._waiting[0][0])

    @contextmanager
    def actor_at_rollout_version(self) -> Iterator[None]:
        """Inside, the actor has the adapter that rollouts are drawn with; afterwards its own again, bit for bit."""
        if not self.behind:
            yield
            return
        own = adapter_state(self._actor.transformer)  # a copy, which loading the other one leaves alone
        load_adapter_state(self._actor.transformer, self._state_for_rollouts())
        try:
            yield
        finally:
            load_adapter_state(self._actor.transformer, own)

    def _state_for_rollouts(self) -> dict[str, Tensor]:
        return self._waiting[0][1] or adapter_state(self._actor.transformer)

    def _sync(self, state: Mapping[str, Tensor], version: int) -> None:
        self.held = HeldAdapter(version, self._engine.digest_of(state))
        check_adapter(self.held, version, self._engine.sync(state, version))
