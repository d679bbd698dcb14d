"""Signatures of reward functions: ours, flow_grpo's, verl-omni's, and everything that is none of them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_files import IMAGES, METADATA, PROMPTS, build, write

from flowgrpo_rc.rewards import RewardError, RewardMix

LENGTHS = "return [len(p) for p in prompts]"
FORMS = r"fn\(images, prompts, metadata\) for a batch, or fn\(data_source, solution_image, ground_truth, extra_info\)"


@pytest.mark.parametrize(
    "source",
    [
        f"def f(images, prompts, metadata): {LENGTHS}",
        f"def f(*, metadata, prompts, images): {LENGTHS}",
        f"def f(prompts, images, metadata): {LENGTHS}",
        f"def f(images, prompts, **others): {LENGTHS}",
        "def f(imgs, texts, meta, /): return [len(p) for p in texts]",
        "def f(*batch): return [len(p) for p in batch[1]]",
        f"async def f(images, prompts, metadata):\n    await asyncio.sleep(0)\n    {LENGTHS}",
        f"from functools import partial\ndef g(scale, images, prompts, metadata): {LENGTHS}\nf = partial(g, 2.0)",
        "from functools import wraps\ndef logged(g):\n    @wraps(g)\n    def inner(*a, **k): return g(*a, **k)\n"
        f"    return inner\n@logged\ndef f(images, prompts, metadata): {LENGTHS}",
        f"class A:\n    def __call__(self, images, prompts, metadata): {LENGTHS}\nf = A()",
        f"class f:\n    def __call__(self, images, prompts, metadata): {LENGTHS}",
        f"def f(images, prompts, metadatas, only_strict):\n    assert only_strict is True\n    {LENGTHS}",
        # verl-omni's, for one image
        "def f(data_source, solution_image, ground_truth, extra_info=None, **kwargs): return len(ground_truth)",
        "def f(data_source, solution_image, ground_truth, extra_info): return {'score': len(ground_truth)}",
        "def f(solution_image, ground_truth): return torch.tensor(float(len(ground_truth)))",
        "async def f(data_source, solution_image, ground_truth, extra_info):\n    return len(ground_truth)",
    ],
)
def test_accepted(tmp_path: Path, source: str) -> None:
    mix = build(write(tmp_path, source))
    for _ in range(2):
        np.testing.assert_array_equal(mix(IMAGES, PROMPTS, METADATA).total, [1, 2, 3])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def f(images, prompts): return 1", rf"'f'\(images, prompts\) cannot be called as a reward; write {FORMS}"),
        ("def f(**kwargs): return 1", r"'f'\(\*\*kwargs\) cannot be called"),
        ("def f(metadata, images, prompts, /): return 1", r"cannot be called"),
        ("def f(images, prompts, metadata, scale): return 1", r"needs scale too; .*reward_kwargs\.scale=\.\.\."),
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None): return 1",
            rf"takes data_source, solution_str, .* but no solution_image, .* write {FORMS}",
        ),
        (
            "def f(data_source, solution_image, ground_truth, extra_info, reward_router_address): return 1",
            r"needs reward_router_address, which nothing here supplies; .*reward_kwargs\.reward_router_address=",
        ),
        ("f = min", rf"'f' has no signature that Python can read .*{FORMS}"),
        ("class f: pass", "has no signature that Python can read"),
        (
            "class f:\n    def __init__(self, scale): ...\n    def __call__(self, images, prompts, metadata): ...",
            r"name: 'f' raised TypeError: .*missing 1 required positional argument: 'scale'",
        ),
    ],
)
def test_refused_before_anything_is_loaded(tmp_path: Path, source: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(write(tmp_path, source))


def test_a_class_is_made_once(tmp_path: Path) -> None:
    source = (
        "class f:\n    made = 0\n    def __init__(self): f.made += 1\n"
        "    def __call__(self, images, prompts, metadata): return [f.made] * len(prompts)"
    )
    path = write(tmp_path, source)
    assert build(path)(IMAGES, PROMPTS).total.tolist() == [1, 1, 1]
    assert build(path)(IMAGES, PROMPTS).total.tolist() == [1, 1, 1]


# ---------------------------------------------------------------------- further arguments


def test_reward_kwargs_are_passed_on(tmp_path: Path) -> None:
    batch = write(tmp_path, "def f(images, prompts, metadata, scale, shift=0): return [scale + shift] * len(prompts)")
    assert build(batch, reward_kwargs={"scale": 2, "shift": 0.5})(IMAGES, PROMPTS).total.tolist() == [2.5] * 3
    single = write(tmp_path, "def f(solution_image, server_url, **others): return len(server_url)", "one.py")
    assert build(single, reward_kwargs={"server_url": "abcd"})(IMAGES, PROMPTS, METADATA).total.tolist() == [4] * 3


@pytest.mark.parametrize(
    ("source", "kwargs", "told"),
    [
        ("def f(images, prompts, metadata): ...", {"scale": 2}, r"reward_kwargs\.scale: .*no parameter of this name"),
        ("def f(images, prompts, metadata): ...", {"images": 2}, r"reward_kwargs\.images: .*given by the trainer"),
        (
            "def f(solution_image, **k): ...",
            {"ground_truth": 2},
            r"reward_kwargs\.ground_truth: .*given by the trainer",
        ),
        ("def f(images, prompts, metadata): ...", 5, r"reward_kwargs: got 5; give a mapping"),
    ],
)
def test_reward_kwargs_that_do_not_fit(tmp_path: Path, source: str, kwargs: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(write(tmp_path, source), reward_kwargs=kwargs)


# ---------------------------------------------------------------------- what verl-omni's form is given


def test_what_a_function_for_one_image_is_given(tmp_path: Path) -> None:
    source = """
    def f(data_source, solution_image, ground_truth, extra_info):
        assert data_source == "test/ocr"
        assert solution_image.dtype == torch.uint8
        assert solution_image.shape == (3, 8, 8)
        index = extra_info["index"]
        assert extra_info == {"index": index, "num_turns": None, "rollout_reward_scores": {}}
        assert ground_truth == ["A", "BB", "CCC"][index]
        # channel, row and column stay apart: 1 * red of pixel (0, 1) + 10 * green of (1, 0)
        return {"score": float(solution_image[0, 0, 1]) + 10 * float(solution_image[1, 1, 0]), "index": index}
    """
    result = build(write(tmp_path, source))(IMAGES, PROMPTS, METADATA)
    expected = [float(image[0, 1, 0]) + 10 * float(image[1, 0, 1]) for image in IMAGES]
    np.testing.assert_array_equal(result.total, expected)
    assert result.info["f"] == {"index": [0, 1, 2]}


def test_coroutines_of_a_batch_run_side_by_side(tmp_path: Path) -> None:
    """One after the other they would never end, since each waits for all; a queue and its worker outlive a call."""
    source = """
    queue, workers, inside = asyncio.Queue(), [], 0
    async def work():
        while True:
            future, value = await queue.get()
            future.set_result(2 * value)
    async def f(solution_image, ground_truth):
        global inside
        if not workers:
            workers.append(asyncio.create_task(work()))
        inside += 1
        while inside % 3:
            await asyncio.sleep(0)
        future = asyncio.get_running_loop().create_future()
        await queue.put((future, len(ground_truth)))
        return await future
    """
    mix = build(write(tmp_path, source), timeout_s=20)
    for _ in range(2):
        assert mix(IMAGES, PROMPTS, METADATA).total.tolist() == [2, 4, 6]


def test_the_first_coroutine_that_fails_ends_the_others(tmp_path: Path) -> None:
    source = """
    async def f(solution_image, ground_truth):
        if ground_truth == "BB":
            raise ValueError("no answer")
        await asyncio.sleep(60)
    """
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"'f' raised ValueError: no answer at .*mine\.py:7, in f"):
        build(write(tmp_path, source))(IMAGES, PROMPTS, METADATA)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("asynchronous", [True, False])
def test_inside_a_running_loop(tmp_path: Path, asynchronous: bool) -> None:
    """As in a notebook; and a coroutine may itself call asynchronous rewards."""
    inner = build(write(tmp_path, "async def f(solution_image, ground_truth): return len(ground_truth)"))

    async def outer(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> np.ndarray:
        return inner(images, prompts, metadata).total

    if asynchronous:
        assert asyncio.run(outer(IMAGES, PROMPTS, METADATA)).tolist() == [1, 2, 3]
    else:
        mix = RewardMix({"outer": outer}, {"outer": 1.0}, timeout_s=30)
        assert mix(IMAGES, PROMPTS, METADATA).total.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("{'acc': 1.0}", r"returned for sample 0 a dict without the key 'score' \(it has 'acc'\)"),
        ("{'score': float('nan')}", "3 non-finite of 3 scores"),
    ],
)
def test_unfit_answers_for_one_image(tmp_path: Path, returned: str, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        build(write(tmp_path, f"def f(solution_image): return {returned}"))(IMAGES, PROMPTS, METADATA)


# ---------------------------------------------------------------------- columns of the prompt file

TAKES_ALL = "def f(data_source, solution_image, ground_truth, extra_info): return 1.0"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, r"p\.jsonl:2 has no data_source, which the reward function 'f'\(data_source, .*\.parquet or"),
        ({"data_source": "x"}, r"p\.jsonl:2 has no reward_model\.ground_truth"),
    ],
)
def test_a_missing_column_is_seen_before_training(tmp_path: Path, row: Any, told: str) -> None:
    mix = build(write(tmp_path, TAKES_ALL))
    good = METADATA[0]
    with pytest.raises(ValueError, match=told):
        mix.check_prompts(["a", "b"], sources=["p.jsonl:1", "p.jsonl:2"], metadata=[good, row])
    with pytest.raises(RewardError, match=r"sample 1, prompt 'bb', has"):
        mix(IMAGES, PROMPTS, [good, row, good])


@pytest.mark.parametrize(
    ("source", "row"),
    [
        (TAKES_ALL, {"data_source": "x", "ground_truth": "y"}),
        (TAKES_ALL, {"data_source": "x", "reward_model": {"ground_truth": 0}, "extra_info": None}),
        ("def f(solution_image, ground_truth=None, data_source='d', extra_info=None): return 1.0", {}),
        ("def f(solution_image, **others): return 1.0", {}),
    ],
)
def test_columns_that_will_do(tmp_path: Path, source: str, row: Any) -> None:
    mix = build(write(tmp_path, source))
    mix.check_prompts(["a"], sources=["p.jsonl:1"], metadata=[row])
    assert mix(IMAGES[:1], ["a"], [row]).total.tolist() == [1]
