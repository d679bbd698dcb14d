"""The engine's adapter: late on purpose for rollouts, the newest or the average for validation."""

import copy

import pytest
import torch
from tests_support import adapter_of, before_step, power_cut, rows_of, same
from tolerances import RATIO
from torch import nn

from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.config import AlgorithmConfig

LAG = "actor_rollout_ref.rollout.adapter_lag"
EMA = "actor_rollout_ref.actor.ema_decay"
LOSS_MODE = "actor_rollout_ref.actor.diffusion_loss.loss_mode"
WEIGHT = "layer.lora_A.default.weight"


class FakeEngine:
    """Remembers what it was given."""

    def __init__(self):
        self.adapter_version, self.held, self.syncs = -1, None, 0

    def sync(self, state, version):
        self.held, self.adapter_version = float(state[WEIGHT]), version
        self.syncs += 1
        return str(self.held)

    def digest_of(self, state):
        return str(float(state[WEIGHT]))


class FakeActor:
    """An adapter of one number."""

    def __init__(self, average=None):
        self.transformer = nn.Module()
        self.transformer.layer = nn.Module()
        self.transformer.layer.lora_A = nn.ModuleDict({"default": nn.Linear(1, 1, bias=False)})
        self.average = average

    def set(self, value):
        self.transformer.layer.lora_A["default"].weight.data.fill_(value)

    def averaged_state(self):
        return None if self.average is None else {WEIGHT: torch.full((1, 1), self.average)}


def walk(lag, versions, average=None):
    """Push adapters whose value is ten times their version; returns the sync and what the engine had after each."""
    engine, actor, seen = FakeEngine(), FakeActor(average), []
    sync = AdapterSync(engine, actor, lag)
    for version in versions:
        actor.set(10.0 * version)
        sync.push(version)
        assert engine.adapter_version == sync.held.version == version - sync.behind
        seen.append((engine.held, sync.metrics().get("rollout/adapter_lag")))
    return sync, engine, seen


@pytest.mark.parametrize(
    ("lag", "versions", "seen"),
    [
        (0, (0, 1, 2), [(0.0, None), (10.0, None), (20.0, None)]),
        (1, (0, 1, 2, 3), [(0.0, 0.0), (0.0, 1.0), (10.0, 1.0), (20.0, 1.0)]),
        (2, (0, 1, 2, 3), [(0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (10.0, 2.0)]),
        # resumed at step 7: nothing older is known
        (2, (7, 8, 9, 10), [(70.0, 0.0), (70.0, 1.0), (70.0, 2.0), (80.0, 2.0)]),
    ],
)
def test_the_engine_is_lag_batches_behind(lag, versions, seen):
    sync, _, got = walk(lag, versions)
    assert got == seen
    assert len([one for one in sync._known if one.state is not None]) == (0 if lag == 0 else lag + 1)


@pytest.mark.parametrize(
    ("lag", "average", "inside", "syncs"),
    [(0, None, 30.0, 0), (2, None, 30.0, 2), (0, 25.0, 25.0, 2), (2, 25.0, 25.0, 2)],
)
def test_validation_has_the_newest_or_the_average_and_gives_back(lag, average, inside, syncs):
    sync, engine, _ = walk(lag, (0, 1, 2, 3), average)
    before = (engine.held, engine.adapter_version, engine.syncs)

    def failing_validation():
        with sync.for_validation():
            assert (engine.held, engine.adapter_version) == (inside, 3)
            raise KeyError("the reward failed")

    with pytest.raises(KeyError):
        failing_validation()
    assert (engine.held, engine.adapter_version, engine.syncs - syncs) == before


DECAYS = {1: 0.5, 2: 1.0, 3: 0.25, 4: 0.0}
"""Of the old policy, after each batch."""


@pytest.mark.parametrize(("lag", "seen"), [(0, [0.0, 5.0, 5.0, 23.75, 40.0]), (1, [0.0, 0.0, 5.0, 5.0, 23.75])])
def test_an_averaged_old_policy_draws(lag, seen):
    """old <- decay old + (1 - decay) actor, for an actor of ten times the version: 0, .5 * 0 + .5 * 10 = 5, 5,
    .25 * 5 + .75 * 30 = 23.75, 40."""
    engine, actor = FakeEngine(), FakeActor()
    sync = AdapterSync(engine, actor, lag, old_decay=DECAYS.get)
    drawn, kept = [], []
    for version in range(5):
        actor.set(10.0 * version)
        sync.push(version)
        drawn.append(engine.held)
        kept.append(sync.metrics()["actor/old_policy_decay"] if version else None)
        with sync.actor_at_old_policy():
            assert (
                float(actor.transformer.layer.lora_A["default"].weight.detach())
                == [0.0, 5.0, 5.0, 23.75, 40.0][version]
            )
        with sync.for_validation():
            assert engine.held == 10.0 * version
        assert (engine.held, engine.adapter_version) == (drawn[-1], version - sync.behind)
    assert drawn == seen
    assert kept == [None, 0.5, 1.0, 0.25, 0.0]


def test_a_restored_old_policy_goes_on():
    engine, actor = FakeEngine(), FakeActor()
    sync = AdapterSync(engine, actor, 0, old_decay=DECAYS.get)
    sync.restore(2, {}, {WEIGHT: torch.full((1, 1), 5.0)})
    actor.set(20.0)
    sync.push(2)
    assert engine.held == 5.0
    actor.set(30.0)
    sync.push(3)
    assert engine.held == 23.75


@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        ({}, {1: 0.0, 500: 0.0}),
        ({"old_policy_decay_schedule": "linear_to_0_5"}, {1: 0.001, 100: 0.1, 500: 0.5, 900: 0.5}),
        (
            {"old_policy_decay_schedule": "delayed_linear_to_0_999"},
            {1: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 900: 0.999},
        ),
        ({"old_policy_decay": 0.9, "old_policy_decay_schedule": "linear_to_0_5"}, {1: 0.9, 900: 0.9}),
        ({"old_policy_update_interval": 3}, {1: 1.0, 2: 1.0, 3: 0.0, 4: 1.0, 6: 0.0}),
        ({"old_policy_decay": 0.0}, {1: 0.0}),
    ],
)
def test_decays_of_the_old_policy(settings, decays):
    algorithm = AlgorithmConfig(**settings)
    assert {batch: algorithm.old_decay(batch) for batch in decays} == pytest.approx(decays)
    assert algorithm.averages_old_policy is any(decays.values())


