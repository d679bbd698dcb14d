"""Rescoring every batch: its numbers by hand, the split into engine gap and staleness, and that it leaves no trace."""

import warnings

import pytest
import torch
from tests_support import untimed
from tolerances import LOG_PROB, LOG_RATIO, divergence, nats
from torch.testing import assert_close

from flowgrpo_rc.actor import NonFiniteUpdateError
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.sde import log_prob, transition
from flowgrpo_rc.trainer import FlowGRPOTrainer

PROBE = "actor_rollout_ref.rollout.probe"
LAG = "actor_rollout_ref.rollout.adapter_lag"
FLOAT32 = "actor_rollout_ref.rollout.dtype=float32"
FAST = "actor_rollout_ref.actor.optim.lr=0.01"
LOSS = "actor_rollout_ref.actor.diffusion_loss"
RC = "algorithm.rollout_correction"


def watched(config):
    """A trainer and what its rescoring was given: ``(batch, conditioning, step)``."""
    trainer = FlowGRPOTrainer(config)
    calls = []
    rescoring = trainer.rescoring
    trainer.rescoring = lambda *args: (calls.append((args[0].clone(), *args[1:])), rescoring(*args))[1]
    return trainer, rescoring, calls


def by_hand(trainer, batch, conditioning, rows):
    """Log-probs of some rows, one forward a row and step."""
    model = trainer.run.model
    scores = torch.zeros(len(rows), batch["sigmas"].shape[1])
    for i, row in enumerate(rows.tolist()):
        cond = conditioning.rows(batch["prompt_index"][row : row + 1], torch.device("cpu"))
        for w in range(scores.shape[1]):
            part = {name: batch[name][row : row + 1, w] for name in ("latents", "timesteps", "sigmas", "next_sigmas")}
            with torch.no_grad():
                velocity = model.velocity(model.transformer, part["latents"], part["timesteps"], cond)
            law = transition(
                part["latents"], velocity, part["sigmas"], part["next_sigmas"], noise_level=0.7, sde_type="sde"
            )
            scores[i, w] = log_prob(law, batch["next_latents"][row : row + 1, w], sde_type="sde")
    return scores


@pytest.mark.run
@pytest.mark.portable
def test_its_numbers_are_a_rescoring_by_hand(small_config):
    trainer, rescoring, calls = watched(small_config())
    original = trainer.rescoring
    for step in range(2):
        rows = torch.tensor([0, 4, 8, 12]) + step
        scores = []

        def first_by_hand(*args, scores=scores, rows=rows):
            scores.append(by_hand(trainer, args[0], args[1], rows))
            return original(*args)

        trainer.rescoring = first_by_hand
        row = trainer.train_step()
        batch = calls[-1][0]
        assert rescoring.rows(batch, step).tolist() == rows.tolist()
        gap = (batch["rollout_log_probs"][rows] - scores[0]).abs()
        assert row["rollout_sync/engine_gap_abs_mean"] == pytest.approx(float(gap.mean()), abs=LOG_PROB)
        assert row["rollout_sync/engine_gap_abs_max"] == pytest.approx(float(gap.max()), abs=LOG_PROB)
        assert row["rollout_sync/engine_gap_nats"] == pytest.approx(512 * row["rollout_sync/engine_gap_abs_mean"])
        assert 1e-5 < gap.mean() < 1e-2  # bfloat16 rollouts
        assert row["rollout_sync/probe_forwards"] == 4 * batch["sigmas"].shape[1]
        assert row["rollout_sync/staleness_abs_mean"] == row["rollout_sync/version_lag"] == 0


def sync_metrics(row):
    return {k.removeprefix("rollout_sync/"): v for k, v in row.items() if k.startswith("rollout_sync/")}


@pytest.mark.run
@pytest.mark.portable
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_without_lag_in_float32_there_is_no_gap(small_config, sde_type):
    config = small_config(FLOAT32, f"actor_rollout_ref.rollout.algo.sde_type={sde_type}")
    for row in FlowGRPOTrainer(config).fit().rows()[1:]:
        values = sync_metrics(row)
        assert values["engine_gap_abs_max"] <= LOG_PROB
        assert values["staleness_abs_mean"] == values["version_lag"] == 0
        assert values["engine_gap_nats"] <= nats(512)
        assert values["engine_kl_nats"] <= divergence(512)


@pytest.mark.run
@pytest.mark.parametrize("bypass", ["true", "false"])
def test_with_lag_the_difference_is_staleness(small_config, bypass):
    """Float32: the engine gap stays at rounding while the actor is 0, 1, 2, 2 steps ahead."""
    settings = (f"algorithm.rollout_correction.bypass_mode={bypass}", "trainer.total_training_steps=4")
    rows = FlowGRPOTrainer(small_config(FLOAT32, f"{LAG}=2", *settings)).fit().rows()[1:]
    values = [sync_metrics(row) for row in rows]
    assert [v["version_lag"] for v in values] == [0, 1, 2, 2]
    assert [v["probe_forwards"] for v in values] == [values[0]["probe_forwards"] * n for n in (1, 2, 2, 2)]
    assert all(v["engine_gap_abs_max"] <= LOG_PROB for v in values)
    assert values[0]["staleness_abs_mean"] == 0
    assert all(v["staleness_abs_mean"] > 1e-5 for v in values[1:])


