"""What a run says of its correction before it starts."""

from pathlib import Path

import pytest

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.sde import SDEWindow
from flowgrpo_rc.trainer.trainer import announcement

SECTION = "algorithm.rollout_correction"


def _line(name, overrides):
    config = compose(name, overrides)
    lines = announcement(config, config.rollout_correction, Path("outputs"), SDEWindow(2, 0, 4), 1)
    (line,) = [text for text in lines if text.startswith("Rollout correction: ")]
    return line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "decoupled mode (pi_old recomputed): no importance weights, no rejection: the gap"),
        ([f"{SECTION}.preset=decoupled_token_is"], "weights each element's ratio pi_old/pi_rollout, at most 2"),
        ([f"{SECTION}.preset=geo_rs"], "is outside [0.999, 1.001] (seq_mean_k1); rows with one ratio"),
        ([f"{SECTION}.bypass_mode=true"], "the PPO ratio pi_theta/pi_rollout is the importance weight itself"),
        ([f"{SECTION}.rollout_is_threshold=3.0"], "no importance weights"),
    ],
)
def test_one_line_at_start_says_which_correction_is_in_force(overrides, said):
    line = _line("flowgrpo_trainer", overrides)
    assert said in line
    assert line.endswith("guard: warn")
    assert "\n" not in line


def test_the_demo_names_its_correction_itself():
    line = _line("tiny_qwen_image_ocr", [])
    assert "bypass mode (pi_old = pi_rollout, ppo_clip)" in line
    assert "rollout_is=sequence is measured, not applied" in line
    assert "outside [0.5, 2] (seq_mean_k1)" in line
