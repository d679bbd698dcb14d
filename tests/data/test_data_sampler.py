"""The sampler: coverage, order from the seed alone, exact resume."""

import json
from typing import Any

import numpy as np
import pytest

from flowgrpo_rc.data import PromptSampler


def take(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [next(sampler).tolist() for _ in range(count)]


def test_unshuffled_order_drops_the_rest() -> None:
    sampler = PromptSampler(7, 3, shuffle=False)
    assert sampler.batches_per_epoch == 2
    assert take(sampler, 4) == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_orders_are_those_of_pcg64_of_seed_and_epoch() -> None:
    sampler = PromptSampler(6, 3, seed=11)
    for epoch in range(3):
        expected = np.random.Generator(np.random.PCG64([11, epoch])).permutation(6)
        assert np.concatenate(take(sampler, 2)).tolist() == expected.tolist()


@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 11])
def test_resume_is_exact(done: int) -> None:
    """Batches per epoch: 3, so 3 sits on an epoch boundary."""
    whole = take(PromptSampler(10, 3, seed=5), 20)
    sampler = PromptSampler(10, 3, seed=5)
    take(sampler, done)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(10, 3, seed=5)
    resumed.load_state_dict(state)
    assert resumed.epoch == done // 3
    assert take(resumed, 20 - done) == whole[done:]


def test_batch_larger_than_the_data_set_names_both() -> None:
    with pytest.raises(ValueError, match=r"data\.train_batch_size: got 9, but the data set holds 4 prompts"):
        PromptSampler(4, 9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_prompts": 11}, r"num_prompts=11, this run has 10; resume with the same data.train_files and"),
        ({"batch_size": 2}, r"batch_size=2, this run has 3; resume with the same data.train_batch_size or"),
        ({"seed": 6}, r"seed=6, this run has 5; resume with the same data.seed or"),
        ({"shuffle": False}, r"shuffle=False, this run has True; resume with the same data.shuffle or"),
    ],
)
def test_state_of_another_run_is_refused(other: dict[str, Any], message: str) -> None:
    sampler = PromptSampler(10, 3, seed=5)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(sampler.state_dict() | other)
