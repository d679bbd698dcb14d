"""Composition: every shipped file parses, unknown keys are refused with a remedy, open sections are open."""

import math
import warnings
from dataclasses import replace

import pytest

from flowgrpo_rc.cli.compose import ConfigError, compose
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.paths import shipped

TINY = "tiny_qwen_image_ocr"
RC = "algorithm.rollout_correction"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize("name", sorted(p.stem for p in shipped("configs").glob("*.yaml")))
def test_every_shipped_config_composes(name):
    config = compose(name)
    assert config.trainer.project_name == "flowgrpo_rc"
    assert config.rollout_correction is config.actor_rollout_ref.actor.rollout_correction


def test_correction_reaches_the_actor_from_either_place():
    through_algorithm = compose(TINY, ["algorithm.rollout_correction.rollout_is=token"])
    assert through_algorithm.rollout_correction.rollout_is == "token"
    preset = compose("flowgrpo_trainer", ["algorithm.rollout_correction.preset=decoupled_token_is"])
    assert (preset.rollout_correction.bypass_mode, preset.rollout_correction.rollout_is) == (False, "token")
    off = compose("flowgrpo_trainer", ["algorithm.rollout_correction=null"])
    assert off.rollout_correction.rollout_is is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_traning_steps=3", "unknown configuration key .*; nearest: .*trainer.total_training_steps"),
        ("trainer.learning_rate=1", "nearest: actor_rollout_ref.actor.optim.lr,"),
        ("lr=1", "nearest: actor_rollout_ref.actor.optim.lr"),
        (f"{ROLLOUT}.noise_level=1", "nearest: .*actor_rollout_ref.rollout.algo.noise_level"),
        ("trainer.total_training_steps=many", "total_training_steps: .*many.*could not be converted to Integer"),
        ("nonsense", "cannot read the override 'nonsense'; write key=value"),
        (f"{ROLLOUT}.n=1", r"actor_rollout_ref.rollout.n: got 1; .* give at least 2"),
        (f"{ROLLOUT}.algo.noise_level=0", "a deterministic rollout has no log-prob to train on"),
        (f"{ROLLOUT}.algo.sde_window_range=[0,7]", r"sde_window_range: got \[0, 7\]; .*\[0, 6\]"),
        (f"{ROLLOUT}.algo.sde_window_size=5", r"sde_window_size: got 5; the range \[0, 4\] holds 4 steps"),
        (f"{ACTOR}.ppo_mini_batch_size=3", "got 3; it counts prompts and must divide data.train_batch_size=8"),
        (f"{ACTOR}.diffusion_loss.loss_mode=dance_grpo", "dance_grpo with sde_type=sde"),
        (f"{ROLLOUT}.calculate_log_probs=false", "leave it true"),
        (
            f"{ACTOR}.diffusion_loss.clip_ratio=1",
            "got 1, so the lower bound of the band, 1 - clip_ratio, would be 0, .*",
        ),
        (f"{ACTOR}.diffusion_loss.clip_ratio_low=1.5", "got 1.5, so the lower bound of the band, .* would be -0.5"),
        ("reward.custom_reward_function.path=/no/such.py", "reward.custom_reward_function.path"),
        ("trainer=5", "trainer: got 5, but it is a section; give its keys, e.g. trainer.total_epochs"),
        ("trainer.seed.low=1", "trainer.seed: got {low: 1}; give a whole number"),
        (f"{RC}=5", "algorithm.rollout_correction: got 5; give its keys"),
        ("trainer.seed=1,2", "trainer.seed: got '1,2', which is a sweep of several runs; write a list as"),
        ("trainer.experiment_name=${trainer.nope}", "trainer.experiment_name: .*nope.* cannot be resolved"),
        ("=5", "cannot read the override '=5'; write key=value"),
        (f"{RC}.bypass_mode=yes", f"{RC}.bypass_mode must be true or false, got 'yes'"),
        (f"{RC}.rollout_is=none", f"{RC}.rollout_is: got 'none'; choose one of null, token"),
        (f"{RC}.rollout_is_threshold=[0.5,2.0]", f"{RC}.rollout_is_threshold must be .* as in '0.5_2.0'"),
        (f"{RC}.foo=1", f"{RC}: Unknown rollout-correction key 'foo'"),
        (f"{RC}.rollout_rs=seq_mean_k1,seq_mean_k3", f"""quotes: '{RC}.rollout_rs="seq_mean_k1,seq_mean_k3"'$"""),
        ("data.train_files=~/a.parquet", """write key=value: 'data.train_files="~/a.parquet"'"""),
        ("trainer.seed@other=1", "trainer.seed@other: nothing here is placed by @; write trainer.seed="),
        ("trainer.save_freq=-2", r"trainer.save_freq: got -2; give -1 \(at the end only\) or more"),
    ],
)
def test_bad_settings_name_key_value_and_remedy(override, message):
    with pytest.raises(ValueError, match=message) as caught:
        compose(TINY, [override])
    assert "\n" not in str(caught.value)
    assert "DiffusionActorConfig" not in str(caught.value)


def test_of_two_overrides_of_one_key_the_last_counts_and_it_is_said():
    with pytest.warns(UserWarning, match=r"the last counts: trainer.seed=2 \(before: 1\)"):
        assert compose(TINY, ["trainer.seed=1", "trainer.seed=2"]).trainer.seed == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compose(TINY, ["trainer.seed=1", "trainer.seed=1"]).trainer.seed == 1


