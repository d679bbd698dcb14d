"""Forms of a threshold, and the remedy in the message about a wrong one."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from flowgrpo_rc.correction import RolloutCorrectionConfig

FORM = "'lower_upper' as in '0.5_2.0'"
FIELDS = {"rollout_is_threshold": {"rollout_is": "token"}, "rollout_rs_threshold": {"rollout_rs": "token_k1"}}


def _message(key, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        RolloutCorrectionConfig.from_dict({**FIELDS[key], key: value})
    return str(caught.value)


@pytest.mark.parametrize("key", FIELDS)
@pytest.mark.parametrize(
    ("value", "here"),
    [
        ("0.6-1.4", "0.6_1.4"),
        ("0.6, 1.4", "0.6_1.4"),
        ("0.6 to 1.4", "0.6_1.4"),
        ("1e-3-2", "1e-3_2"),
        ([0.6, 1.4], "0.6_1.4"),
    ],
)
def test_two_numbers_that_are_no_band_show_the_band(key, value, here):
    message = _message(key, value)
    assert key in message
    assert FORM in message
    assert f"(here '{here}')" in message


@pytest.mark.parametrize("key", FIELDS)
@pytest.mark.parametrize(
    "value",
    [
        *("0.5_2.0_3", "0.5__2", "_2", "2_", "_", "0.5_x", "x_2", "2.0x", "two", "", " ", "0,5_2"),
        *([], {}, {"lower": 0.5}, np.array([0.5, 2.0])),
    ],
)
def test_what_is_no_threshold_shows_the_form_in_one_short_line(key, value):
    message = _message(key, value)
    assert key in message
    assert FORM in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("key", FIELDS)
@pytest.mark.parametrize(
    "value",
    [np.float64(1.5), np.float32(1.5), np.float16(1.5), Decimal("1.5"), Fraction(3, 2), "1.5", " 1.5 ", "1.5e0"],
)
def test_numbers_of_every_type_are_numbers(key, value):
    """In a test because a resolved configuration is written as YAML, which knows Python's own types alone."""
    config = RolloutCorrectionConfig.from_dict({**FIELDS[key], key: value})
    assert config.plan() == RolloutCorrectionConfig.from_dict({**FIELDS[key], key: 1.5}).plan()
    assert type(getattr(config, key)) in (float, str)


@pytest.mark.parametrize("value", [True, False, np.bool_(True)])
@pytest.mark.parametrize("key", [*FIELDS, "rollout_token_veto_threshold", "guard_engine_gap"])
def test_a_switch_is_no_number(key, value):
    with pytest.raises(TypeError, match=f"{key} must be a number"):
        RolloutCorrectionConfig.from_dict({**FIELDS.get(key, {}), key: value})


@pytest.mark.parametrize("key", ["rollout_token_veto_threshold", "guard_engine_gap"])
@pytest.mark.parametrize("value", ["0.5-2.0", "0.5_2.0", "x", ""])
def test_where_one_number_belongs_no_band_is_proposed(key, value):
    with pytest.raises(ValueError, match=f"{key}: .*give one number") as caught:
        RolloutCorrectionConfig.from_dict({key: value})
    assert "lower_upper" not in str(caught.value)


@pytest.mark.parametrize("value", ["x", "", -1, math.nan, "0.5-2.0", "2.0_0.5", "0.5_2.0,y"])
def test_a_threshold_without_a_criterion_must_be_one_all_the_same(value):
    with pytest.raises(ValueError, match="rollout_rs_threshold") as caught:
        RolloutCorrectionConfig(rollout_rs_threshold=value)
    assert "\n" not in str(caught.value)
