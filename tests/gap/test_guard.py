"""The guard: alarms after enough updates in a row, what it switches, how it comes back; its state over a resume."""

import warnings

import pytest

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.gap.guard import TEACHING_METRIC, Guard
from flowgrpo_rc.trainer import FlowGRPOTrainer

RC = "algorithm.rollout_correction"
CLIP = "actor_rollout_ref.actor.diffusion_loss.clip_ratio"
BYPASS = (f"{RC}.bypass_mode=true", f"{CLIP}=0.001")
FP8 = "actor_rollout_ref.rollout.quantization=fp8"
HEALTHY = {
    "actor/pg_clipfrac_first": 0.0,
    "actor/pg_clipfrac_inert_first": 0.0,
    "actor/kept_fraction": 1.0,
    "rollout_sync/engine_gap_per_dimension": 1e-4,
    "rollout_sync/outside_clip": 0.0,
}


QUIET = {
    "guard/alarms": 0,
    "guard/alarm_clip": 0,
    "guard/alarm_rejected": 0,
    "guard/alarm_zeroed": 0,
    "guard/alarm_engine_gap": 0,
    "guard/fallback": 0,
}


def guarded(*overrides):
    config = compose("tiny_qwen_image_ocr", [*BYPASS, *overrides])
    guard = Guard(ModeInForce.configured(config.actor_rollout_ref.actor))
    said = []
    guard.say = said.append
    return guard, said


def feed(guard, count, **changes):
    """The last of ``count`` updates' metrics."""
    names = {"clip": "actor/pg_clipfrac_first", "kept": "actor/kept_fraction"}
    names |= {"gap": "rollout_sync/engine_gap_per_dimension", "outside": "rollout_sync/outside_clip"}
    metrics = HEALTHY | {names[name]: value for name, value in changes.items()}
    found = {}
    for step in range(count):
        found = guard(metrics, step + 1)
    return found


CAUSES = [
    ({"clip": 0.11}, "11% of the samples", "clip"),
    ({"kept": 0.4}, "60% of the samples were r", "rejected"),
    ({"gap": 0.06}, "0.06", "engine_gap"),
]


@pytest.mark.parametrize(("change", "text", "cause"), CAUSES)
def test_it_warns_once_after_enough_updates_in_a_row(change, text, cause):
    guard, said = guarded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert feed(guard, 50) == QUIET
        feed(guard, 2, **change)
        feed(guard, 1)
        assert feed(guard, 2, **change) == QUIET
    with pytest.warns(UserWarning, match=f"for 3 updates in a row, .*{text}") as caught:
        assert feed(guard, 1, **change) == QUIET | {"guard/alarms": 1, f"guard/alarm_{cause}": 1}
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert feed(guard, 10, **change)["guard/alarms"] == 1
        feed(guard, 1)
        assert feed(guard, 10, **change)["guard/alarms"] == 1  # said once a run
    assert not said
    assert not guard.fallen_back


@pytest.mark.parametrize(("change", "text", "cause"), CAUSES)
def test_it_falls_back_and_returns_when_it_has_been_safe_for_long(change, text, cause):
    guard, said = guarded(f"{RC}.guard=fallback", f"{RC}.guard_return_after=10")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert feed(guard, 3, **change)["guard/fallback"] == 1
        assert text in said[0]
        assert said[0].endswith("Falling back to decoupled mode")
        now = guard.mode
        assert now.rollout_correction.bypass_mode is False
        assert now.diffusion_loss.clip_ratio == 0.001
        assert feed(guard, 9) == QUIET | {f"guard/alarm_{cause}": 1, "guard/fallback": 1}  # why it is there
        assert feed(guard, 1, outside=0.06)["guard/fallback"] == 1  # more than half of the limit: start again
        feed(guard, 9)
        assert feed(guard, 1, gap=0.03)["guard/fallback"] == 1
        feed(guard, 9)
        assert feed(guard, 1, kept=0.7)["guard/fallback"] == 1
        assert feed(guard, 9)["guard/fallback"] == 1
        assert feed(guard, 1) == QUIET
        assert "safe for 10 updates" in said[1]
        assert guard.mode.rollout_correction.bypass_mode is True
        feed(guard, 3, **change)
        assert feed(guard, 19)["guard/fallback"] == 1  # the second time it waits twice as long
        assert feed(guard, 1)["guard/fallback"] == 0