@pytest.mark.parametrize(
    ("objective", "setting"),
    [
        ("flow_grpo", "old_policy_decay=0.5"),
        ("dpo", "old_policy_decay_schedule=linear_to_0_5"),
        ("flow_grpo", "old_policy_update_interval=2"),
    ],
)
def test_an_average_without_a_use_is_refused(small_config, objective, setting):
    key, value = setting.split("=")
    message = f"algorithm.{key}: got {value} with loss_mode={objective}, whose old policy is no average; leave it out"
    with pytest.raises(ValueError, match=message):
        small_config(f"algorithm.{setting}", f"{LOSS_MODE}={objective}", "algorithm.rollout_correction=null")


@pytest.mark.run
@pytest.mark.parametrize("objective", ["awm", "diffusion_nft"])
def test_a_run_draws_and_compares_with_the_averaged_old_policy(small_config, objective):
    """The engine has the average that float64 gives, the actor has it while it scores, and a run that is stopped and
    resumed repeats all numbers."""
    settings = ("actor_rollout_ref.rollout.dtype=float32", "trainer.total_training_steps=4", "trainer.test_freq=1")
    settings += ("algorithm.rollout_correction=null", f"{LOSS_MODE}={objective}", "algorithm.old_policy_decay=0.75")
    settings += ("trainer.save_freq=2", "trainer.resume_mode=auto")
    trainer = FlowGRPOTrainer(small_config(*settings))
    actor, engine = trainer.run.actor, trainer.run.engine
    draw, score, expected, scored = trainer.rollouts.draw, actor.score, [], []

    def watched_draw():
        own = {name: value.double() for name, value in adapter_state(actor.transformer).items()}
        if expected:
            own = {name: 0.75 * expected[-1][name] + 0.25 * value for name, value in own.items()}
        expected.append(own)
        held = adapter_state(engine.transformer, engine.adapter)
        assert all(torch.allclose(value.double(), own[name], atol=1e-7) for name, value in held.items())
        return draw()

    def watched_score(batch, cond):
        scored.append(same(adapter_state(actor.transformer), adapter_state(engine.transformer, engine.adapter)))
        assert len(batch) == trainer.config.data.train_batch_size * trainer.config.actor_rollout_ref.rollout.n
        return score(batch, cond)

    trainer.rollouts.draw, actor.score = watched_draw, watched_score
    before_step(trainer, 3, power_cut)
    with pytest.raises(ConnectionError):
        trainer.fit()
    assert scored == [True] * 3
    resumed = FlowGRPOTrainer(small_config(*settings))
    assert resumed.step == 2
    rows = rows_of(resumed.fit().root)
    assert [row["actor/log_ratio_abs_mean_first"] > 0 for row in rows[1:]] == [False, True, True, True]
    assert not any(row["guard/alarms"] for row in rows[1:])
    assert rows_of(FlowGRPOTrainer(small_config(*settings, folder="whole")).fit().root) == rows


