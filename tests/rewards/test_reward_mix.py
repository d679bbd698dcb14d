"""The weighted sum and the checks on what functions answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowgrpo_rc.rewards import (
    CustomRewardConfig,
    OCRReward,
    RewardConfig,
    RewardError,
    RewardMix,
    build_reward,
    jpeg_compressibility,
)

IMAGES = np.zeros((3, 8, 8, 3), np.uint8)
PROMPTS = ["a", "bb", "ccc"]


def length(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> list[int]:
    return [len(prompt) for prompt in prompts]


def from_metadata(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
    return np.asarray([row.get("x", 0.5) for row in metadata]), {"text": [p.upper() for p in prompts]}


def mix_of(answer: Any) -> RewardMix:
    return RewardMix({"f": lambda images, prompts, metadata: answer}, {"f": 1.0})


def test_weighted_sum() -> None:
    mix = RewardMix({"length": length, "meta": from_metadata}, {"length": 2.0, "meta": -0.5})
    result = mix(IMAGES, PROMPTS, [{"x": 1.0}, {"x": 0.0}, {"x": 4.0}])
    # 2 * [1, 2, 3] - 0.5 * [1, 0, 4]
    np.testing.assert_array_equal(result.total, np.asarray([1.5, 4.0, 4.0], np.float32))
    np.testing.assert_array_equal(result.parts["length"], [1, 2, 3])
    np.testing.assert_array_equal(result.parts["meta"], [1, 0, 4])
    assert result.total.dtype == result.parts["length"].dtype == np.float32
    assert result.info == {"length": {}, "meta": {"text": ["A", "BB", "CCC"]}}
    assert result.texts == ["A", "BB", "CCC"]


def test_pair_of_scores_is_not_taken_for_scores_and_info() -> None:
    result = mix_of((0.25, 0.75))(IMAGES[:2], PROMPTS[:2])
    np.testing.assert_array_equal(result.total, [0.25, 0.75])


@pytest.mark.parametrize(
    ("answer", "shape"),
    [([1.0, 2.0], r"\(2,\)"), (1.0, r"\(\)"), ([[1.0], [2.0], [3.0]], r"\(3, 1\)"), ([], r"\(0,\)")],
)
def test_wrong_shape(answer: Any, shape: str) -> None:
    with pytest.raises(RewardError, match=rf"'f' returned scores of shape {shape}, expected \(3,\)"):
        mix_of(answer)(IMAGES, PROMPTS)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES.astype(np.float32), r"uint8 numpy array .* got float32"),
        (IMAGES[..., :1], r"\(N, H, W, 3\) in RGB, got uint8 \(3, 8, 8, 1\)"),
        (IMAGES[:2], r"equally many, got 2, 3 and 3"),
    ],
)
def test_bad_batch(images: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardMix({"length": length}, {"length": 1.0})(images, PROMPTS)


@pytest.mark.parametrize(("functions", "weights"), [({}, {}), ({"length": length}, {"other": 1.0})])
def test_functions_and_weights_must_match(functions: Any, weights: Any) -> None:
    with pytest.raises(ValueError, match=r"must name the same rewards, at least one"):
        RewardMix(functions, weights)


def test_build_reward_builds_only_what_is_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def count(images, prompts, metadata):\n    return [len(p) for p in prompts], {'n': [1, 2, 3]}\n")
    config = RewardConfig(
        functions={"ocr": 0.0, "jpeg_compressibility": 3.0},
        custom_reward_function=CustomRewardConfig(path=str(path), name="count", weight=10.0),
    )
    mix = build_reward(config)
    assert list(mix.functions) == ["jpeg_compressibility", "count"]
    result = mix(IMAGES, PROMPTS)
    jpeg = jpeg_compressibility(IMAGES)[0]
    np.testing.assert_allclose(result.total, 3 * jpeg + [10, 20, 30], rtol=1e-6)
    assert result.info["count"] == {"n": [1, 2, 3]}
    mix.check_prompts(["no quotes are needed here"])


def test_broken_custom_function_stops_before_the_engine_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    monkeypatch.setattr(OCRReward, "__init__", lambda *a: pytest.fail("the engine was loaded"))
    with pytest.raises(ValueError, match="defines no 'compute_score'"):
        build_reward(RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path))))


def test_build_reward_by_default_is_ocr_and_checks_prompts() -> None:
    mix = build_reward()
    assert list(mix.functions) == ["ocr"]
    mix.check_prompts(['the text "42"'], image_size=(32, 32))
    with pytest.raises(ValueError, match=r"val\.txt:7: 'a cat' has no text in double quotes"):
        mix.check_prompts(['the text "42"', "a cat"], sources=["val.txt:6", "val.txt:7"])
    with pytest.raises(RewardError, match=r"'ocr' raised ValueError: prompt 2: 'ccc' has no text"):
        mix(IMAGES, ['"a"', '"b"', "ccc"])


class Checked:
    """A reward whose check of prompts is what it is made with."""

    def __init__(self, check: Any) -> None:
        self.check_prompts = check

    def __call__(self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [0.0 for _ in prompts]


def test_a_check_of_prompts_gets_the_arguments_that_it_declares() -> None:
    seen: list[dict[str, Any]] = []

    def with_metadata(prompts: Any, *, image_size: Any, sources: Any, metadata: Any) -> None:
        seen.append({"image_size": image_size, "sources": sources, "metadata": metadata})

    def takes_all(prompts: Any, **known: Any) -> None:
        seen.append(known)

    def only_sources(prompts: Any, *, sources: Any) -> None:
        seen.append({"sources": sources})

    known = {"image_size": (8, 8), "sources": ["p:1"], "metadata": [{"x": 1}]}
    for check in (with_metadata, takes_all, only_sources):
        RewardMix({"f": Checked(check)}, {"f": 1.0}).check_prompts(["a"], **known)
    assert seen == [known, known, {"sources": ["p:1"]}]
    RewardMix({"f": Checked(only_sources)}, {"f": 1.0}).check_prompts(["a"])
    assert seen[-1] == {"sources": ["prompt 0"]}
