"""The OCR reward on rendered text, with the real engine; targets and similarities of texts by hand."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flowgrpo_rc.rewards import OCRConfig, OCRReward
from flowgrpo_rc.rewards.ocr import quoted_target, text_similarity


def render(text: str, size: int = 32, font_size: int = 20, colour: tuple[int, int, int] = (20, 20, 120)) -> np.ndarray:
    """`text` centred on white; (size, size, 3) uint8 RGB."""
    image = Image.new("RGB", (size, size), "white")
    font = ImageFont.load_default(font_size)
    ImageDraw.Draw(image).text((size // 2, size // 2), text, fill=colour, font=font, anchor="mm")
    return np.asarray(image)


@pytest.fixture(scope="module")
def reward() -> OCRReward:
    return OCRReward()


@pytest.fixture(scope="module")
def full_reward() -> OCRReward:
    return OCRReward(OCRConfig(mode="full"))


def test_reads_every_two_digit_number(reward: OCRReward) -> None:
    numbers = [str(number) for number in range(10, 100)]
    scores, info = reward(np.stack([render(n) for n in numbers]), [f'the text "{n}"' for n in numbers])
    assert info["text"] == numbers
    np.testing.assert_array_equal(scores, np.ones(90, np.float32))
    assert scores.dtype == np.float32


def test_scores_by_hand(reward: OCRReward) -> None:
    images = np.stack([render("42")] * 4)
    scores, info = reward(images, ['"42"', '"43"', '"17"', '"421"'])
    assert info["text"] == ["42"] * 4
    np.testing.assert_allclose(scores, [1, 0.5, 0, 2 / 3], rtol=1e-6)


def test_a_target_of_the_data_takes_the_place_of_quotes(reward: OCRReward) -> None:
    images = np.stack([render("42")] * 3)
    rows = [{"ocr_target": "42"}, {"ocr_target": 43}, {"ground_truth": "42"}]
    scores, _ = reward(images, ["forty-two", 'a sign "17"', 'a sign "421"'], rows)
    np.testing.assert_allclose(scores, [1, 0.5, 2 / 3], rtol=1e-6)
    with pytest.raises(ValueError, match="prompt 1: 'forty-two' has no text in double quotes.*a column ocr_target"):
        reward.check_prompts(['"42"', "forty-two"], metadata=[{}, {}])


def test_flat_and_noise_score_zero(reward: OCRReward) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    scores, info = reward(np.stack([np.full((32, 32, 3), 255, np.uint8), noise]), ['"42"', '"42"'])
    np.testing.assert_array_equal(scores, [0, 0])
    assert info["text"] == ["", ""]


def test_wide_images_widen_the_input(reward: OCRReward) -> None:
    image = np.asarray(render("flow matching", size=160, font_size=22))[64:96]
    assert image.shape == (32, 160, 3)
    scores, _ = reward(image[None], ['a sign "Flow Matching"'])
    np.testing.assert_array_equal(scores, [1])


def test_contained_is_match_is_off_by_default(reward: OCRReward) -> None:
    image = render("142", font_size=16)[None]
    lenient = OCRReward(OCRConfig(contained_is_match=True))
    assert reward(image, ['"42"'])[0].tolist() == [0.5]
    assert lenient(image, ['"42"'])[0].tolist() == [1.0]


def test_target_longer_than_the_input_can_hold(reward: OCRReward, full_reward: OCRReward) -> None:
    prompts = ['"42"', 'a sign "hello wide world"']
    reward.check_prompts(prompts)
    reward.check_prompts(prompts, image_size=(32, 96))  # 48 * 3 = 144 columns hold 18
    with pytest.raises(ValueError, match=r"x:2: the target 'hello wide world' has 14 characters.*for 8; widen"):
        reward.check_prompts(prompts, image_size=(32, 32), sources=["x:1", "x:2"])
    full_reward.check_prompts(prompts, image_size=(32, 32))
    with pytest.raises(ValueError, match=r"prompt 1: 'a cat' has no text in double quotes.*functions\.ocr=0"):
        reward.check_prompts(['"42"', "a cat"])


def test_full_mode_finds_lines_anywhere(full_reward: OCRReward) -> None:
    image = Image.new("RGB", (512, 512), (200, 220, 240))
    draw = ImageDraw.Draw(image)
    draw.text((60, 60), "New York", fill=(120, 10, 10), font=ImageFont.load_default(56))
    draw.text((200, 380), "Pizza", fill=(10, 90, 10), font=ImageFont.load_default(48))
    images = np.stack([np.asarray(image), np.full((512, 512, 3), 255, np.uint8)])
    scores, info = full_reward(images, ['neon "New York Pizza"', '"Pizza"'])
    assert info["text"] == ["New York Pizza", ""]
    np.testing.assert_array_equal(scores, [1, 0])


def test_colours_are_read_as_rgb(reward: OCRReward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes BGR: a red image must reach it with 255 in the last channel."""
    seen: list[np.ndarray] = []

    class Engine:
        def recognize_txt(self, images: list[np.ndarray]) -> Engine:
            seen.extend(images)
            return self

        txts = ("",)

    monkeypatch.setattr(reward, "_engine", Engine())
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 255
    reward.read(red)
    np.testing.assert_array_equal(seen[0][0, 0], [0, 0, 255])


def test_engine_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    OCRReward(OCRConfig(mode="full")).read(np.full((1, 256, 256, 3), 255, np.uint8))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert logging.getLogger("RapidOCR").level == logging.ERROR


@pytest.mark.parametrize("module", ["rapidocr", "rapidfuzz"])
def test_missing_package_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"'ocr' cannot be loaded .*{module}.*flowgrpo_rc\[ocr\]") as caught:
        OCRReward()
    assert isinstance(caught.value.__cause__, ImportError)


# ---------------------------------------------------------------------- targets and texts


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('the text "42"', "42"),
        ('a sign "Hello World" above "Bye"', "Hello World"),
        ('"ab" first', "ab"),
        ("it's 'single'", None),
        ('only one " mark', None),
        ('empty ""', None),
        ('blank "  "', None),
    ],
)
def test_quoted_target(prompt: str, target: str | None) -> None:
    assert quoted_target(prompt) == target


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("42", "42", 1.0),
        ("", "42", 0.0),
        ("4", "42", 0.5),  # one deletion of two
        ("43", "42", 0.5),  # one substitution of two
        ("24", "42", 0.0),  # two substitutions (or delete and insert): Levenshtein knows no swap
        ("142", "42", 0.5),  # one insertion
        ("7142999", "42", 0.0),  # five insertions, capped at the target's length
        ("kitten", "sitting", 1 - 3 / 7),  # the textbook pair: distance 3
        ("newyorkcity", " New\tYork\n CITY ", 1.0),
        ("abcd", "ab", 0.0),  # lev 2 = len 2: asymmetric, the target's length divides
        ("ab", "abcd", 0.5),
    ],
)
def test_similarity_by_hand(text: str, target: str, expected: float) -> None:
    assert text_similarity(text, target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("text", "expected"), [("7142999", 1.0), ("4 2", 1.0), ("24", 0.0), ("4", 0.5)])
def test_contained_is_match_is_flow_grpos_rule(text: str, expected: float) -> None:
    assert text_similarity(text, "42", contained_is_match=True) == expected
    with pytest.raises(ValueError, match=r"target text '  ' is blank"):
        text_similarity(text, "  ")