def test_before_the_first_push_nothing_is_behind():
    sync = AdapterSync(FakeEngine(), FakeActor(average=1.0), 1)
    assert (sync.behind, sync.metrics()) == (0, {"rollout/adapter_lag": 0.0})
    with sync.for_validation(), sync.actor_at_rollout_version():
        assert sync._engine.syncs == 0


def watch(trainer):
    """The actor's and the engine's adapter at every ``generate``, by whether it was a training rollout."""
    seen = {True: [], False: []}
    engine, actor = trainer.run.engine, trainer.run.actor
    generate = engine.generate

    def watched(request):
        states = (adapter_state(actor.transformer), adapter_state(engine.transformer, engine.adapter))
        seen[request.window_starts is not None].append(states)
        return generate(request)

    engine.generate = watched
    return seen


@pytest.mark.run
def test_a_run_with_lag_draws_with_the_adapter_before(small_config):
    """Float32 throughout: without lag the first ratio is 1; with lag 1 it is not, from the second batch on."""
    settings = ("actor_rollout_ref.rollout.dtype=float32", "trainer.total_training_steps=3", "trainer.test_freq=1")
    trainer = FlowGRPOTrainer(small_config(*settings, f"{LAG}=1"))
    seen = watch(trainer)
    late = trainer.fit().rows()[1:]
    actor, engine = zip(*seen[True], strict=True)
    assert [next(i for i in range(3) if same(actor[i], held)) for held in engine] == [0, 0, 1]
    assert all(same(*pair) for pair in seen[False])
    assert [row["rollout/adapter_lag"] for row in late] == [0.0, 1.0, 1.0]
    prompt = FlowGRPOTrainer(small_config(*settings, folder="prompt")).fit().rows()[1:]
    assert all("rollout/adapter_lag" not in row and row["actor/ratio_deviation_first"] < RATIO for row in prompt)
    assert late[0]["actor/ratio_deviation_first"] < RATIO
    assert all(row["actor/ratio_deviation_first"] > 1e-5 for row in late[1:])


@pytest.mark.run
def test_validation_and_lora_ema_are_the_average(small_config):
    trainer = FlowGRPOTrainer(small_config(f"{EMA}=0.5", "trainer.test_freq=1"))
    seen, averages = watch(trainer), []
    validate = trainer._validate
    trainer._validate = lambda: (averages.append(copy.deepcopy(trainer.run.actor.averaged_state())), validate())[1]
    folder = trainer.fit()
    rounded = [{n: t.bfloat16() for n, t in state.items()} for state in averages]
    assert all(same(held, average) for (_, held), average in zip(seen[False], rounded, strict=True))
    assert all(same({n: t.bfloat16() for n, t in actor.items()}, held) for actor, held in seen[True])
    raw, averaged = adapter_of(folder.root), adapter_of(folder.root, "lora_ema")
    own = adapter_state(trainer.run.actor.transformer)
    model = trainer.config.actor_rollout_ref.model
    for name in own:
        key = f"transformer.{name.replace('.default', '')}"
        scale = model.lora_alpha / model.lora_rank if ".lora_B." in name else 1.0
        assert torch.equal(raw[key], own[name] * scale)
        assert torch.equal(averaged[key], averages[-1][name] * scale)
    assert any(not torch.equal(raw[key], averaged[key]) for key in raw)


@pytest.mark.run
def test_an_average_begun_on_resume_starts_from_the_adapter(small_config):
    settings = ("trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.resume_mode=auto")
    FlowGRPOTrainer(small_config(*settings)).fit()
    actor = FlowGRPOTrainer(small_config(*settings, f"{EMA}=0.9")).run.actor
    assert same(actor.averaged_state(), adapter_state(actor.transformer))
    assert max(float(p.abs().max()) for n, p in adapter_state(actor.transformer).items() if "lora_B" in n) > 0