@pytest.mark.run
@pytest.mark.portable
def test_a_low_precision_engine_gap_is_told_from_staleness(small_config):
    """Both at once: each part equals a rescoring by hand under its own weights, and they add up."""
    trainer = FlowGRPOTrainer(small_config(f"{LAG}=2", FAST))
    for _ in range(3):
        trainer.train_step()
    asked = trainer.rollouts.next(trainer.step)
    batch, _ = trainer._rollout(asked)
    cond = asked.request.conditioning
    rescoring = trainer.rescoring
    step = trainer.step
    rows = rescoring.rows(batch, step)
    scored = rescoring.rescore(batch, rows, cond)
    recorded = batch["rollout_log_probs"][rows].double()
    now = by_hand(trainer, batch, cond, rows).double()
    assert_close(scored.total, now - recorded, rtol=0, atol=LOG_PROB)
    with trainer.adapter.actor_at_rollout_version():
        then = by_hand(trainer, batch, cond, rows).double()
    assert_close(scored.engine, then - recorded, rtol=0, atol=LOG_PROB)
    assert_close(scored.staleness, now - then, rtol=0, atol=LOG_RATIO)
    assert torch.equal(scored.timesteps.float(), batch["timesteps"][rows])
    assert (scored.to_nats == 512).all()
    metrics = rescoring(batch, cond, step)
    gap = scored.engine.abs()
    stale = scored.staleness.abs()
    assert metrics["rollout_sync/engine_gap_abs_mean"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert metrics["rollout_sync/staleness_abs_mean"] == pytest.approx(float(stale.mean()), rel=1e-5)
    assert gap.mean() > 1e-5
    assert stale.mean() > 1e-5


@pytest.mark.run
@pytest.mark.parametrize(
    "settings", [(), (f"{LAG}=1", "actor_rollout_ref.actor.ema_decay=0.5", f"{RC}.bypass_mode=false")]
)
def test_a_run_is_the_same_without_it(small_config, settings):
    """It leaves the adapters, their average, the batch and the random streams as they are."""
    runs = [FlowGRPOTrainer(small_config(*settings, f"{PROBE}.images={n}", folder=str(n))).fit() for n in (0, 5)]
    off, on = (untimed(run.rows()) for run in runs)
    assert off == [{k: v for k, v in row.items() if not k.startswith("rollout_sync/")} for row in on]
    assert not any(k.startswith("rollout_sync/") for row in runs[0].rows() for k in row)
    assert sync_metrics(runs[1].rows()[1])["probe_forwards"] == 10


@pytest.mark.run
def test_its_images_do_not_depend_on_the_processes_and_move_on(small_config):
    trainer, rescoring, calls = watched(small_config(f"{PROBE}.images=5"))
    trainer.train_step()
    batch = calls[0][0]
    seen = set()
    for step in range(16):
        rows = rescoring.rows(batch, step).tolist()
        halves = [(half.nonzero().flatten(), half) for half in (batch["group"] % 2 == 0, batch["group"] % 2 == 1)]
        dealt = [int(numbers[i]) for numbers, half in halves for i in rescoring.rows(batch[half], step).tolist()]
        assert (len(rows), sorted(dealt)) == (5, rows)
        seen |= set(rows)
    assert seen == set(range(16))


@pytest.mark.run
def test_a_wide_gap_warns_once_a_run(small_config):
    trainer = FlowGRPOTrainer(small_config(f"{PROBE}.warn_gap=1e-5"))
    with pytest.warns(UserWarning, match=r"step 1: \S+/engine_gap_per_dimension is \S+, above .*warn_gap=1e-05"):
        trainer.train_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train_step()


@pytest.mark.run
@pytest.mark.parametrize("settings", [(), (f"{LOSS}.clip_ratio=auto",), (f"{RC}.rollout_rs_threshold=auto",)])
def test_a_log_prob_that_is_not_finite_stops_the_run_before_anything_learns_from_it(small_config, settings):
    """Neither the bands nor the weights have moved, and the prompt is named."""
    trainer = FlowGRPOTrainer(small_config(f"{PROBE}.images=4", *settings))
    rescore = trainer.run.actor.rescore
    before = adapter_state(trainer.run.actor.transformer)
    before = {name: value.clone() for name, value in before.items()}

    def one_nan(batch, conditioning):
        scored = rescore(batch, conditioning)
        scored["log_probs"][1, 0] = torch.nan
        return scored

    trainer.run.actor.rescore = one_nan
    with pytest.raises(
        NonFiniteUpdateError, match="step 1: the actor gives 1 of 8 probed steps a NaN .*prompts: '"
    ) as e:
        trainer.train_step()
    assert len(e.value.samples) == 1
    assert same(before, adapter_state(trainer.run.actor.transformer))
    for bands in filter(None, (trainer.run.clip_bands, trainer.run.rejection_bands)):
        assert bands.metrics() == {}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
