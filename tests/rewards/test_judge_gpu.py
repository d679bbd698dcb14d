"""A real vision language model as judge, served by a real vllm: what a machine without a GPU cannot show.

FLOWGRPO_RC_JUDGE_MODEL names the model, a folder or a name on the hub (HF_HUB_OFFLINE=0 then), such as
Qwen/Qwen3-VL-2B-Instruct; a program `vllm` must be on the PATH.
"""

import os
import shutil

import numpy as np
import pytest
from PIL import Image, ImageDraw

from flowgrpo_rc.rewards import RewardConfig, build_reward

MODEL = os.environ.get("FLOWGRPO_RC_JUDGE_MODEL")


def sign(text):
    """A white sign of 448 x 448 pixels with this text."""
    image = Image.new("RGB", (448, 448), "white")
    ImageDraw.Draw(image).text((90, 150), text, fill="black", font_size=140)
    return np.asarray(image)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(MODEL is None or shutil.which("vllm") is None, reason="needs vllm and FLOWGRPO_RC_JUDGE_MODEL")
def test_a_real_model_prefers_the_right_image():
    """It reads the text that stands there, and says Yes more surely to the prompt that is right."""
    config = RewardConfig(
        functions={"judge": 1.0},
        judge={"questions": ["ocr", "yes_no"], "timeout_s": 300.0},
        reward_model={"enable": True, "model_path": MODEL, "rollout": {"max_model_len": 8192}},
    )
    reward = build_reward(config)
    try:
        images = np.stack([sign("42"), sign("77")])
        right = reward(images, ['a sign that says "42"', 'a sign that says "77"'])
        wrong = reward(images, ['a sign that says "77"', 'a sign that says "42"'])
    finally:
        reward.close()
    assert config.judge.model == MODEL
    assert right.texts == ["42", "77"]
    np.testing.assert_array_equal(right.inner_parts["judge/ocr"], [1.0, 1.0])
    assert (right.inner_parts["judge/yes_no"] > wrong.inner_parts["judge/yes_no"]).all()
    assert (right.total > wrong.total).all()
