"""Give a rollout engine, of images or of prompts, the actor's adapter: after every step, late on purpose, or averaged
for validation."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from flowgrpo_rc.models.lora import adapter_state, load_adapter_state
from flowgrpo_rc.rollout import RolloutEngine, RolloutPool
from flowgrpo_rc.rollout.proof import HeldAdapter, check_adapter
from flowgrpo_rc.transfers import to_host


@runtime_checkable
class TakesAdapter(Protocol):
    """An engine of images or of prompts."""

    def sync(self, state: Mapping[str, Tensor], version: int) -> str: ...
    def digest_of(self, state: Mapping[str, Tensor]) -> str: ...


@runtime_checkable
class TrainsAdapter(Protocol):
    """An actor of images or of prompts."""

    transformer: Any
    """The network with the adapter."""

    def averaged_state(self) -> dict[str, Tensor] | None: ...


@dataclass(frozen=True, eq=False)
class KnownAdapter:
    """The actor's adapter as it was before a batch, or the old policy's of that time where it is an average."""

    version: int  # number of batches learned from by then
    state: dict[str, Tensor] | None  # on the host; ``None`` for the adapter that the actor has now


class AdapterSync:
    """Keeps the engine at the adapter that rollouts must be drawn with, and checks that the engine holds it.

    Batch ``k`` is drawn with the actor's adapter before batch ``k - lag``, or with the oldest known one: at the start
    of a run, and after a resume from a checkpoint with fewer adapters. The ``lag + 1`` newest are kept on the host.
    ``ahead`` is the number of batches that are requested of the engine early.

    With ``old_decay`` the old policy, which draws the images, is an average of the actor's adapters (arXiv 2509.16117).
    It is pushed in the place of the actor's own. ``old_decay(k)`` of its weights remains after batch ``k``.
    ``scouts`` is an engine that is given what the first one draws batches with.
    """

    def __init__(
        self,
        engine: TakesAdapter,
        actor: TrainsAdapter,
        lag: int,
        ahead: int = 0,
        old_decay: Callable[[int], float] | None = None,
        scouts: RolloutEngine | None = None,
    ) -> None:
        self._engine = engine
        self._scouts = scouts
        self._actor = actor
        self._lag = lag
        self._old_decay = old_decay
        # The average; None before the first ``push`` and where the old policy is the actor's own.
        self._old: KnownAdapter | None = None
        self._ahead = ahead
        # Oldest first.
        self._known: deque[KnownAdapter] = deque(maxlen=lag + 1)
        # The adapter that the engine was given last; None for an average.
        self._given: KnownAdapter | None = None
        self.held = HeldAdapter(-1, "")  # the adapter that images requested now must be drawn with
        self.held_by_scouts = self.held  # the same of the scouts' own engine

    @property
    def behind(self) -> int:
        """Steps between the adapter that drew the current batch and the actor's; 0 before the first ``push``."""
        return self._known[-1].version - self._of_batch(self._known[-1].version).version if self._known else 0

    @property
    def older(self) -> dict[int, dict[str, Tensor]]:
        """Adapters besides the actor's own that later batches may be drawn with, by version."""
        return {one.version: one.state for one in list(self._known)[:-1] if one.state is not None}

    @property
    def old(self) -> dict[str, Tensor] | None:
        """The averaged old policy, float32 on the host; ``None`` where it is the actor before the batch."""
        return None if self._old is None else self._old.state

    def restore(
        self, version: int, older: Mapping[int, dict[str, Tensor]], old: dict[str, Tensor] | None = None
    ) -> None:
        """Take over ``older`` and ``old`` of the run that this one continues at ``version``, before the first
        ``push``."""
        # In order, because the oldest leaves first.
        self._known.extend(KnownAdapter(version, older[version]) for version in sorted(older))
        if self._old_decay is not None and old is not None:
            self._old = KnownAdapter(version, old)

    def push(self, version: int) -> None:
        """Record the actor's adapter under this version, and give the engine the one for the batch it draws next.
        Raises ``RolloutSyncError`` if the engine does not hold what it was given; a pool raises it at its next call."""
        state = None
        if self._old_decay is not None:
            state = self._follow(version, self._old_decay)
        elif self._lag:
            # On the host: many adapters would fill the device, and only the oldest is needed there.
            state = to_host(adapter_state(self._actor.transformer))
        self._known.append(KnownAdapter(version, state))
        self.give_for(version + self._ahead)

    def give_for(self, step: int) -> None:
        """Give the engine the adapter that batch ``step`` is drawn with; raises as ``push`` does."""
        adapter = self._of_batch(step)
        # With a lag, or for a batch that is submitted early, the engine may hold it already.
        if adapter is not self._given:
            self._give_known(adapter)

    def metrics(self) -> dict[str, float]:
        """With a lag ``rollout/adapter_lag``, steps between the adapter that drew this batch and the actor's; with an
        averaged old policy ``actor/old_policy_decay``, the share of it that was kept before this batch."""
        metrics = {"rollout/adapter_lag": float(self.behind)} if self._lag else {}
        if self._old_decay is not None and self._old is not None:
            metrics["actor/old_policy_decay"] = self._old_decay(self._old.version)
        return metrics

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Inside, the engine holds the averaged adapter, or without an average the newest one. Before the first
        ``push`` the engine holds none, and refuses to draw."""
        averaged = self._actor.averaged_state()
        given_own = self._old_decay is None and self._known and self._given is self._known[-1]
        if not self._known or (averaged is None and given_own):
            yield
            return
        # Rollouts in flight were requested with it, and the next ones need it again.
        before = self._given
        self._give(adapter_state(self._actor.transformer) if averaged is None else averaged, self._known[-1].version)
        self._given = None
        try:
            yield
        finally:
            if before is not None:
                self._give_known(before)

    @contextmanager
    def actor_at_rollout_version(self) -> Iterator[None]:
        """Inside, the actor has the adapter that drew the current batch; afterwards its own again, bit for bit."""
        with self.actor_with(self._of_batch(self._known[-1].version).state if self.behind else None):
            yield

    @contextmanager
    def actor_at_old_policy(self) -> Iterator[None]:
        """Inside, the actor has the averaged old policy; afterwards its own again, bit for bit."""
        with self.actor_with(self.old):
            yield

    @contextmanager
    def actor_with(self, state: dict[str, Tensor] | None) -> Iterator[None]:
        """Inside, the actor has the adapter ``state``, unless it is ``None``; afterwards its own again, bit for bit."""
        if state is None:
            yield
            return
        own = adapter_state(self._actor.transformer)  # a copy, so loading the other one does not change it
        load_adapter_state(self._actor.transformer, state)
        try:
            yield
        finally:
            load_adapter_state(self._actor.transformer, own)

    def _follow(self, version: int, old_decay: Callable[[int], float]) -> dict[str, Tensor]:
        """The old policy's weights after it has followed the actor's; the first ones are the actor's."""
        own = {name: value.float() for name, value in to_host(adapter_state(self._actor.transformer)).items()}
        # A resumed run pushes the version that it has restored.
        if self.old is None or self._old is None:
            state = own
        elif self._old.version == version:
            state = self.old
        else:
            # float32: what is added in a step is far below a bfloat16 weight's last digit.
            state = {name: value.lerp(self.old[name], old_decay(version)) for name, value in own.items()}
        self._old = KnownAdapter(version, state)
        return state

    def _of_batch(self, step: int) -> KnownAdapter:
        """The newest adapter at least ``lag`` steps older than the actor's at batch ``step``, or the oldest known."""
        old_enough = [one for one in self._known if one.version <= step - self._lag]
        return old_enough[-1] if old_enough else self._known[0]

    def _give_known(self, adapter: KnownAdapter) -> None:
        state = adapter.state or adapter_state(self._actor.transformer)
        self._give(state, adapter.version)
        if self._scouts is not None:
            self.held_by_scouts = given_to(self._scouts, state, adapter.version)
        self._given = adapter

    def _give(self, state: Mapping[str, Tensor], version: int) -> None:
        self.held = given_to(self._engine, state, version)


def given_to(engine: TakesAdapter, state: Mapping[str, Tensor], version: int) -> HeldAdapter:
    """Give an engine an adapter; returns the one that it must draw with from now on. Raises ``RolloutSyncError`` if it
    does not hold it; a pool raises it at its next call."""
    if isinstance(engine, RolloutPool):
        # Its engines may still draw with the adapter before; each is checked before it draws with this one.
        return engine.push(state, version)
    # Side by side: hashing the adapter twice would take seconds for a large one.
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(engine.digest_of, state)
        digest = engine.sync(state, version)
        held = HeldAdapter(version, expected.result())
    check_adapter(held, version, digest)
    return held
