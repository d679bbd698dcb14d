"""Settings of the buffer that do not fit, each with what to set instead; what a plan counts."""

import pytest

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer.memory import planned_run

REPLAY = "algorithm.replay"
LOSS = "actor_rollout_ref.actor.diffusion_loss.loss_mode"
ROLLOUT = "actor_rollout_ref.rollout"
RC = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{REPLAY}.batches=-1"], r"algorithm\.replay\.batches: got -1"),
        ([f"{REPLAY}.share=1"], r"algorithm\.replay\.share: got 1(\.0)?; give a number between 0 and 1"),
        ([f"{REPLAY}.select=best"], "algorithm.replay.select: got .best.; choose one of random, newest, spread"),
        ([f"{REPLAY}.old_policy=current"], "old_policy: got current with rollout_correction.bypass_mode=true.*kept"),
        (
            [f"{REPLAY}.old_policy=current", f"{RC}=null", f"{LOSS}=awm", "algorithm.old_policy_decay=0.5"],
            "old_policy: got current with an old policy that is an average; set it to kept",
        ),
        (
            [f"{ROLLOUT}.adapter_lag=2", f"{REPLAY}.max_staleness=2"],
            "max_staleness: got 2, but new images are 2 batches stale; give 3 or more, or null",
        ),
        ([f"{REPLAY}.steps=3"], "algorithm.replay.steps: got 3, but a window has 2; set it to null"),
        ([f"{REPLAY}.steps=1", f"{RC}=null", f"{LOSS}=awm"], "steps: got 1, but objectives on clean images have no st"),
        (
            [f"{REPLAY}.steps=1", f"{RC}.rollout_rs_threshold=auto"],
            "steps: got 1 with rollout_correction.rollout_rs_threshold=auto, whose bounds are those of whole windows",
        ),
        (
            ["data.preferences=[pairs.jsonl]", f"{RC}=null", f"{LOSS}=dpo"],
            "replay.batches: got 2 with data.preferences, whose images are not drawn; set it to 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    batches = [] if any("batches" in one for one in settings) else [f"{REPLAY}.batches=2"]
    with pytest.raises(ValueError, match=message):
        compose("tiny_qwen_image_ocr", [*batches, *settings])


def test_without_batches_nothing_is_refused():
    config = compose("tiny_qwen_image_ocr", [f"{REPLAY}.old_policy=current", f"{REPLAY}.steps=3"])
    assert config.algorithm.replay.due(7, 2) == 0


def test_a_plan_has_the_steps_of_a_full_buffer():
    """Three for each new one, where the buffer has so many."""
    for batches, expected in ((4, 3), (2, 2), (0, 0)):
        settings = [f"{REPLAY}.batches={batches}", f"{REPLAY}.share=0.75"]
        assert planned_run(compose("tiny_qwen_image_ocr", settings)).replayed == expected