def test_missing_files_list_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"no file qwen.yaml; there are: .*flowgrpo_trainer.*tiny_.*; --config-dir"):
        compose("qwen")
    with pytest.raises(ConfigError, match="is not a folder"):
        compose(TINY, config_dir=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.rollout_correction.rollout_rs_threshold={}",
        "++algorithm.rollout_correction.rollout_rs_threshold={}",
        "algorithm.rollout_correction={{rollout_rs_threshold: {}, rollout_is: token}}",
    ],
)
@pytest.mark.parametrize("band", ["0.5_5", "1_3", "0_2", "0.5_1e1", "'1_3'"])
def test_a_band_needs_no_quotes_on_the_command_line(band, override, capsys):
    """YAML and Hydra read 0.5_5 as 0.55; 0_2 is 2 to YAML and text to Hydra."""
    text = band.strip("'\"")
    low, high = (float(part) for part in text.split("_"))
    config = compose(TINY, [override.format(band), "algorithm.rollout_correction.rollout_rs=seq_sum_k1"])
    (criterion,) = config.rollout_correction.plan().criteria
    assert config.rollout_correction.rollout_rs_threshold == text
    assert (math.exp(criterion.lower), math.exp(criterion.upper)) == pytest.approx((low, high))
    assert main(["explain-config", "rollout_rs=seq_sum_k1", f"rollout_rs_threshold={band}"]) == 0
    assert f"product of ratios pi_old/pi_rollout is outside [{low:g}, {high:g}]" in capsys.readouterr().out


def test_numbers_and_other_keys_stay_what_they_are(capsys):
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    config = compose(TINY, [f"{threshold}=0.5_5", "trainer.total_training_steps=1_0"])
    assert (config.rollout_correction.rollout_is_threshold, config.trainer.total_training_steps) == ("0.5_5", 10)
    assert compose(TINY, [f"{threshold}=3"]).rollout_correction.rollout_is_threshold == 3
    assert compose(TINY, [f"{threshold}=null", "algorithm.rollout_correction.rollout_is=null"])
    assert main(["explain-config", "rollout_is=token", "rollout_is_threshold=0.5_5"]) == 0
    assert "0 outside [0.5, 5]" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="legacy verl"):
        assert main(["explain-config", "rollout_rs=token", "rollout_rs_threshold=0.5_5"]) == 0
    assert "outside [0.5, 5]" in capsys.readouterr().out


def test_a_yaml_file_must_quote_its_bands(tmp_path):
    head = "defaults: [{}, _self_]\nalgorithm:\n  rollout_correction:\n    rollout_rs: seq_sum_k1\n"
    for name, key, value in (
        ("first", "rollout_rs_threshold", "0.5_5"),
        ("second", "rollout_is_threshold", "1_3"),
        ("third", "rollout_rs_threshold", "0_2"),
        ("fourth", "rollout_rs_threshold", "0.5_"),
    ):
        (tmp_path / f"{name}.yaml").write_text(f"{head.format(TINY)}    {key}: {value}\n")
        message = rf"{name}.yaml, line 5: {key}: got {value} without quotes.*Write {key}: \"{value}\" for the band"
        with pytest.raises(ValueError, match=message):
            compose(name, config_dir=str(tmp_path))
    (tmp_path / "onto.yaml").write_text("defaults: [first, _self_]\ntrainer: {seed: 5}\n")
    with pytest.raises(ValueError, match=r"first.yaml, line 5"):
        compose("onto", config_dir=str(tmp_path))
    (tmp_path / "quoted.yaml").write_text(
        f"{head.format(TINY)}    rollout_rs_threshold: '0.5_5'\n    rollout_is_threshold: 0.5_2.0\n"
    )
    config = compose("quoted", config_dir=str(tmp_path)).rollout_correction
    assert (config.rollout_rs_threshold, config.rollout_is_threshold) == ("0.5_5", "0.5_2.0")
    (tmp_path / "broken.yaml").write_text("trainer: [1\n")
    with pytest.raises(ValueError, match="broken.yaml is not YAML"):
        compose("broken", config_dir=str(tmp_path))


def test_a_preset_on_the_command_line_replaces_the_files_correction():
    """The demo's file asks for bypass mode and rejection; a preset given beside it means what it says."""
    section = "algorithm.rollout_correction"
    plain = compose("tiny_qwen_image_ocr").rollout_correction
    assert (plain.bypass_mode, plain.rollout_rs) == (True, "seq_mean_k1")
    given = compose("tiny_qwen_image_ocr", [f"{section}.preset=decoupled_seq_is"]).rollout_correction
    assert given == RolloutCorrectionConfig.decoupled_seq_is()
    refined = compose("tiny_qwen_image_ocr", [f"{section}={{preset: bypass_ppo_clip}}", f"{section}.rollout_is=token"])
    assert refined.rollout_correction == replace(RolloutCorrectionConfig.bypass_ppo_clip(), rollout_is="token")
    kept = compose("tiny_qwen_image_ocr", [f"{section}.preset=null", f"{section}.rollout_is=token"]).rollout_correction
    assert kept == replace(plain, rollout_is="token")


def test_a_script_s_own_setting_is_there_to_be_replaced(monkeypatch, recwarn):
    given = ["trainer.seed=1", "trainer.seed=2"]
    monkeypatch.setenv("FLOWGRPO_RC_SCRIPT", "1")
    assert compose("flowgrpo_trainer", given).trainer.seed == 2
    assert not any("given more than once" in str(warning.message) for warning in recwarn)
    monkeypatch.delenv("FLOWGRPO_RC_SCRIPT")
    with pytest.warns(UserWarning, match="given more than once"):
        compose("flowgrpo_trainer", given)
