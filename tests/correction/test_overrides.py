"""Keys of every dialect beside a preset: what is given is in the result, or an error says why it cannot be."""

import dataclasses
import warnings

import pytest
import yaml

from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.options.presets import PRESET_NAMES
from flowgrpo_rc.correction.plan import parse_is_threshold, split_band

Config = RolloutCorrectionConfig

# preset, keys beside it, what differs from the preset
HALVES = [
    (
        "seq_is_rs",
        {"rollout_rs_threshold": 3.0, "rollout_rs_threshold_lower": 0.1},
        {"rollout_rs_threshold": "0.1_3.0"},
    ),
    ("seq_is_rs", {"rollout_rs_threshold": 3.0}, {"rollout_rs_threshold": "0.5_3.0"}),
    ("seq_is_rs", {"rollout_rs_threshold": "3.0"}, {"rollout_rs_threshold": "0.5_3.0"}),
    ("seq_is_rs", {"rollout_rs_threshold_lower": 0.1}, {"rollout_rs_threshold": "0.1_2.0"}),
    (
        "seq_mis",
        {"rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": None},
        {"rollout_rs_threshold": "0.25_4.0"},
    ),
    ("seq_mis", {"rollout_rs_threshold": 4.0}, {"rollout_rs_threshold": "0_4.0"}),
    ("seq_mis", {"rollout_rs_threshold_lower": 0}, {}),
    ("geo_rs", {"rollout_rs_threshold": 1.01}, {"rollout_rs_threshold": "0.999_1.01"}),
    ("geo_rs", {"rollout_rs": "geometric", "rollout_rs_threshold": 1.01}, {"rollout_rs_threshold": "0.999_1.01"}),
    ("pg_rs", {"rollout_rs_threshold_lower": 0.9}, {"rollout_rs_threshold": "0.9_1.001"}),
    ("bypass_ppo_clip_geo_rs", {"rollout_rs_threshold_lower": 0.9}, {"rollout_rs_threshold": "0.9_1.001"}),
    # another criterion brings its own band, and takes the preset's where it brings none
    (
        "geo_rs",
        {"rollout_rs": "sequence", "rollout_rs_threshold": 4.0},
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.25_4.0"},
    ),
    (
        "geo_rs",
        {"rollout_rs": "token", "rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": 0.1},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.1_4.0"},
    ),
    ("seq_is_rs", {"rollout_rs": "token"}, {"rollout_rs": "token_k1"}),
    (
        "decoupled_token_is",
        {"rollout_rs": "token", "rollout_is_threshold": 4.0},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.25_4.0", "rollout_is_threshold": 4.0},
    ),
    (
        "decoupled_k3_rs",
        {"rollout_rs": "token", "rollout_rs_threshold": 4.0},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.25_4.0"},
    ),
]
MODES = [
    ("decoupled_token_is", {"bypass_old_logprob_for_rollout": True}, {"bypass_mode": True}),
    ("decoupled_token_is", {"bypass_old_logprob_for_rollout": "true"}, {"bypass_mode": True}),
    ("ppo_is_bypass", {"bypass_old_logprob_for_rollout": False}, {"bypass_mode": False}),
    ("seq_is", {"use_pure_rollout_correction": True}, {"bypass_mode": True, "loss_type": "reinforce"}),
    ("pg_is", {"use_policy_gradient": False}, {"loss_type": "ppo_clip"}),
    ("pg_is", {"use_policy_gradient": "False"}, {"loss_type": "ppo_clip"}),
]
SLIME = [
    ("seq_is_rs", {"rs_upper_bound": 3.0}, {"rollout_rs_threshold": "0.5_3.0"}),
    ("seq_is_rs", {"rs_lower_bound": 0.1}, {"rollout_rs_threshold": "0.1_2.0"}),
    ("seq_is_rs", {"rs_level": "token"}, {"rollout_rs": "token_k1"}),
    (
        "geo_rs",
        {"rs_level": "sequence", "rs_upper_bound": 4.0},
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_4.0"},
    ),
    ("seq_is_rs", {"use_rs": False}, {"rollout_rs": None, "rollout_rs_threshold": None}),
    (
        "geo_rs",
        {"use_rs": False},
        {"rollout_rs": None, "rollout_rs_threshold": None, "rollout_token_veto_threshold": None},
    ),
    ("seq_is_rs", {"use_tis": False}, {"rollout_is": None}),
    ("seq_is_rs", {"use_tis": "false"}, {"rollout_is": None}),
    ("seq_is_rs", {"use_tis": True}, {}),
    ("seq_is_rs", {"tis_level": "geometric"}, {"rollout_is": "geometric"}),
    ("seq_is_rs", {"tis_upper_bound": 3.0}, {"rollout_is_threshold": 3.0}),
    ("seq_is_rs", {"tis_mode": "clip"}, {"rollout_is_threshold": "0.5_2.0", "rollout_is_mode": "clip"}),
    (
        "seq_is",
        {"tis_mode": "mask", "tis_lower_bound": 0, "tis_upper_bound": 4},
        {"rollout_is_threshold": "0_4", "rollout_is_mode": "mask"},
    ),
    ("decoupled_token_icepop", {"tis_lower_bound": 0.3}, {"rollout_is_threshold": "0.3_5.0"}),
    ("decoupled_token_icepop", {"tis_upper_bound": 3.0}, {"rollout_is_threshold": "0.5_3.0"}),
    (
        "decoupled_token_icepop",
        {"tis_mode": "truncate"},
        {"rollout_is_threshold": 5.0, "rollout_is_mode": "truncate"},
    ),
    ("geo_rs", {"use_tis": True, "tis_upper_bound": 4.0}, {"rollout_is": "token", "rollout_is_threshold": 4.0}),
    (
        "token_is",
        {"use_rs": True, "rs_upper_bound": 4.0},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_4.0"},
    ),
    (
        "geo_rs",
        {"use_rs": True, "use_tis": True, "tis_batch_normalize": True},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
    ),
    ("geo_rs", {"rs_veto_threshold": 1e-5}, {"rollout_token_veto_threshold": 1e-5}),
    ("geo_rs", {"rs_veto_threshold": None}, {"rollout_token_veto_threshold": None}),
    ("seq_is", {"use_rollout_logprobs": True}, {"bypass_mode": True}),
    (
        "geo_mis",
        {"get_mismatch_metrics": True},
        {"rollout_rs": None, "rollout_rs_threshold": None, "rollout_token_veto_threshold": None},
    ),
    (
        "geo_rs",
        {"rollout_is": "token", "rs_veto_threshold": 1e-3},
        {"rollout_is": "token"} | {"rollout_token_veto_threshold": 1e-3},
    ),
]


