"""Parts of a batch, scored as they come: the same calls and the same scores whoever scores them, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_files import function, write

from flowgrpo_rc.rewards import (
    CustomRewardConfig,
    OCRReward,
    PartialScoring,
    RewardConfig,
    RewardError,
    RewardMix,
    ScoringThread,
    build_reward,
    jpeg_compressibility,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)
PROMPTS = [f"prompt {i}" for i in range(7)]
METADATA: list[dict[str, Any]] = [{"index": i} for i in range(7)]
WAIT_S = 60
"""So long a test waits for another thread before it fails."""


def noting(calls: list[Any], name: str, *, streams: bool) -> Any:
    def score(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        calls.append((name, [row["index"] for row in metadata], threading.current_thread().name))
        info = {"text": list(prompts)} | ({"odd": [len(prompts)] * len(prompts)} if len(prompts) % 2 else {})
        return images.reshape(len(images), -1).mean(1), info

    score.streams = streams  # type: ignore[attr-defined]
    return score


def mix_of(calls: list[Any]) -> RewardMix:
    names = {"whole": False, "one": True, "two": True}
    return RewardMix(
        {name: noting(calls, name, streams=streams) for name, streams in names.items()},
        {"whole": 1.0, "one": 2.0, "two": -0.5},
    )


def scored(mix: RewardMix, *, delivered: int, threaded: bool) -> Any:
    scoring = PartialScoring(mix, PROMPTS, METADATA, part=3)
    parts = [IMAGES[start : start + 3] for start in range(0, delivered, 3)]
    if threaded:
        thread = ScoringThread(scoring, lambda: None)
        for part in parts:
            thread.take(part)
        thread.wait()
    else:
        for part in parts:
            scoring.add(part, drawing=False)
    assert scoring.scored == sum(map(len, parts))
    return scoring.result(IMAGES)


@pytest.mark.parametrize(("delivered", "threaded"), [(0, False), (3, False), (3, True), (7, True)])
def test_calls_and_scores_do_not_depend_on_when_parts_come(delivered: int, threaded: bool) -> None:
    calls: list[Any] = []
    mix = mix_of(calls)
    assert mix.streaming == ("one", "two")
    result = scored(mix, delivered=delivered, threaded=threaded)
    parts = ([0, 1, 2], [3, 4, 5], [6])
    expected = [(name, part) for part in parts for name in ("one", "two")] + [("whole", list(range(7)))]
    assert [call[:2] for call in calls] == expected
    own = {who for name, indices, who in calls if name != "whole" and indices[0] < delivered}
    assert own == ({"reward scoring"} if threaded else {"MainThread"} if delivered else set())
    assert calls[-1][2] == "MainThread"
    at_once = mix(IMAGES, PROMPTS, METADATA)
    assert list(result.parts) == list(at_once.parts) == ["whole", "one", "two"]
    for name, scores in at_once.parts.items():
        np.testing.assert_array_equal(result.parts[name], scores)
    np.testing.assert_array_equal(result.total, at_once.total)
    assert result.texts == PROMPTS
    assert result.info["one"]["odd"] == [3, 3, 3, 3, 3, 3, 1]


def test_a_key_that_a_part_lacks_is_none_there() -> None:
    calls: list[Any] = []
    scoring = PartialScoring(mix_of(calls), PROMPTS[:5], METADATA[:5], part=3)
    assert scoring.result(IMAGES[:5]).info["one"]["odd"] == [3, 3, 3, None, None]


def test_a_part_of_the_score_that_not_every_call_reports_is_an_error() -> None:
    def sometimes(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        info = {"part/always": [0.5] * len(prompts)}
        return [0.5] * len(prompts), info if len(prompts) < 3 else info | {"part/x": [0.5] * len(prompts)}

    sometimes.streams = True  # type: ignore[attr-defined]
    mix = RewardMix({"f": sometimes}, {"f": 1.0})
    even = PartialScoring(mix, PROMPTS[:6], METADATA[:6], part=3).result(IMAGES[:6])
    assert even.inner_parts["f/x"].tolist() == [0.5] * 6
    says = r"reward function 'f' returned info\['part/x'\] for 6 of 7 images .*; .* report part/x for every image"
    with pytest.raises(RewardError, match=says):
        PartialScoring(mix, PROMPTS, METADATA, part=3).result(IMAGES)


def test_what_streams_says_so() -> None:
    class Asked:
        streams = True

        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any:
            assert name != "streams", "its code was run"
            raise AttributeError(name)

    class Silent(Asked):
        streams = False

    mix = RewardMix(
        {"a": Asked(), "b": Silent(), "jpeg": jpeg_compressibility, "c": noting([], "c", streams=1)},  # type: ignore[arg-type]
        dict.fromkeys(("a", "b", "jpeg", "c"), 1.0),
    )
    assert mix.streaming == ("a", "jpeg")
    assert OCRReward.streams is True


def streaming_file(folder: Path, body: str) -> RewardMix:
    path = write(folder, f"{function(body)}\nf.streams = True\n")
    custom = CustomRewardConfig(path=str(path), name="f")
    return build_reward(RewardConfig(custom_reward_function=custom, timeout_s=0.5))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('gone')", r"reward function 'f' raised KeyError: 'gone' at .*mine\.py:5, in f"),
        ("return [float('nan')] * len(prompts)", r"'f' returned 3 non-finite of 3 scores"),
        ("os._exit(0)", r"reward function 'f' raised SystemExit: os\._exit\(0\)"),
        ("while True: pass", r"did not return within reward\.timeout_s=0\.5 s; it was at .*mine\.py:5, in f"),
    ],
)
def test_a_failure_in_the_thread_comes_out_where_it_is_waited_for(tmp_path: Path, body: str, says: str) -> None:
    thread = ScoringThread(PartialScoring(streaming_file(tmp_path, body), PROMPTS, METADATA, 3), lambda: None)
    thread.take(IMAGES[:3])
    with pytest.raises(RewardError, match=says):
        thread.wait()
    with pytest.raises(RewardError, match=says):
        thread.take(IMAGES[3:6])


@pytest.mark.parametrize(
    ("change", "read", "what"),
    [
        ("torch.set_default_dtype(torch.float64)", torch.get_default_dtype, "torch's default dtype"),
        ("torch.set_grad_enabled(False)", torch.is_grad_enabled, "torch's gradient mode"),
        ("torch.set_default_device('meta')", torch.get_default_device, "torch's default device"),
        ("torch.set_autocast_enabled('cpu', True)", partial(torch.is_autocast_enabled, "cpu"), "torch's autocast"),
        ("torch.set_num_threads(3)", torch.get_num_threads, "torch's number of threads"),
        ("np.seterr(all='raise')", np.geterr, "numpy's error state"),
    ],
)
def test_what_a_function_of_one_s_own_changes_while_images_are_drawn_is_an_error(
    tmp_path: Path, change: str, read: Callable[[], Any], what: str
) -> None:
    """Also what belongs to the thread that scores, which the one that draws cannot see."""
    mix = streaming_file(tmp_path, f"{change}\nreturn [1.0] * len(prompts)")
    before = read()
    thread = ScoringThread(PartialScoring(mix, PROMPTS, METADATA, 3), partial(torch.set_num_threads, 2))
    thread.take(IMAGES[:3])
    with pytest.raises(RewardError, match=f"function 'f' with streams = True changed {what}.* while images were drawn"):
        thread.wait()
    assert read() == before


def test_nothing_more_is_scored_once_it_is_abandoned() -> None:
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slow(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        calls.append(len(images))
        begun.set()
        assert go_on.wait(WAIT_S)
        return [0.0] * len(images)

    slow.streams = True  # type: ignore[attr-defined]
    thread = ScoringThread(PartialScoring(RewardMix({"slow": slow}, {"slow": 1.0}), PROMPTS, METADATA, 3), lambda: None)
    thread.take(IMAGES[:3])
    thread.take(IMAGES[3:6])
    assert begun.wait(WAIT_S)
    thread.abandon()
    go_on.set()
    thread._thread.join(WAIT_S)
    assert calls == [3]
