"""Engines that go wrong, in a real run: each stops it with one line that names the cause, before any update."""

from dataclasses import replace

import pytest
import torch
from tests_support import same

from flowgrpo_rc.models.lora import adapter_parameters, adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, RolloutSyncError, diffusers_engine
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.run
WINDOW = ("actor_rollout_ref.rollout.algo.sde_window_range=[0,2]", "actor_rollout_ref.rollout.algo.sde_window_size=2")
CFG = "actor_rollout_ref.rollout.pipeline.true_cfg_scale=3.0"
LATE = "actor_rollout_ref.rollout.adapter_lag=1"
EMA = "actor_rollout_ref.actor.ema_decay=0.5"


class Engine(DiffusersEngine):
    """The diffusers engine with places where a fault can sit."""

    def understood(self, request):
        """The request as the engine understands it."""
        return request

    def generate(self, request):
        return super().generate(self.understood(request))


class StaleAdapter(Engine):
    """Acknowledges every push after the first, and keeps what it had."""

    def sync(self, state, version):
        if version == 0:
            return super().sync(state, version)
        self.adapter_version = version
        return self._held_digest()


class LyingAboutStaleAdapter(StaleAdapter):
    """Says what it should hold."""

    def sync(self, state, version):
        super().sync(state, version)
        return self.digest_of(state)


class OldVersion(Engine):
    """Loads the weights and forgets the version."""

    def sync(self, state, version):
        digest = super().sync(state, version)
        self.adapter_version = 0
        return digest


class UnboundModule(Engine):
    """One module's weights do not arrive: verl-omni's ``to_out.0``."""

    def sync(self, state, version):
        unbound = next(n for n in state if "to_out.0.lora_B" in n)
        held = adapter_state(self.transformer, self.adapter)[unbound]
        super().sync({**state, unbound: held}, version)
        return self._held_digest()


class TouchedAfterSync(Engine):
    """Somebody writes into the engine's adapter while it samples."""

    def understood(self, request):
        next(iter(adapter_parameters(self.transformer, self.adapter).values())).data.mul_(1.01)
        return request


class OtherPrecision(Engine):
    """Computes in float32 always."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **(settings | {"dtype": torch.float32}))


class NoGuidance(Engine):
    def understood(self, request):
        return replace(request, conditioning=replace(request.conditioning, negative=None))


class OtherGuidance(Engine):
    def understood(self, request):
        return replace(request, conditioning=replace(request.conditioning, true_cfg_scale=4.5))


class SwappedSeedsUnderAFalseEcho(Engine):
    """Copies the echo's seeds from the request, which an engine must not."""

    def generate(self, request):
        swapped = [request.seeds[1], request.seeds[0], *request.seeds[2:]]
        trajectories = super().generate(replace(request, seeds=swapped))
        return replace(trajectories, echo=replace(trajectories.echo, seeds=tuple(request.seeds)))


BEFORE_ANY_STEP = [
    (NoGuidance, (CFG,), "true_cfg_scale: got 1, expected 3; the engine ignored .* left out the negative prompts"),
    (SwappedSeedsUnderAFalseEcho, (), "starting noise: row 0 does not start from the noise of its seed"),
    (OtherPrecision, (), "compute dtype: got float32, expected bfloat16; the engine ignored .*rollout.dtype"),
    (
        TouchedAfterSync,
        (),
        "adapter version 0: digest of the engine's weights: got .*a stale adapter was left in place",
    ),
]
"""The other faults that the proof finds are in ``tests/rollout/test_proof.py``."""


@pytest.mark.parametrize(("engine", "settings", "message"), BEFORE_ANY_STEP, ids=lambda v: getattr(v, "__name__", ""))
def test_the_first_faulty_batch_stops_the_run(small_config, monkeypatch, engine, settings, message):
    monkeypatch.setattr(diffusers_engine, "DiffusersEngine", engine)
    trainer = FlowGRPOTrainer(small_config(*WINDOW, *settings))
    actor, before = trainer.run.actor, adapter_state(trainer.run.actor.transformer)
    with pytest.raises(RolloutSyncError, match=message) as error:
        trainer.train_step()
    assert "\n" not in str(error.value)
    assert same(adapter_state(actor.transformer), before)
    assert not actor.optimizer.state
    assert trainer.step == 0


AFTER_THE_FIRST_UPDATE = [
    (LyingAboutStaleAdapter, (), "adapter version 1: digest of the engine's weights: got"),
    (OldVersion, (), "sampled with adapter version 0, expected 1; the last sync did not arrive"),
    (UnboundModule, (LATE,), "adapter version 1: digest .*a module was not bound"),
]


@pytest.mark.parametrize(("engine", "settings", "message"), AFTER_THE_FIRST_UPDATE)
def test_no_batch_of_a_wrong_adapter_is_trained_on(small_config, monkeypatch, engine, settings, message):
    """The adapter starts at zero; what is not delivered shows from the first update on."""
    monkeypatch.setattr(diffusers_engine, "DiffusersEngine", engine)
    steps = ("trainer.total_training_steps=4", "trainer.val_before_train=false")
    trainer, updates = FlowGRPOTrainer(small_config(*WINDOW, *settings, *steps)), []
    update = trainer.run.actor.update
    trainer.run.actor.update = lambda *args, **kw: (updates.append(trainer.step), update(*args, **kw))[1]
    with pytest.raises(RolloutSyncError, match=message) as error:
        trainer.fit()
    assert "\n" not in str(error.value)
    assert updates == ([0, 1] if settings else [0])  # with a lag of 1, two batches are drawn with version 0


def for_validation(engine):
    """The fault in validation requests alone."""

    class Validating(engine):
        def understood(self, request):
            return super().understood(request) if request.window_starts is None else request

    return Validating


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        (OtherGuidance, (CFG,), "true_cfg_scale: got 4.5, expected 3;"),
        (StaleAdapter, (EMA,), "adapter version 1: digest of the engine's weights"),
    ],
)
def test_validation_is_checked_too(small_config, monkeypatch, engine, settings, message):
    monkeypatch.setattr(diffusers_engine, "DiffusersEngine", for_validation(engine))
    config = small_config(*WINDOW, *settings)
    with pytest.raises(RolloutSyncError, match=message):
        FlowGRPOTrainer(config).fit()