def _read(given):
    """The configuration, and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = Config.from_dict(given)
    return config, [str(w.message) for w in caught]


@pytest.mark.parametrize(("preset", "given", "changes"), [*HALVES, *MODES, *SLIME])
def test_keys_of_every_dialect_override_a_preset(preset, given, changes):
    config, messages = _read({"preset": preset, **given})
    assert config == dataclasses.replace(getattr(Config, preset)(), **changes)
    assert len(messages) == 1


@pytest.mark.parametrize(("preset", "given", "changes"), [*HALVES, *MODES, *SLIME])
def test_the_warning_prints_the_form_that_results(preset, given, changes):
    config, (message,) = _read({"preset": preset, **given})
    form = message.split("the canonical form is: ")[1]
    lines = "\n".join(pair.replace("=", ": ", 1) for pair in form.split(", "))
    for pasted in (yaml.safe_load(lines), {"preset": preset, **yaml.safe_load(lines)}):
        again, messages = _read(pasted)
        assert again == config, form
        assert messages == []


@pytest.mark.parametrize(
    ("given", "threshold"),
    [
        ({"preset": "seq_is_rs", "rollout_rs_threshold": "0.3_4.0"}, "0.3_4.0"),
        ({"preset": "seq_is_rs", "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}, 3.0),
        ({"preset": "decoupled_k3_rs", "rollout_rs_threshold": 0.05}, 0.05),
        ({"preset": "decoupled_geo_rs", "rollout_rs_threshold": "auto"}, "auto"),
        ({"preset": "decoupled_geo_rs", "rollout_rs": None}, None),
    ],
)
def test_whole_thresholds_stand_as_they_are(given, threshold):
    config, messages = _read(given)
    assert config.rollout_rs_threshold == threshold
    assert messages == []


# Every key against every preset.

VALUES = {
    **{"rollout_is": "geometric", "rollout_is_threshold": 3.5, "rollout_is_batch_normalize": True},
    **{"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 3.5, "rollout_token_veto_threshold": 0.02},
    **{"rollout_is_mode": "clip", "bypass_mode": True, "rejection_normalization": "kept", "guard": "off"},
    **{"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True, "use_policy_gradient": True},
    "rollout_rs_threshold_lower": 0.02,
    **{"use_tis": True, "tis_mode": "clip", "tis_level": "geometric", "tis_lower_bound": 0.03},
    **{"tis_upper_bound": 7.5, "tis_batch_normalize": True, "use_rs": True, "rs_level": "geometric"},
    **{"rs_lower_bound": 0.04, "rs_upper_bound": 8.5, "rs_veto_threshold": 0.02, "use_rollout_logprobs": True},
}


def _has(config: Config, key: str) -> bool:
    """Whether what `VALUES` gives for a key is what the configuration does."""
    value, c = VALUES[key], config
    halves = (None, None) if c.rollout_rs_threshold is None else split_band(c.rollout_rs_threshold, key)
    lower, upper = (None if half is None else float(half) for half in halves)
    _, tis_lower, tis_upper = parse_is_threshold(c.rollout_is_threshold, c.rollout_is_mode)
    found = {
        "rollout_rs_threshold": upper == value,
        "rollout_rs_threshold_lower": lower == value,
        "bypass_old_logprob_for_rollout": c.bypass_mode,
        "use_pure_rollout_correction": c.bypass_mode and c.loss_type == "reinforce",
        "use_policy_gradient": c.bypass_mode and c.loss_type == "reinforce",
        "use_tis": c.rollout_is is not None,
        "tis_mode": c.rollout_is_mode == value and c.rollout_is is not None,
        "tis_level": c.rollout_is == value,
        # bounds of weights are those of rejection too, where that has none
        "tis_lower_bound": (tis_lower == value and c.rollout_is is not None) or lower == value,
        "tis_upper_bound": (tis_upper == value and c.rollout_is is not None) or upper == value,
        "tis_batch_normalize": c.rollout_is_batch_normalize,
        "use_rs": c.rollout_rs is not None,
        "rs_level": c.rollout_rs == "seq_mean_k1",
        "rs_lower_bound": lower == value and c.rollout_rs is not None,
        "rs_upper_bound": upper == value and c.rollout_rs is not None,
        "rs_veto_threshold": c.rollout_token_veto_threshold == value,
        "use_rollout_logprobs": c.bypass_mode,
    }
    return found[key] if key in found else getattr(c, key) == value


DISTINCT = ("disabled", "decoupled_token_icepop", "seq_is_rs", "decoupled_k3_rs")


def _check(preset: str, names: tuple[str, ...]) -> bool:
    """Whether the preset takes these keys; it must, or say why not."""
    config, refusal = None, ""
    try:
        config, _ = _read({"preset": preset, **{name: VALUES[name] for name in names}})
    except (ValueError, TypeError) as error:
        refusal = str(error)
    if config is None:
        assert any(name in refusal for name in (*names, "rollout_rs", "rollout_is", "loss_type")), (names, refusal)
        return False
    assert all(_has(config, name) for name in names), (names, config)
    return True


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_what_is_given_is_in_the_result_or_an_error(preset):
    assert sum(_check(preset, (name,)) for name in VALUES) >= 12


@pytest.mark.parametrize("preset", DISTINCT)
def test_so_are_any_two_keys(preset):
    keys = list(VALUES)
    pairs = [(a, b) for i, a in enumerate(keys) for b in keys[i + 1 :]]
    assert sum(_check(preset, pair) for pair in pairs) >= 60


@pytest.mark.parametrize("key", [k for k in VALUES if k != "rollout_rs"])
def test_every_key_is_taken_by_some_preset(key):
    taken = []
    for preset in PRESET_NAMES:
        try:
            taken.append(_read({"preset": preset, key: VALUES[key]})[0])
        except (ValueError, TypeError):
            continue
    assert taken


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "token_is", "rollout_rs_threshold_lower": 0.3}, "without a criterion; add rollout_rs"),
        ({"preset": "decoupled_k3_rs", "rollout_rs_threshold_lower": 0.3}, "with seq_mean_k3"),
        (
            {"preset": "seq_is_rs", "rollout_rs": None, "rollout_rs_threshold_lower": 0.3},
            "with rollout_rs=null; leave it out",
        ),
        (
            {"preset": "seq_is_rs", "rollout_rs_threshold": "0.3_4.0", "rollout_rs_threshold_lower": 0.1},
            "rollout_rs_threshold_lower=0.1 beside rollout_rs_threshold='0.3_4.0'",
        ),
        ({"preset": "seq_is_rs", "rollout_rs_threshold": 0.3}, "0.3 is below '0.5', the lower bound of preset"),
        ({"preset": "seq_is_rs", "rollout_rs_threshold_lower": 3.0}, "rollout_rs_threshold_lower=3.0 exceeds"),
        ({"preset": "seq_is_rs", "rollout_rs_threshold_lower": -1}, "rollout_rs_threshold_lower must be positive"),
        ({"preset": "geo_rs", "tis_upper_bound": 4.0}, "without weights; add use_tis: true"),
        ({"preset": "geo_rs", "tis_level": "token"}, "without weights; add use_tis: true"),
        ({"preset": "token_is", "rs_upper_bound": 4.0}, "without a criterion; add use_rs: true"),
        ({"preset": "seq_is", "tis_lower_bound": 0.5}, "with truncated weights; add tis_mode: clip"),
        ({"preset": "decoupled_k3_rs", "rs_upper_bound": 4.0}, "with seq_mean_k3"),
        ({"preset": "bypass_pg_is", "bypass_old_logprob_for_rollout": False}, "needs bypass_mode=True"),
        ({"preset": "geo_rs", "use_tis": True, "rollout_rs": "token"}, "two dialects"),
        ({"preset": "seq_is", "tis_level": "token", "rollout_is": "sequence"}, "contradicts tis_level"),
    ],
)
def test_what_cannot_act_beside_a_preset_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Config.from_dict(given)
