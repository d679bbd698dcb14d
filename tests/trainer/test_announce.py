"""The lines that a run prints before it starts."""

from pathlib import Path

import pytest

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer.logging import announcement

CORRECTION = "algorithm.rollout_correction"
DEMO = "tiny_qwen_image_ocr"
GUIDED = "rollout.pipeline.true_cfg_scale=4"


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("flowgrpo_trainer", [], "decoupled mode (pi_old recomputed): no importance weights, no rejection: the gap"),
        (
            "flowgrpo_trainer",
            [f"{CORRECTION}.preset=decoupled_token_is"],
            "weights each element's ratio pi_old/pi_rollout, at most 2",
        ),
        ("flowgrpo_trainer", [f"{CORRECTION}.preset=geo_rs"], "is outside [0.999, 1.001] (seq_mean_k1); rows with one"),
        (
            "flowgrpo_trainer",
            [f"{CORRECTION}.bypass_mode=true"],
            "the PPO ratio pi_theta/pi_rollout is the importance weight itself",
        ),
        ("flowgrpo_trainer", [], "; guard: warn"),
        (DEMO, [], "bypass mode (pi_old = pi_rollout, ppo_clip)"),
        (DEMO, [], "rollout_is=sequence is measured, not applied"),
        (DEMO, [], "outside [0.5, 2] (seq_mean_k1)"),
        (DEMO, ["rollout.pipeline.true_cfg_scale=1"], "Guidance: none"),
        (DEMO, [GUIDED], "true_cfg_scale=4, one forward for both halves; the update's gradient goes through both"),
        (DEMO, [GUIDED, "model.batch_guidance=false"], "true_cfg_scale=4, a forward for each half; the update's gra"),
        (
            DEMO,
            [GUIDED, "actor.detach_unconditional=true"],
            "gradient leaves the unconditional half out (detach_unconditional)",
        ),
        # At most a mini-batch: the demo's has 48 images of 2 steps.
        (DEMO, ["actor.ppo_micro_batch_size_per_gpu=999"], "micro-batches of 48 images x 2 SDE steps"),
        (DEMO, ["actor.ppo_micro_batch_rows=3"], "micro-batches of 3 rows (SDE steps of images)"),
    ],
)
def test_the_first_lines_tell_what_the_configuration_amounts_to(name, overrides, line):
    full = [one if one.startswith("algorithm") else f"actor_rollout_ref.{one}" for one in overrides]
    config = compose(name, full)
    lines = announcement(config, config.rollout_correction, Path("outputs"), 1)
    assert sum(line in text for text in lines) == 1
    assert not any("\n" in text for text in lines)
