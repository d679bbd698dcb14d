"""The lines that a run prints before it starts."""

from pathlib import Path

import pytest

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer.logging import announcement

SECTION = "algorithm.rollout_correction"


def _line(name, overrides, begins="Rollout correction: "):
    config = compose(name, overrides)
    lines = announcement(config, config.rollout_correction, Path("outputs"), 1)
    (line,) = [text for text in lines if text.startswith(begins)]
    return line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "decoupled mode (pi_old recomputed): no importance weights, no rejection: the gap"),
        ([f"{SECTION}.preset=decoupled_token_is"], "weights each element's ratio pi_old/pi_rollout, at most 2"),
        ([f"{SECTION}.preset=geo_rs"], "is outside [0.999, 1.001] (seq_mean_k1); rows with one ratio"),
        ([f"{SECTION}.bypass_mode=true"], "the PPO ratio pi_theta/pi_rollout is the importance weight itself"),
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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "none"),
        ([4], "true_cfg_scale=4, one forward for both halves; the update's gradient goes through both halves"),
        ([4, "model.batch_guidance=false"], "true_cfg_scale=4, a forward for each half; the update's gradient goes"),
        ([4, "actor.detach_unconditional=true"], "gradient leaves the unconditional half out (detach_unconditional)"),
    ],
)
def test_one_line_at_start_says_how_guidance_is_computed_and_what_is_learned_of_it(overrides, said):
    scale, *others = overrides or [1]
    settings = [f"rollout.pipeline.true_cfg_scale={scale}", *others]
    assert said in _line("tiny_qwen_image_ocr", [f"actor_rollout_ref.{setting}" for setting in settings], "Guidance: ")


@pytest.mark.parametrize(
    ("micro", "said"),
    [
        (["ppo_micro_batch_size_per_gpu=999"], "micro-batches of 48 images x 2 SDE steps"),
        (["ppo_micro_batch_size_per_gpu=4", "ppo_micro_batch_rows=3"], "micro-batches of 3 rows (SDE steps of images)"),
    ],
)
def test_the_announcement_says_what_a_micro_batch_is(micro, said):
    """At most a mini-batch: the demo's has 48 images of 2 steps."""
    overrides = [f"actor_rollout_ref.actor.{setting}" for setting in micro]
    assert _line("tiny_qwen_image_ocr", overrides, "Each step: ").endswith(said)
