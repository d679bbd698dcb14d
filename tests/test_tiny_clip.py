"""The shipped tiny CLIP: how well it tells number pictures apart, through the rewards' own code; its script works."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_support import built_twice, given_by

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.rewards import RewardConfig, ScorerConfig, build_reward
from flowgrpo_rc.rewards.clip.text_image import CLIPCosine

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets" / "tiny_clip"
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def pictures():
    """Three hundred pictures that the model has not seen, (300, 32, 32, 3) uint8, and their numbers."""
    sys.path.append(str(EXAMPLES / "tiny_qwen_image"))
    try:
        from number_images import NUMBERS, make_dataset
    finally:
        sys.path.pop()
    images, labels = make_dataset(300, seed=5)
    grey = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return grey, [NUMBERS[label] for label in labels]


def test_it_tells_numbers_apart(pictures):
    """Its card says 97 % of 1000 pictures; of 300, 94 % is three standard errors below."""
    images, numbers = pictures
    reward = CLIPCosine(ScorerConfig(model_path="asset:tiny_clip", device="cpu"))
    every = [f'the text "{number:02d}"' for number in range(100)]
    texts = reward._encode_texts(every)
    cosines = (reward._encode_images(list(images)) @ texts.T).numpy()
    assert np.mean(cosines.argmax(1) == np.array([int(number) for number in numbers])) >= 0.94
    right = reward(images, [f'the text "{number}"' for number in numbers])
    np.testing.assert_allclose(right, cosines[np.arange(300), [int(n) for n in numbers]], atol=1e-5)
    assert right.mean() > 0.85
    assert abs(cosines.mean()) < 0.05


def test_one_wrong_digit_costs(pictures):
    """Every picture with the prompt of its number and of the next one: it is a smooth reward, without ties."""
    images, numbers = pictures
    section = {"model_path": "asset:tiny_clip", "device": "cpu"}
    mix = build_reward(RewardConfig(functions={"pickscore": 1.0}, pickscore=section))
    right = mix(images, [f'the text "{number}"' for number in numbers]).total
    wrong = mix(images, [f'the text "{(int(number) + 1) % 100:02d}"' for number in numbers]).total
    assert np.mean(right > wrong) > 0.97
    assert len(np.unique(right)) == len(right)


@pytest.mark.process
def test_the_example_script_asks_for_it(tmp_path):
    script = EXAMPLES / "flowgrpo_trainer" / "run_tiny_qwen_image_clip.sh"
    command, *overrides = given_by(script, tmp_path, "trainer.total_training_steps=40")
    config = compose("tiny_qwen_image_ocr", overrides)
    assert command == "demo"
    assert config.reward.weights() == {"clip_cosine": 1.0}
    assert config.reward.observers() == {"ocr": None}
    assert config.reward.clip_cosine.model_path == "asset:tiny_clip"
    assert config.trainer.total_training_steps == 40


@pytest.mark.slow
def test_build_script_runs_and_repeats(tmp_path):
    small = ("--images", "200", "--steps", "3", "--unseen", "0")
    model = built_twice(EXAMPLES / "tiny_clip" / "build_tiny_clip.py", tmp_path, *small, weights=1) / "model"
    scores = CLIPCosine(ScorerConfig(model_path=str(model), device="cpu"))(np.zeros((1, 32, 32, 3), np.uint8), ["a"])
    assert np.isfinite(scores).all()
