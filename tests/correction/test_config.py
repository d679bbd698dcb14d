"""The configuration: validation, presets, other projects' keys, and what it says in words."""

import dataclasses
import functools
import math
import re
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml

from flowgrpo_rc.correction import RolloutCorrectionConfig, explain
from flowgrpo_rc.correction.options import dialects
from flowgrpo_rc.correction.options.explanation import CleanImages, in_force
from flowgrpo_rc.correction.options.presets import PRESET_NAMES

Config = RolloutCorrectionConfig
SEQ = functools.partial(Config, rollout_is="sequence")


def test_defaults():
    assert Config().to_dict() == {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
        "rollout_token_veto_threshold": None,
        "rollout_is_mode": None,
        "rejection_normalization": "all",
        "rollout_rs_auto_share": 0.01,
        "rollout_rs_auto_min": 1e-3,
        "rollout_rs_auto_max": 0.1,
        "guard": "warn",
        "guard_clip_fraction": 0.1,
        "guard_rejected_fraction": 0.5,
        "guard_engine_gap": 0.05,
        "guard_patience": 3,
        "guard_return_after": 50,
    }
    assert Config.from_dict({}) == Config()
    assert Config.from_dict(None) == Config.disabled()
    assert Config.from_dict(Config()) == Config()


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_the_dict_of_a_configuration_gives_it_back(name):
    config = getattr(Config, name)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_dict(config.to_dict()) == config


def test_no_weight_threshold_without_weights():
    """As verl switches weights off; with weights it is an error: `test_wrong_settings_are_named`."""
    config = Config.from_dict({"rollout_is": None, "rollout_is_threshold": None, "rollout_rs": None})
    assert config.plan() == Config.disabled().plan()
    assert Config.from_dict(config.to_dict()) == config


