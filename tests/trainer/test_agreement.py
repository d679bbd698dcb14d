"""Processes with other settings, prompts or reward files than the others are refused at the start."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowgrpo_rc.data import load_prompts
from flowgrpo_rc.trainer.agreement import require_agreement, settings_of


def errors_of(*everyones):
    """The message that each process raises, or ``None``; a thread is a process, and a barrier the gather."""
    barrier = threading.Barrier(len(everyones), timeout=60)
    given = [[] for _ in everyones]

    def process(rank):
        def gather(own):
            given[rank] = own
            barrier.wait()
            everything = [value for one in given for value in one]
            barrier.wait()
            return everything

        try:
            require_agreement(everyones[rank], gather)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(everyones)) as pool:
        return list(pool.map(process, range(len(everyones))))


@pytest.fixture
def settings(small_config, tmp_path):
    """``make(*overrides, text, code)``: the settings of one process, with prompts and a reward of this content."""
    prompts, reward = tmp_path / "train.txt", tmp_path / "reward.py"

    def make(*overrides, text="one\ntwo\n", code="def compute_score(images, prompts, metadata): ..."):
        prompts.write_text(text)
        reward.write_text(code)
        config = small_config(f"reward.custom_reward_function.path={reward}", *overrides)
        return settings_of(config, load_prompts(prompts), [])

    return make


def test_equal_settings_pass(settings):
    assert errors_of(settings(), settings(), settings()) == [None] * 3


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"overrides": ("actor_rollout_ref.actor.optim.lr=0.5",)},
            r"actor.optim.lr is 0.\d+ on rank\(s\) 0, 2 and 0.5 on rank\(s\) 1",
        ),
        ({"overrides": ("trainer.seed=7",)}, r"trainer.seed is \d+ on rank\(s\) 0, 2 and 7 on rank\(s\) 1"),
        ({"text": "one\nthree\n"}, r"content of data.train_files is '\w+' on rank\(s\) 0, 2 and '\w+' on rank\(s\) 1"),
        ({"code": "def compute_score(*_): ..."}, r"content of rewards.compute_score is '\w+' on rank\(s\) 0, 2 and"),
    ],
)
def test_a_process_that_differs_is_named_on_all(settings, other, says):
    other = dict(other)
    errors = errors_of(settings(), settings(*other.pop("overrides", ()), **other), settings())
    assert len(set(errors)) == 1
    assert errors[0] is not None
    assert re.search(says, errors[0])
    assert "Start every process with the same settings and files" in errors[0]
    assert ";" not in errors[0], "nothing else differs"