def test_a_new_alarm_after_a_fallback_begins_the_wait_anew():
    guard, said = guarded(f"{RC}.guard=fallback", f"{RC}.guard_return_after=3", f"{RC}.guard_patience=1")
    feed(guard, 1, clip=0.3)
    feed(guard, 2)
    with pytest.warns(UserWarning, match="so the engine computes something else"):
        feed(guard, 1, gap=0.2)
    assert feed(guard, 2)["guard/fallback"] == 1
    assert feed(guard, 1)["guard/fallback"] == 0
    assert len(said) == 2


@pytest.mark.parametrize(
    ("prefix", "settings", "alarm"),
    [
        ("", (f"{RC}.bypass_mode=false",), 1),
        ("actor/", (f"{RC}.loss_type=reinforce",), 1),
        ("actor/", (), 0),  # a diagnosis
    ],
)
def test_weights_of_0_are_watched_where_they_enter_the_loss(prefix, settings, alarm):
    guard, _ = guarded(*settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            found = guard(HEALTHY | {f"{prefix}rollout_corr/rollout_is_oob_ratio": 0.7}, step)
    assert (found["guard/alarm_zeroed"], found["guard/alarm_rejected"]) == (alarm, 0)
    said = "70% of the importance weights were 0 (limit 50%). Widen rollout_is_threshold, or"
    assert [said in str(w.message) for w in caught] == [True] * alarm


def test_a_buffer_that_teaches_nothing_is_said_once():
    """After as many updates in a row as for other alarms, which it is none of; off with the guard."""
    guard, said = guarded(f"{RC}.guard=fallback")
    shares = [0.09, 0.09, 0.5, 0.09, 0.05, 0.0, 0.0, 0.0]
    found = [guard(HEALTHY | {TEACHING_METRIC: share}, step) for step, share in enumerate(shares)]
    assert found == [QUIET] * len(shares)
    assert len(said) == 1
    assert said[0].startswith("guard: step 5: for 3 updates in a row, 100% of the steps from the replay buffer")
    assert "algorithm.replay.batches or max_staleness lower" in said[0]
    off, said = guarded(f"{RC}.guard=off")
    for step in range(5):
        off(HEALTHY | {TEACHING_METRIC: 0.0}, step)
    assert said == []


def test_off_and_what_cannot_fall_back():
    guard, _ = guarded(f"{RC}.guard=off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert feed(guard, 20, clip=1.0) == {}
    with pytest.raises(ValueError, match="decoupled mode has no such loss to fall back to"):
        guarded(f"{RC}.guard=fallback", f"{RC}.loss_type=reinforce")
    for setting in ("guard=on", "guard_patience=0", "guard_clip_fraction=1.5", "guard_engine_gap=0"):
        with pytest.raises(ValueError, match=setting.partition("=")[0]):
            guarded(f"{RC}.{setting}")
    reinforce, _ = guarded(f"{RC}.loss_type=reinforce")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(reinforce, 20, clip=1.0)  # nothing is clipped there


@pytest.mark.run
def test_of_flow_dppo_twice_what_it_leaves_out_is_watched():
    """Its threshold says nothing of the ratio's clip band."""
    guard, said = guarded(f"{RC}.guard=fallback", "actor_rollout_ref.actor.diffusion_loss.loss_mode=flow_dppo")
    for step in range(3):
        found = guard(HEALTHY | {"actor/pg_clipfrac_first": 0.9, "actor/pg_clipfrac_inert_first": 0.05}, step)
    assert found == QUIET
    for step in range(3):
        found = guard(HEALTHY | {"actor/pg_clipfrac_inert_first": 0.3}, step)
    assert found["guard/fallback"] == 1
    assert "60% of the samples lay outside the trust region before" in said[0]
    assert "Raise diffusion_loss.kl_mask_threshold beyond the gap, or" in said[0]


def test_its_state_is_kept():
    guard, _ = guarded(f"{RC}.guard=fallback", f"{RC}.guard_return_after=4")
    feed(guard, 3, clip=0.5)
    feed(guard, 2)
    other, said = guarded(f"{RC}.guard=fallback", f"{RC}.guard_return_after=4")
    other.load_state_dict(guard.state_dict())
    assert other.fallen_back
    assert guard.state_dict()["causes"] == other.state_dict()["causes"] == ["clip"]
    assert "had fallen back to decoupled mode, and goes on there" in said[0]
    assert feed(other, 1)["guard/fallback"] == 1
    assert feed(other, 1)["guard/fallback"] == 0
    assert "safe for 4 updates" in said[1]
    warning, said = guarded()
    warning.load_state_dict(guard.state_dict())
    assert not warning.fallen_back  # what is configured now decides
    assert "guard=warn takes it back to bypass" in said[0]
    with pytest.warns(UserWarning, match="for 3 updates in a row"):
        feed(warning, 10, clip=0.5)
    # Limits and patience of a resumed run are its own, so one that was only warned may fall back at once.
    resumed, said = guarded(f"{RC}.guard=fallback", f"{RC}.guard_patience=2")
    resumed.load_state_dict(warning.state_dict())
    assert feed(resumed, 1, clip=0.5)["guard/fallback"] == 1
    assert "for 2 updates in a row" in said[0]


@pytest.mark.run
@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard"])
def test_a_run_in_the_collapsing_setting_is_moved_to_decoupled_mode(small_config, loss_mode):
    """From the update after the alarm on it is exactly a decoupled run from the same adapter."""
    settings = (
        f"{RC}.guard=fallback",
        f"{RC}.guard_patience=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        f"actor_rollout_ref.actor.diffusion_loss.loss_mode={loss_mode}",
        f"{CLIP}=1e-5",
        FP8,
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
    )
    run = FlowGRPOTrainer(small_config(f"{RC}.bypass_mode=true", *settings, folder="guarded"))
    rows = run.fit().rows()[1:]
    assert [row["guard/fallback"] for row in rows] == [0, 1, 1, 1]
    assert all(row["actor/pg_clipfrac_first"] > 0.1 for row in rows[:2])
    assert all(row["actor/pg_clipfrac_first"] == 0 for row in rows[2:])
    assert "rollout_corr/logprob_abs_diff_mean" in rows[2]
    assert "rollout_corr/logprob_abs_diff_mean" not in rows[1]

    def resumed(bypass, step):
        place = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run.folder.checkpoints / step}")
        config = small_config(f"{RC}.bypass_mode={bypass}", *settings, *place, folder=f"from_{step}")
        return FlowGRPOTrainer(config).fit().rows()

    for row, other in zip(rows[2:], resumed("false", "step_2"), strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "reward/mean", "rollout_corr/logprob_abs_diff_mean"):
            assert row[name] == pytest.approx(other[name], rel=1e-6), name
    again = resumed("true", "step_3")[-1]
    assert (again["actor/grad_norm"], again["guard/fallback"]) == (rows[-1]["actor/grad_norm"], 1)


def test_of_tokens_it_names_their_settings():
    """Nothing of tokens is calibrated, so that ``auto`` is no remedy."""
    config = compose("tiny_qwen_image_ocr", [*BYPASS, f"{RC}.rollout_rs=seq_mean_k1", f"{RC}.rollout_rs_threshold=1"])
    guard = Guard(ModeInForce.configured(config.actor_rollout_ref.actor), of_tokens=True)
    with pytest.warns(UserWarning, match="guard of the prompt writer: step 3: .* 20% of the tokens lay out") as caught:
        feed(guard, 3, clip=0.2, kept=0.4)
    text = str(caught[0].message)
    for remedy in ("Widen token_loss.clip_ratio beyond the gap, or set", "Widen rollout_rs_threshold, or bring"):
        assert remedy in text