def test_a_legacy_criterion_needs_some_threshold():
    given = {"rollout_is": None, "rollout_is_threshold": None, "rollout_rs": "token"}
    with pytest.raises(ValueError, match="rollout_rs_threshold is null with rollout_rs='token'.*give"):
        Config.from_dict(given)
    with pytest.warns(UserWarning, match="canonical form"):
        config = Config.from_dict({**given, "rollout_rs_threshold": 4.0})
    assert (config.rollout_is_threshold, config.rollout_rs_threshold) == (None, "0.25_4.0")
    for wrong in (0, "two"):
        with pytest.raises(ValueError, match="rollout_rs_threshold"):
            Config.from_dict({**given, "rollout_rs_threshold": wrong})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoupled_token_is", {"rollout_is": "token"}),
        ("decoupled_seq_is", {"rollout_is": "sequence"}),
        ("decoupled_token_icepop", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        (
            "decoupled_seq_is_rs",
            {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        ),
        ("decoupled_geo_rs", {"rollout_is": None, **(geo := {"rollout_rs": "seq_mean_k1"})}),
        ("decoupled_geo_rs_seq_tis", {"rollout_is": "sequence", **geo}),
        ("decoupled_geo_rs_token_tis", {"rollout_is": "token", **geo}),
        ("decoupled_k3_rs", {"rollout_is": None, **(k3 := {"rollout_rs": "seq_mean_k3"})}),
        ("decoupled_k3_rs_seq_tis", {"rollout_is": "sequence", **k3}),
        ("decoupled_k3_rs_token_tis", {"rollout_is": "token", **k3}),
        ("bypass_ppo_clip", {"rollout_is": None, **(ppo := {"bypass_mode": True})}),
        ("bypass_ppo_clip_geo_rs", {"rollout_is": None, **geo, **ppo}),
        ("bypass_ppo_clip_k3_rs", {"rollout_is": None, **k3, **ppo}),
        ("bypass_pg_is", {"rollout_is": "sequence", **(pg := {"bypass_mode": True, "loss_type": "reinforce"})}),
        ("bypass_pg_token_icepop", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", **pg}),
        ("bypass_pg_geo_rs", {"rollout_is": None, **geo, **pg}),
        ("bypass_pg_geo_rs_seq_tis", {"rollout_is": "sequence", **geo, **pg}),
        ("bypass_pg_geo_rs_token_tis", {"rollout_is": "token", **geo, **pg}),
        ("disabled", {"rollout_is": None}),
        ("token_is", {"rollout_is": "token"}),
        ("token_tis", {"rollout_is": "token"}),
        ("seq_is", {"rollout_is": "sequence"}),
        ("seq_is_rs", {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}),
        ("seq_mis", {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0_2.0"}),
        ("geo_rs", {"rollout_is": None, **geo, **(veto := {"rollout_token_veto_threshold": 1e-4})}),
        ("geo_mis", {"rollout_is": None, **geo, **veto}),
        ("ppo_is_bypass", {"rollout_is": "token", "bypass_mode": True}),
        ("pure_is", {"rollout_is": "sequence", **pg}),
        ("pg_is", {"rollout_is": "sequence", **pg}),
        ("pg_rs", {"rollout_is": None, **geo, **pg, **veto}),
    ],
)
def test_presets(name, expected):
    if expected.get("rollout_rs") == "seq_mean_k1":
        expected = {**expected, "rollout_rs_threshold": "0.999_1.001"}
    if expected.get("rollout_rs") == "seq_mean_k3":
        expected = {**expected, "rollout_rs_threshold": 0.01}
    assert getattr(Config, name)() == Config(**expected)
    assert Config.from_dict({"preset": name}) == Config(**expected)


def test_every_preset_is_listed_above():
    (mark,) = [m for m in test_presets.pytestmark if m.name == "parametrize"]
    assert {name for name, _ in mark.args[1]} == set(PRESET_NAMES)


@pytest.mark.parametrize(
    ("made", "threshold", "veto"),
    [
        # the legacy constructors: upper bound, lower bound, veto
        (lambda: Config.geo_rs(1.001, 0.999), "0.999_1.001", 1e-4),
        (lambda: Config.geo_rs(1.02, rs_threshold_lower=0.9), "0.9_1.02", 1e-4),
        (lambda: Config.geo_rs(1.02, 0.9, 1e-6), "0.9_1.02", 1e-6),
        (lambda: Config.geo_rs(rs_threshold=1.02, rs_threshold_lower=None, veto_threshold=None), 1.02, None),
        (lambda: Config.geo_rs(1.02, 0), "0_1.02", 1e-4),
        (lambda: Config.geo_mis(), "0.999_1.001", 1e-4),
        (lambda: Config.geo_mis(1.02), "0.999_1.02", 1e-4),
        (lambda: Config.geo_mis(1.02, None), 1.02, 1e-4),
        (lambda: Config.geo_mis("0.9_1.02"), "0.9_1.02", 1e-4),
        (lambda: Config.geo_mis(1.02, 0.9, 1e-3), "0.9_1.02", 1e-3),
        (lambda: Config.pg_rs(1.02, 0.9, 1e-3), "0.9_1.02", 1e-3),
        (lambda: Config.geo_rs("0.99_1.02", veto_threshold=None), "0.99_1.02", None),
        (lambda: Config.seq_is_rs(3.0, 4.0), 4.0, None),
        (lambda: Config.seq_is_rs(3.0, 4.0, 0.1), "0.1_4.0", None),
        (lambda: Config.seq_is_rs(is_threshold=3.0, rs_threshold=4.0, rs_threshold_lower=0), "0_4.0", None),
    ],
)
def test_legacy_constructors_take_the_upper_bound_first(made, threshold, veto):
    config = made()
    assert (config.rollout_rs_threshold, config.rollout_token_veto_threshold) == (threshold, veto)
    assert config.rollout_is_threshold == (3.0 if config.rollout_rs == "seq_sum_k1" else 2.0)


def test_preset_arguments():
    assert Config.decoupled_token_icepop(3.0, 0.25).rollout_is_threshold == "0.25_3.0"
    assert Config.seq_mis(4.0).rollout_rs_threshold == "0_4.0"
    assert Config.bypass_pg_geo_rs_seq_tis(3.0, "0.98_1.05").rollout_is_threshold == 3.0
    with pytest.raises(ValueError, match="rs_threshold_lower=0.99 beside rs_threshold='0.9_1.02'"):
        Config.geo_rs("0.9_1.02", 0.99)
    with pytest.raises(ValueError, match="rs_threshold_lower=2.0 exceeds rs_threshold=0.5"):
        Config.seq_is_rs(2.0, 0.5, 2.0)


def test_the_first_releases_call_is_translated():
    """`RolloutCorrectionConfig(rollout_rs="token", ...)`, as its documentation shows it."""
    with pytest.warns(UserWarning, match='rollout_rs=token_k1, rollout_rs_threshold="0.5_2.0"') as caught:
        config = Config(rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token", rollout_rs_threshold=2.0)
    assert len(caught) == 1
    assert config == Config(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    with pytest.warns(UserWarning, match="canonical form"):
        config = Config(rollout_rs="sequence", rollout_rs_threshold=4.0, rollout_rs_threshold_lower=0.1)
    assert (config.rollout_rs, config.rollout_rs_threshold) == ("seq_sum_k1", "0.1_4.0")
    with pytest.warns(UserWarning, match="canonical form"):
        config = Config(rollout_is=None, bypass_old_logprob_for_rollout=True, use_pure_rollout_correction=True)
    assert (config.bypass_mode, config.loss_type) == (True, "reinforce")
    with pytest.warns(UserWarning, match="slime keys"):
        assert Config(use_tis=True).rollout_is == "token"
    assert Config(preset="decoupled_token_is") == Config.decoupled_token_is()
    with pytest.raises(TypeError, match="no 'rollout_is_treshold'; nearest known: rollout_is_threshold.*from_dict"):
        Config(rollout_is_treshold=2.0)


def test_keys_beside_a_preset_override_it():
    config = Config.from_dict({"preset": "geo_rs", "rollout_rs_threshold": "0.98_1.03", "rollout_is": "token"})
    assert config == dataclasses.replace(Config.geo_rs(), rollout_rs_threshold="0.98_1.03", rollout_is="token")


@pytest.mark.parametrize(
    ("given", "threshold"),
    [
        ({"preset": "seq_is_rs", "rollout_rs_threshold": "0.3_4.0"}, "0.3_4.0"),
        ({"preset": "seq_is_rs", "rollout_rs_threshold": 3.0}, 3.0),  # a whole band: 1/3 to 3
        ({"preset": "decoupled_k3_rs", "rollout_rs_threshold": 0.05}, 0.05),
        ({"preset": "decoupled_geo_rs", "rollout_rs_threshold": "auto"}, "auto"),
        ({"preset": "decoupled_geo_rs", "rollout_rs": None, "rollout_rs_threshold": None}, None),
    ],
)
def test_a_threshold_beside_a_preset_replaces_its_whole_band(given, threshold):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_dict(given).rollout_rs_threshold == threshold


FORMS = [("rollout_rs", "token", "rollout_rs: token_k1")]
FORMS += [(key, 2.0, form) for dialect in (dialects.LEGACY, dialects.SLIME) for key, form in dialect.items()]


@pytest.mark.parametrize(("key", "value", "form"), [*FORMS, ("mis-upper-bound", 2.0, "rollout_is_threshold")])
def test_a_key_of_another_dialect_beside_a_preset_is_refused_with_its_canonical_form(key, value, form):
    with pytest.raises(ValueError, match=f"beside preset 'geo_rs'.*write {form}"):
        Config.from_dict({"preset": "geo_rs", "rollout_is": "token", key: value})


REFUSED = [
    *({"rollout_is_threshold": v} for v in (0, 0.0, -1.0, "0", "-2", math.nan, "nan", "2.0_0.5", "0.5_", "_2")),
    *({"rollout_is": "token", "rollout_is_threshold": v} for v in (0, -1.0, "-2", math.nan, "2.0_0.5", None)),
    *({"rollout_rs_threshold": v} for v in (-1, math.nan, "0.5-2.0", "2.0_0.5", "0.5_2.0,y")),  # without a criterion
    *(
        {"rollout_rs": "token_k1", "rollout_rs_threshold": v}
        for v in (0, -1.0, "nan", "2.0_0.5", "-1_2", 0.5, None, "")
    ),
    *({"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": v} for v in (0, "-0.1", math.nan, "0.5_2.0", "0_1")),
    *({"rollout_rs": "seq_max_k3", "rollout_rs_threshold": v} for v in ("0.001_0.01", "abc")),
    # one threshold for both is none for k3; three thresholds of two criteria
    *({"rollout_rs": "token_k1,token_k3", "rollout_rs_threshold": v} for v in ("0.5_2.0", "0.5_2.0,0.1,0.2")),
    *(
        {"rollout_rs": option, "rollout_rs_threshold": 2.0}
        for option in ("", ",", "k1", "seq_max_k1", "token_k4", "sequence_k1", "token_k1;seq_mean_k1")
    ),
    *({"rollout_token_veto_threshold": v} for v in (0.0, -1e-4, math.nan, "none")),
]


@pytest.mark.parametrize("fields", REFUSED)
def test_thresholds_and_criteria_are_refused_by_name(fields):
    with pytest.raises(ValueError, match="rollout_rs" if "rollout_rs" in fields else next(reversed(fields))) as caught:
        Config(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is: got 'tokens'; choose one of"),
        ({"rollout_is_mode": "drop"}, "rollout_is_mode: got 'drop'; choose one of null, truncate"),
        ({"rollout_is_mode": "drop", "rollout_is_threshold": None}, "rollout_is_mode: got 'drop'; choose one of"),
        ({"rollout_is_mode": "truncate", "rollout_is_threshold": "0.5_2.0"}, "truncation has one bound"),
        ({"loss_type": "ppo"}, "loss_type: got 'ppo'; choose one of"),
        ({"loss_type": "reinforce"}, "needs bypass_mode=True"),
        ({"rejection_normalization": "mean"}, "rejection_normalization: got 'mean'; choose one of"),
        (
            {"rollout_is": "token", "rollout_is_threshold": None},
            "is null with rollout_is='token'; give .*rollout_is=null",
        ),
        ({"rollout_is_treshold": 1.0}, "Unknown rollout-correction key 'rollout_is_treshold'.*: rollout_is_threshold"),
        ({"bypas_mode": 1.0}, "Unknown rollout-correction key 'bypas_mode'; nearest known: .*bypass_mode"),
        ({"tis_upper": 1.0}, "Unknown rollout-correction key 'tis_upper'; nearest known: .*tis_upper_bound"),
        ({"preset": "decoupled_token_iss"}, "Unknown preset 'decoupled_token_iss'; nearest: decoupled_token_is,"),
        *(
            ({key: True, off: False}, f"{key}=true needs bypass mode, which is explicitly false")
            for key in ("use_pure_rollout_correction", "use_policy_gradient")
            for off in ("bypass_mode", "bypass_old_logprob_for_rollout")
        ),
        *(
            (given, "contradict|means loss_type|two dialects|belongs to|choose one of")
            for given in (
                {"use_policy_gradient": True, "loss_type": "ppo_clip"},
                {"bypass_old_logprob_for_rollout": True, "bypass_mode": False},
                {"use_tis": True, "rollout_is": "sequence"},
                {"use_rollout_logprobs": False, "bypass_mode": True},
                {"use_tis": True, "bypass_old_logprob_for_rollout": True},
                {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.3},
                {"use_tis": True, "tis_mode": "drop"},
                {"use_rs": True, "rs_level": "rows"},
                {"use_policy_gradient": False, "loss_type": "reinforce", "bypass_mode": True},
                {"use_policy_gradient": True, "use_pure_rollout_correction": False},
                {"get_mismatch_metrics": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            )
        ),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Config.from_dict(given)


FORM = "give a number, or 'lower_upper' as in '0.5_2.0'"
FIELDS = {"rollout_is_threshold": {"rollout_is": "token"}, "rollout_rs_threshold": {"rollout_rs": "token_k1"}}


@pytest.mark.parametrize("key", FIELDS)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        # Python reads "1_2" as 12, so that [0.5, 12] would be kept
        *((v, f"'{v}' has {v.count('_') + 1} parts; ") for v in ("0.5_1_2", "1_2_3", "0.5__2", "1_000_000")),
        *((v, "") for v in ("_2", "2_", "_", "0.5_x", "x_2", "2.0x", "two", "", " ", "0,5_2", "0.6-1.4")),
        *((v, "") for v in ([], [0.6, 1.4], {}, {"lower": 0.5}, np.array([0.5, 2.0]))),
    ],
)
def test_what_is_no_threshold_shows_the_form_in_one_short_line(key, value, said):
    with pytest.raises((TypeError, ValueError)) as caught:
        Config.from_dict({**FIELDS[key], key: value})
    message = str(caught.value)
    assert key in message
    assert FORM in message
    assert said in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("key", FIELDS)
@pytest.mark.parametrize(
    "value",
    [np.float64(1.5), np.float32(1.5), np.float16(1.5), Fraction(3, 2), "1.5", " 1.5 ", "1.5e0"],
)
def test_numbers_of_every_type_are_numbers(key, value):
    """In a test because a resolved configuration is written as YAML, which knows Python's own types alone."""
    config = Config.from_dict({**FIELDS[key], key: value})
    assert config.plan() == Config.from_dict({**FIELDS[key], key: 1.5}).plan()
    assert type(getattr(config, key)) in (float, str)


@pytest.mark.parametrize("key", [*FIELDS, "rollout_token_veto_threshold", "guard_engine_gap"])
def test_a_switch_is_no_number_and_one_number_is_no_band(key):
    for value in (True, False, np.bool_(True)):
        with pytest.raises(TypeError, match=f"{key} must be a number"):
            Config.from_dict({**FIELDS.get(key, {}), key: value})
    for value in ("0.5-2.0", "0.5_2.0", "x", "") if key not in FIELDS else ():
        with pytest.raises(ValueError, match=f"{key}: .*give one number") as caught:
            Config.from_dict({key: value})
        assert "lower_upper" not in str(caught.value)


# Other dialects. Each case gives exactly one warning, which prints the canonical form.

DIALECTS = [
    ("bypass_old_logprob_for_rollout: true", "bypass_mode: true"),
    ("use_pure_rollout_correction: true", "bypass_mode: true, loss_type: reinforce"),
    ("use_policy_gradient: true", "bypass_mode: true, loss_type: reinforce"),
    ("use_pure_rollout_correction: false", ""),
    (
        "rollout_rs: token, rollout_rs_threshold: 3.0, rollout_rs_threshold_lower: 0.6",
        "rollout_rs: token_k1, rollout_rs_threshold: '0.6_3.0'",
    ),
    ("rollout_rs: sequence, rollout_rs_threshold: 4.0", "rollout_rs: seq_sum_k1, rollout_rs_threshold: '0.25_4.0'"),
    (
        "rollout_rs: geometric, rollout_rs_threshold: 1.001, rollout_rs_threshold_lower: 0",
        "rollout_rs: seq_mean_k1, rollout_rs_threshold: '0_1.001'",
    ),
    (
        "rollout_rs: token, rollout_rs_threshold: null, rollout_is_threshold: 4.0",
        "rollout_is_threshold: 4.0, rollout_rs: token_k1, rollout_rs_threshold: '0.25_4.0'",
    ),
    ("rollout_rs: token", "rollout_rs: token_k1, rollout_rs_threshold: '0.5_2.0'"),
    (
        "rollout_is: token, rollout_is_threshold: 2.0, rollout_rs: null, rollout_rs_threshold: null, "
        "rollout_rs_threshold_lower: null, rollout_token_veto_threshold: null, "
        "bypass_old_logprob_for_rollout: false, use_pure_rollout_correction: false",
        "rollout_is: token",
    ),
    ("use_tis: true, tis_upper_bound: 3.0", "rollout_is: token, rollout_is_mode: truncate, rollout_is_threshold: 3.0"),
    (
        "use_tis: true, tis_mode: clip, tis_level: sequence, tis_lower_bound: 0.6, tis_upper_bound: 3.0, "
        "tis_batch_normalize: true",
        "rollout_is: sequence, rollout_is_mode: clip, rollout_is_threshold: '0.6_3.0', "
        "rollout_is_batch_normalize: true",
    ),
    ("use_tis: false, tis_upper_bound: 3.0", "rollout_is: null"),
    (
        "use_rs: true, rs_level: geometric, rs_lower_bound: 0.99, rs_upper_bound: 1.02, rs_veto_threshold: 0.0001",
        "rollout_is: null, rollout_rs: seq_mean_k1, rollout_rs_threshold: '0.99_1.02', "
        "rollout_token_veto_threshold: 0.0001",
    ),
    (
        "use_tis: true, tis_mode: clip, tis_lower_bound: 0.6, tis_upper_bound: 3.0, use_rs: true, rs_level: sequence",
        "rollout_is: token, rollout_is_mode: clip, rollout_is_threshold: '0.6_3.0', rollout_rs: seq_sum_k1, "
        "rollout_rs_threshold: '0.6_3.0'",
    ),
    (
        "use_rs: true, rs_level: token, tis_lower_bound: 0.6, tis_upper_bound: 3.0, rs_upper_bound: 5.0",
        "rollout_is: null, rollout_rs: token_k1, rollout_rs_threshold: '0.6_5.0'",
    ),
    ("use_rs: true, rs_upper_bound: 5.0", "rollout_rs: token_k1, rollout_rs_threshold: '0.5_5.0'"),
    (
        "use_rs: true, rs_lower_bound: 0.1, tis_upper_bound: 4.0",
        "rollout_rs: token_k1, rollout_rs_threshold: '0.1_4.0'",
    ),
    ("use_rs: true", "rollout_rs: token_k1, rollout_rs_threshold: '0.5_2.0'"),
    (
        "use_tis: true, tis_level: sequence, use_rs: true",
        "rollout_is: sequence, rollout_is_mode: truncate, rollout_rs: token_k1, rollout_rs_threshold: '0.5_2.0'",
    ),
    (
        "use_tis: true, tis_mode: clip, tis_lower_bound: 0, tis_upper_bound: 3",
        "rollout_is: token, rollout_is_mode: clip, rollout_is_threshold: '0_3'",
    ),
    ("use_tis: 'true', tis_batch_normalize: 'False'", "rollout_is: token, rollout_is_mode: truncate"),
    ("use_tis: false, rs_trust_region: null, rs_tr_threshold: 0.1", "rollout_is: null"),
    ("use_tis: false, rs_trust_region: false", "rollout_is: null"),
    ("use_tis: true, get_mismatch_metrics: true, rs_veto_threshold: 0.0001", "rollout_is: null"),
    # its code applies the veto under use_rs alone, against its document
    ("use_tis: true, use_rs: false, rs_veto_threshold: 0.0001", "rollout_is: token, rollout_is_mode: truncate"),
    ("use_rollout_logprobs: true", "rollout_is: null, bypass_mode: true"),
    ("get_mismatch_metrics: true", "rollout_is: null"),
    ("get_mismatch_metrics: 'true', use_tis: ' True ', use_rs: FALSE", "rollout_is: null"),
    ("bypass_old_logprob_for_rollout: 'true', use_pure_rollout_correction: 'False'", "bypass_mode: true"),
    ("use_policy_gradient: ' True '", "bypass_mode: true, loss_type: reinforce"),
    ("use_rollout_logprobs: 'TRUE'", "rollout_is: null, bypass_mode: true"),
    # bands that YAML would read as 2, 0.53 and 13
    (
        "rollout_rs: sequence, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 0",
        "rollout_rs: seq_sum_k1, rollout_rs_threshold: '0_2'",
    ),
    (
        "use_tis: true, tis_mode: clip, tis_lower_bound: 0.5, tis_upper_bound: 3",
        "rollout_is: token, rollout_is_mode: clip, rollout_is_threshold: '0.5_3'",
    ),
    (
        "rollout_rs: token, rollout_rs_threshold: 3, rollout_rs_threshold_lower: 1",
        "rollout_rs: token_k1, rollout_rs_threshold: '1_3'",
    ),
]
DIALECTS = [tuple(yaml.safe_load(f"{{{keys}}}") for keys in row) for row in DIALECTS]
"""Keys as a YAML file has them, and the canonical ones."""


@pytest.mark.parametrize(("given", "expected"), DIALECTS)
def test_other_dialects(given, expected):
    """One warning, whose canonical form means the same when it is pasted into YAML."""
    with pytest.warns(UserWarning, match="canonical form") as caught:
        config = Config.from_dict(given)
    assert len(caught) == 1
    assert config == Config(**expected)
    form = str(caught[0].message).split("the canonical form is: ")[1]
    for key in expected:
        assert f"{key}=" in form
    lines = "\n".join(pair.replace("=", ": ", 1) for pair in form.split(", ")) if form else "{}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the canonical form itself gives none
        assert Config.from_dict(yaml.safe_load(lines)) == Config.from_dict(expected) == config


def test_slimes_present_file(tmp_path):
    """The values of its example, with the two keys that came later."""
    path = tmp_path / "mis.yaml"
    keys = {
        **{"use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate"},
        **{"tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None},
        **{"rs_veto_threshold": 1e-4, "tis_batch_normalize": True, "rs_trust_region": None, "rs_tr_threshold": 0.05},
    }
    path.write_text(yaml.safe_dump(keys))
    with pytest.warns(UserWarning, match="slime keys"):
        config = Config.from_slime_yaml(path)
    assert config == Config(
        rollout_is="token",
        rollout_is_mode="truncate",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.5_2.0",
        rollout_token_veto_threshold=1e-4,
    )
    path.write_text(yaml.safe_dump({**keys, "rs_trust_region": "kl"}))
    with pytest.raises(ValueError, match="rs_trust_region='kl'.*set it to null"):
        Config.from_slime_yaml(path)


@pytest.mark.parametrize(
    "given",
    [
        {"mis_use_tis": True, "mis_tis_level": "sequence", "mis_tis_upper_bound": 3.0},
        {"use-tis": True, "mis-level": "sequence", "mis-upper-bound": 3.0},
        {"use_tis": True, "mis_level": "sequence", "mis_upper_bound": 3.0},
    ],
)
def test_slimes_keys_have_several_spellings(given):
    with pytest.warns(UserWarning, match=r"slime keys \(use_tis, tis_level, tis_upper_bound\)"):
        config = Config.from_dict(given)
    assert config == Config(rollout_is="sequence", rollout_is_threshold=3.0, rollout_is_mode="truncate")
    with pytest.raises(ValueError, match="tis_upper_bound is there twice"):
        Config.from_dict({**given, "tis-upper-bound": 4.0})


SWITCHES = (
    *("use_tis", "use_rs", "tis_batch_normalize", "use_rollout_logprobs", "get_mismatch_metrics"),
    *("bypass_old_logprob_for_rollout", "use_pure_rollout_correction", "use_policy_gradient"),
    *("bypass_mode", "rollout_is_batch_normalize"),
)


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", ["yes", "1", "0", "off", "", 0, 1, 2.0, [True]])
def test_no_switch_takes_whatever_is_not_a_boolean_for_true(key, value):
    with pytest.raises(TypeError, match=f"{key} must be true or false, got"):
        Config.from_dict({key: value})


def test_a_slime_file_must_quote_its_bands(tmp_path):
    path = tmp_path / "mis.yaml"
    path.write_text("use-tis: true\ntis-mode: clip\ntis-upper-bound: 0.5_5\n")
    with pytest.raises(ValueError, match=r"mis.yaml, line 3: tis-upper-bound: got 0.5_5 without quotes"):
        Config.from_slime_yaml(path)
    path.write_text("use-tis: true\ntis-mode: clip\ntis-upper-bound: '0.5_5'\n")
    with pytest.warns(UserWarning, match="slime keys"):
        assert Config.from_slime_yaml(path).rollout_is_threshold == "0.5_5"


# In words.


@pytest.mark.parametrize(
    ("config", "phrases"),
    [
        (Config.decoupled_token_is(), ("decoupled PPO with truncated", "three: pi_rollout", "at most 2", "once per")),
        (Config.decoupled_token_icepop(), ("IcePop", "0 outside [0.5, 5]")),
        (Config.bypass_ppo_clip(), ("PPO in bypass mode", "two: pi_rollout", "pi_theta/pi_rollout, around 1")),
        (Config.bypass_pg_is(), ("off-policy REINFORCE with truncated", "Clipped:   nothing", "every mini-step")),
        (Config.geo_rs(), ("rejection sampling", "[0.999, 1.001]", "veto", "0.0001")),
        (Config.decoupled_k3_rs(), ("k3 = r - 1 - l", "exceeds 0.01")),
        (SEQ(rollout_is_mode="clip", rollout_is_threshold="0.5_3"), ("clipped into [0.5, 3]",)),
        (SEQ(rollout_is_mode="mask", rollout_is_threshold="0_3"), ("masked importance", "outside [0, 3]")),
        (SEQ(rollout_is_batch_normalize=True), ("divided by their mean", "a scoring pass")),
        (Config(guard="off"), ("Guard:     none",)),
        (Config(guard="fallback"), ("warns after",)),
        (
            Config(bypass_mode=True, guard="fallback", guard_patience=5),
            ("falls back to decoupled mode after 5 updates",),
        ),
        (
            Config(bypass_mode=True, guard_clip_fraction=0.2),
            ("warns after 3 updates in a row with more than 20% clipped",),
        ),
        (
            Config(bypass_mode=True, loss_type="reinforce"),
            ("with more than 50% rejected, or an engine gap of 0.05",),
        ),
    ],
)
def test_explanations(config, phrases):
    text = explain(config).text
    for phrase in phrases:
        assert phrase in text, text


def test_on_clean_images_nothing_is_said_about_an_engine():
    awm = CleanImages(has_old=True, clips=True, averaged=False)
    explanation = explain(SEQ(rollout_is_threshold=2.0), awm)
    assert "pi_rollout (drew the images, an older actor only with a lag), pi_old" in explanation.text
    assert "Clipped:   the ratio pi_theta/pi_old of matching errors" in explanation.text
    assert "Weighted:  the loss, by the product of a row's ratios pi_old/pi_rollout, at most 2" in explanation.text
    assert "engine" not in explanation.text
    assert explain(Config.disabled(), awm).warnings == ()
    nft = explain(Config.disabled(), CleanImages(has_old=True, clips=False, averaged=True)).text
    assert "pi_old (an average of the actor)" in nft
    assert "Clipped:   nothing" in nft
    assert "Cost:      a scoring pass of pi_old;" in nft
    dpo = explain(Config.disabled(), CleanImages(has_old=False, clips=False, averaged=False)).text
    assert "pi_old" not in dpo.replace("pi_old/pi_rollout", "")
    assert "a forward pass of the reference" in dpo


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        (Config.disabled(), "rollout policy is ignored"),
        (Config.ppo_is_bypass(), "twice"),
        (Config(rollout_is=None, bypass_mode=True, loss_type="reinforce"), "biased"),
        (Config.bypass_ppo_clip_geo_rs(), "one SDE step at a time"),
        (SEQ(rollout_is_threshold=1e9), "upper bound 1e+09 can never bind"),
        (
            Config(rollout_rs="token_k2", rollout_rs_threshold=250.0),  # k2 ends at 20^2 / 2 = 200
            "threshold of token_k2 can never bind",
        ),
        (Config(rollout_rs="token_k1", rollout_rs_threshold=1e9), "threshold of token_k1 can never bind"),
        (Config(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"), "wide for SDE steps"),
        (Config(rollout_rs="seq_mean_k1", rollout_rs_threshold="1.1_2.0"), "excludes a ratio of 1"),
        (Config(rollout_token_veto_threshold=1.5), "usually all"),
        (Config.decoupled_geo_rs(), "kept/total"),
        (Config(rollout_rs_threshold="0.5_2.0"), "no rollout_rs to act on"),
        (Config(rollout_is_threshold=3.0), "rollout_is_threshold=3.0 has no rollout_is to act on"),
        (Config(rollout_is_mode="clip"), "rollout_is_mode='clip' has no rollout_is to act on"),
        (Config(rollout_is_batch_normalize=True), "rollout_is_batch_normalize=True has no rollout_is to act on"),
    ],
)
def test_classic_mistakes_give_a_warning(config, phrase):
    found = [w for w in explain(config).warnings if phrase in w]
    assert len(found) == 1, explain(config).warnings


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(), ["decoupled mode", "no importance weights, no rejection", "measured, not corrected"]),
        (Config.decoupled_token_is(), ["decoupled mode", "weights each element's ratio pi_old/pi_rollout, at most 2"]),
        (
            SEQ(rollout_is_threshold="0.5_3", rollout_is_batch_normalize=True),
            ["weights the product", "0 outside [0.5, 3], divided by their batch mean"],
        ),
        (Config.geo_rs(), ["rejects rows whose geometric-mean ratio", "[0.999, 1.001]", "below 0.0001 (veto)"]),
        (
            Config.bypass_ppo_clip_k3_rs(),
            ["bypass mode", "ppo_clip", "PPO ratio pi_theta/pi_rollout is the importance weight itself", "0.01"],
        ),
        (Config.ppo_is_bypass(), ["is the importance weight itself", "rollout_is=token is measured, not applied"]),
        (Config.bypass_pg_is(5.0), ["reinforce", "weights the product", "pi_theta/pi_rollout, at most 5"]),
        (Config.bypass_pg_geo_rs(), ["reinforce", "rejects rows"]),
        (Config(rollout_rs="seq_mean_k1", rollout_rs_threshold="auto"), ["rejects rows", "(auto)"]),
    ],
)
def test_one_line_says_what_is_in_force(config, said):
    line = in_force(config)
    assert "\n" not in line
    for phrase in said:
        assert phrase in line, line
    weighted = config.rollout_is is not None and config.weights_act
    assert ("weights " in line.replace("importance weights", "")) == weighted, line
    assert ("rejects " in line) == config.plan().can_reject, line


def test_mask_mode_in_bypass_mode_rejects_and_says_so():
    """Its effect on the loss: `test_mask_mode_rejects_in_bypass_ppo_clip`."""
    config = Config(bypass_mode=True, rollout_is="token", rollout_is_mode="mask", rollout_is_threshold="0.5_3")
    explanation = explain(config)
    assert "Algorithm: PPO in bypass mode with rejection sampling" in explanation.text
    assert "Weighted:  nothing: the PPO ratio is the importance weight; rollout_is only rejects" in explanation.text
    assert "Rejected:  what has each element's ratio outside [0.5, 3]" in explanation.text
    assert "diagnos" not in explanation.text + "".join(explanation.warnings)
    reweighted = explain(dataclasses.replace(config, rollout_is_mode="clip"))
    assert "rollout_is only adds diagnostics" in reweighted.text
    assert any("diagnostics only" in w for w in reweighted.warnings)


def test_the_presets_that_the_page_names_exist():
    page = (Path(__file__).parents[2] / "docs" / "rollout_correction.md").read_text(encoding="utf-8")
    guide = page[page.index("## Which preset when") : page.index("### Configurations of other projects")]
    column = [line.split("|")[2] for line in guide.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    named = {name for cell in column for name in re.findall(r"`(\w+)`", cell)} - {"rollout_rs"}
    assert len(named) > 8
    assert named <= set(PRESET_NAMES), named - set(PRESET_NAMES)
