"""Checks on a prompt writer: levels, and what they are silent about."""

import pytest

from flowgrpo_rc.report import check_health

GAP = "writer/rollout_corr/logprob_abs_diff_mean"
CONFIG = {"algorithm": {"prompt_writer": {"path": "lm", "actor": {"token_loss": {"clip_ratio": 0.2}}}}}


def found(rows, check, config=CONFIG):
    return next((finding for finding in check_health(rows, config) if finding.check == check), None)


@pytest.mark.parametrize(
    ("check", "metric", "values"),
    [
        ("writer_unfit", "writer/unfit_fraction", (0.2, 0.4, 0.6)),
        ("writer_read", "writer/read_fraction", (0.95, 0.7, 0.4)),
        ("writer_gap", GAP, (0.05, 0.12, 0.2)),
    ],
)
def test_levels(check, metric, values):
    levels = [found([{metric: value}] * 12, check).level for value in values]
    assert levels == ["ok", "watch", "problem"]
    assert found([{"reward/mean": 0.5}] * 12, check) is None


def test_the_gap_is_said_in_clip_bands():
    finding = found([{GAP: 0.12}] * 12, "writer_gap")
    assert finding.value == pytest.approx(0.6)
    assert "0.6 of clip_ratio=0.2" in finding.measured
    assert "engine.dtype" in finding.advice
    assert found([{GAP: 0.12}] * 12, "writer_gap", None) is None


@pytest.mark.parametrize(
    ("correction", "loss", "value"),
    [
        ({"bypass_mode": True}, {}, 0.6),
        ({"bypass_mode": True}, {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3}, 0.8),
        ({"bypass_mode": True, "loss_type": "reinforce"}, {}, None),
        ({"bypass_mode": False}, {}, None),
    ],
)
def test_the_gap_is_measured_where_the_clip_is_centred_at_the_engine(correction, loss, value):
    actor = {"token_loss": {"clip_ratio": 0.2, **loss}, "rollout_correction": correction}
    config = {"algorithm": {"prompt_writer": {"path": "lm", "actor": actor}}}
    finding = found([{GAP: 0.12}] * 12, "writer_gap", config)
    assert (finding and finding.value) == (value and pytest.approx(value))
    fallen_back = [{GAP: 0.12, "writer/guard/fallback": 1.0, "writer/guard/alarms": 0.0}] * 12
    assert found(fallen_back, "writer_gap", config) is None


@pytest.mark.parametrize(
    ("metrics", "level", "words"),
    [
        ({"alarms": 0, "fallback": 0}, "ok", "is quiet at step 12"),
        ({"alarms": 1, "fallback": 0}, "watch", "raises alarms at step 12"),
        ({"alarms": 0, "fallback": 1}, "watch", "has the writer in decoupled mode at step 12"),
    ],
)
def test_the_guard(metrics, level, words):
    finding = found([{f"writer/guard/{name}": value for name, value in metrics.items()}] * 12, "writer_guard")
    assert (finding.level, words in finding.measured) == (level, True)
