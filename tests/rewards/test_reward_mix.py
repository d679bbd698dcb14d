"""The weighted sum, and answers of functions: everything sensible is read, everything else is one clear error."""

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_files import IMAGES, PROMPTS, function, write

from flowgrpo_rc.rewards import (
    CustomRewardConfig,
    RewardConfig,
    RewardError,
    RewardMix,
    build_reward,
    jpeg_compressibility,
)
from flowgrpo_rc.rewards.mix import try_own


def length(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> list[int]:
    return [len(prompt) for prompt in prompts]


def from_metadata(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
    return np.asarray([row.get("x", 0.5) for row in metadata]), {"text": [p.upper() for p in prompts]}


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
    with pytest.raises(ValueError, match=r"must name the same rewards, at least one"):
        RewardMix({"length": length}, {"other": 1.0})


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


def test_build_reward_by_default_is_ocr_and_checks_prompts() -> None:
    mix = build_reward()
    assert list(mix.functions) == ["ocr"]
    mix.check_prompts(['the text "42"'], image_size=(32, 32))
    with pytest.raises(ValueError, match=r"val\.txt:7: 'a cat' has no text in double quotes"):
        mix.check_prompts(['the text "42"', "a cat"], sources=["val.txt:6", "val.txt:7"])
    with pytest.raises(RewardError, match=r"'ocr' raised ValueError: prompt 2: 'ccc' has no text"):
        mix(IMAGES, ['"a"', '"b"', "ccc"])


def test_a_check_of_prompts_gets_the_arguments_that_it_declares() -> None:
    seen: list[dict[str, Any]] = []
    known = {"image_size": (8, 8), "sources": ["p:1"], "metadata": [{"x": 1}]}
    checks = [
        lambda prompts, *, image_size, sources, metadata: seen.append(
            {"image_size": image_size, "sources": sources, "metadata": metadata}
        ),
        lambda prompts, **known: seen.append(known),
        lambda prompts, *, sources: seen.append({"sources": sources}),
    ]
    for check in checks:
        reward = partial(length)
        reward.check_prompts = check  # type: ignore[attr-defined]
        RewardMix({"f": reward}, {"f": 1.0}).check_prompts(["a"], **known)
    assert seen == [known, known, {"sources": ["p:1"]}]
    RewardMix({"f": reward}, {"f": 1.0}).check_prompts(["a"])
    assert seen[-1] == {"sources": ["prompt 0"]}


# ---------------------------------------------------------------------- answers


def mix_of(*answers: Any, weights: tuple[float, ...] = (1.0,)) -> RewardMix:
    functions = {f"f{i or ''}": lambda *batch, answer=answer: answer for i, answer in enumerate(answers)}
    return RewardMix(functions, dict(zip(functions, weights, strict=True)))


class Series:
    """As pandas' series: neither a list nor an array, but convertible."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "answer",
    [
        (1.0, 2.0, 3.0),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.float16),
        np.array([1, 2, 3], object),
        [np.float16(1), np.int8(2), np.array(3)],
        [Fraction(1), 2, 3],
        Series(),
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        [torch.tensor(1.0), torch.tensor(2.0, requires_grad=True), 3],
        (torch.tensor([1.0, 2.0, 3.0], requires_grad=True), {}),
        ({"avg": [1, 2, 3], "part": [0, 0, 0]}, {}),
    ],
)
def test_numbers_in_any_container(answer: Any) -> None:
    result = mix_of(answer)(IMAGES, PROMPTS)
    np.testing.assert_array_equal(result.total, np.asarray([1, 2, 3], np.float32))
    assert result.total.dtype == result.parts["f"].dtype == np.float32


def test_flow_grpos_parts_are_kept_beside_its_total_and_a_pair_of_numbers_is_two_scores() -> None:
    assert mix_of(({"avg": [1, 2, 3], "ocr": [0, 0, 1]}, {}))(IMAGES, PROMPTS).info == {"f": {"ocr": [0, 0, 1]}}
    assert mix_of((0.25, True))(IMAGES[:2], PROMPTS[:2]).total.tolist() == [0.25, 1.0]


def numbers():
    yield from (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "None; return one float per image"),
        ("123", "str; return"),
        ({"score": [1, 2, 3]}, "dict; return"),
        (numbers(), "generator; return"),
        (["1", "2", "3"], r"list that does not convert to floats \(its entry 0 is str '1'\)"),
        ([1.0, None, 3.0], r"list that does not convert to floats \(its entry 1 is None\)"),
        ([1.0, [2.0], 3.0], "list that does not convert to floats"),
        (np.ones(3) * 1j, r"ndarray that does not convert to floats \(its type is complex128\)"),
        (np.array([1, None, 3], object), r"ndarray that does not convert to floats \(its entry 1 is None\)"),
        (torch.ones(3, dtype=torch.complex64), r"Tensor that does not convert to floats \(its type is torch.complex64"),
        (([1, 2, 3], None), "tuple that does not convert to floats"),
        ([1.0, 2.0], r"scores of shape \(2,\), expected \(3,\)"),
        ([[1.0], [2.0], [3.0]], r"scores of shape \(3, 1\), expected"),
        (torch.tensor(1.0), r"scores of shape \(\), expected \(3,\)"),
        (torch.ones(3, 1), r"scores of shape \(3, 1\), expected \(3,\)"),
        (
            torch.tensor([1.0, float("nan"), 0.0]),
            "1 non-finite of 3 scores; the first is nan for sample 1, prompt 'bb'",
        ),
        (np.array([0.0, 0.0, 1e39]), "1 of 3 scores beyond float32's largest number.*1e.39 for sample 2, prompt 'ccc'"),
    ],
)
def test_everything_else_is_refused(answer: Any, told: str) -> None:
    with pytest.raises(RewardError, match=f"reward function 'f' returned {told}") as caught:
        mix_of(answer)(IMAGES, PROMPTS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"a": [1, 2]}, r"info\['a'\] with 2 entries for 3 images"),
        ({"a": 1}, r"info\['a'\] of type int; give a list with one entry for each of the 3 images"),
        ({"a": "abc"}, r"info\['a'\] of type str"),
        ({"good": [1, 2, 3], "text": ["x"]}, r"info\['text'\] with 1 entries"),
        ({"text": ["x", None, "z"]}, r"info\['text'\]\[1\] = None; .*must be a string"),
        ({1: [1, 2, 3]}, "info with the key 1; its keys must be strings"),
        ({"part/a": [1, None, 3]}, r"info\['part/a'\]\[1\] = None; .*must be a finite number"),
        ({"part/a": [1, 2, np.float32("nan")]}, r"info\['part/a'\]\[2\] = .*nan.*must be a finite number"),
        ({"part/a": [[1.0], [2.0], [3.0]]}, r"info\['part/a'\]\[0\] = \[1\.0\]; .*must be a finite number"),
        ({"part/a": ["1", "2", "3"]}, r"info\['part/a'\]\[0\] = '1'; .*must be a finite number"),
        ({"part/a/b": [1, 2, 3]}, r"info\['part/a/b'\]; what follows part/ becomes part of a metric's name"),
    ],
)
def test_info_has_an_entry_for_every_image(info: Any, told: str) -> None:
    with pytest.raises(RewardError, match=f"reward function 'f' returned {told}"):
        mix_of(([1, 2, 3], info))(IMAGES, PROMPTS)


def test_info_may_be_arrays_and_tensors() -> None:
    info = {"a": torch.ones(3, requires_grad=True), "b": np.zeros((3, 2)), "c": ("x", None, 1)}
    assert mix_of(([1, 2, 3], info))(IMAGES, PROMPTS).info["f"] == {
        "a": [1.0, 1.0, 1.0],
        "b": [[0.0, 0.0]] * 3,
        "c": ["x", None, 1],
    }


@pytest.mark.parametrize(
    "numbers",
    [
        [np.float32(1), np.int8(2), np.array(3)],
        [torch.tensor(1.0), torch.tensor(2.0, requires_grad=True), 3],
        [Fraction(1), 2, 3],
        np.array([1, 2, 3], np.float16),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    ],
)
def test_parts_of_a_score_are_read_as_scores_are(numbers: Any) -> None:
    result = mix_of(([1, 2, 3], {"part/a": numbers}))(IMAGES, PROMPTS)
    assert result.info["f"]["part/a"] == [1.0, 2.0, 3.0]
    assert {type(number) for number in result.info["f"]["part/a"]} == {float}
    np.testing.assert_array_equal(result.inner_parts["f/a"], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("answers", "weights"),
    [
        (([0, 3e38, 0],), (10.0,)),
        (([0, 3e38, 0], [0, 3e38, 0]), (1.0, 1.0)),
        (([0, 3e38, 0], [0, 3e38, 0]), (1e308, -1e308)),  # inf - inf
    ],
)
def test_a_sum_beyond_float32_names_sample_and_terms(answers: Any, weights: Any) -> None:
    with pytest.raises(
        RewardError, match=r"weighted sum .* for 1 of 3 samples; .*sample 1, prompt 'bb': .* 3e\+38 \(f\)"
    ):
        mix_of(*answers, weights=weights)(IMAGES, PROMPTS)


def test_large_terms_that_cancel_are_fine() -> None:
    result = mix_of([0, 3e38, 0], [0, 3e38, 0], weights=(2.0, -1.5))(IMAGES, PROMPTS)
    np.testing.assert_allclose(result.total, [0, 1.5e38, 0], rtol=1e-6)


def test_long_values_and_prompts_are_shortened() -> None:
    for answer in (([1.0, 2.0, 3.0], {"text": ["a", "b", list(range(100_000))]}), [float("nan")] * 3):
        with pytest.raises(RewardError) as caught:
            mix_of(answer)(IMAGES, ["a" * 100_000] * 3)
        assert len(str(caught.value)) < 1000


COUNTING = """
class f:
    def __init__(self):
        self.calls = 0

    def __call__(self, images, prompts, metadata):
        self.calls += 1
        return [float(self.calls)] * len(images)
"""


def tried(config: RewardConfig, names: Any) -> None:
    try_own(config, names, "a cat", {"target": 3}, source="train.jsonl:1", image_size=(16, 24))


def test_a_trial_leaves_the_objects_of_the_run_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, COUNTING + f"\n(open({str(tmp_path / 'imports')!r}, 'a')).write('x')\n")
    own = CustomRewardConfig(path=str(path), name="f")
    config = RewardConfig(functions={"jpeg_compressibility": 1.0}, custom_reward_function=own)
    mix = build_reward(config)
    tried(config, mix.functions)
    assert (tmp_path / "imports").read_text() == "xx"
    assert build_reward(config).functions["f"].function is mix.functions["f"].function
    assert mix(IMAGES, PROMPTS).parts["f"].tolist() == [1.0] * 3
    tried(config, ["jpeg_compressibility"])
    assert (tmp_path / "imports").read_text() == "xx"


def test_a_trial_gets_two_images_and_the_row(tmp_path: Path) -> None:
    body = """
    assert images.shape == (2, 16, 24, 3) and images[0].std() > 60 and (images[0] != images[1]).any()
    assert prompts == ["a cat"] * 2 and metadata == [{"target": 3}] * 2
    return images.mean((1, 2, 3)) * np.nan
    """
    own = CustomRewardConfig(path=str(write(tmp_path, function(body))), name="f")
    config = RewardConfig(custom_reward_function=own)
    with pytest.raises(
        RewardError, match=r"^reward function 'f' returned 2 non-finite of 2 .* the row train.jsonl:1; mend it"
    ):
        tried(config, ["f"])


def test_a_file_that_runs_once_only_is_not_tried(tmp_path: Path) -> None:
    """As one that binds a port."""
    mark = tmp_path / "bound"
    text = f"open({str(mark)!r}, 'x').close()\n" + function("raise AssertionError('it was tried')")
    config = RewardConfig(custom_reward_function=CustomRewardConfig(path=str(write(tmp_path, text)), name="f"))
    tried(config, build_reward(config).functions)
    assert mark.exists()
