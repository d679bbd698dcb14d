"""Rewards that are scored while the next images are drawn: at the same time, and to the digit as in a serial run."""

import json
import threading

import pytest
from tests_support import untimed, wait_until

from flowgrpo_rc.rewards import RewardError
from flowgrpo_rc.rollout import diffusers_engine
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.run
WAIT_S = 60
"""So long a scorer waits for the engine before the test fails."""
WORK = "timing_s/reward_work"
PARTS = "actor_rollout_ref.rollout.micro_batch_size=5"
"""16 images are drawn as 5, 5, 5 and 1."""

SCORERS = """
import hashlib, json, pathlib, threading

CALLS = pathlib.Path(__file__).with_name("calls.jsonl")


def _note(who, images, prompts):
    digest = hashlib.sha256(images.tobytes()).hexdigest()
    with CALLS.open("a") as file:
        file.write(json.dumps([who, len(images), digest, prompts, threading.current_thread().name]) + "\\n")


def part(images, prompts, metadata):
    _note("part", images, prompts)
    return images.reshape(len(images), -1).mean(1) / 255, {"text": [f"{i.mean():.3f}" for i in images]}


part.streams = True


def whole(images, prompts, metadata):
    _note("whole", images, prompts)
    return images[..., 0].reshape(len(images), -1).std(1)
"""


@pytest.fixture
def scorers(tmp_path):
    path = tmp_path / "scorers.py"
    path.write_text(SCORERS)
    own = "reward.reward_functions"
    return (
        "reward.custom_reward_function.path=null",
        "reward.functions.jpeg_compressibility=0.5",
        f"{own}.whole={{path: {path}, name: whole, weight: 0.1}}",
        f"{own}.part={{path: {path}, name: part}}",
        PARTS,
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",  # the same for a run that ends early
    )


def test_overlapped_runs_are_serial_ones_to_the_digit(small_config, scorers, tmp_path):
    """Metrics, calls, their images and their order; from a checkpoint too."""
    found = {}
    for name, settings in (
        ("serial", ["reward.overlap=false"]),
        ("overlapped", []),
        ("resumed", ["trainer.total_training_steps=1"]),
        ("resumed", ["trainer.resume_mode=auto"]),
    ):
        config = small_config(*scorers, "trainer.resume_mode=disable", "trainer.save_freq=1", *settings, folder=name)
        folder = FlowGRPOTrainer(config).fit()
        calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
        (tmp_path / "calls.jsonl").unlink()
        found[name] = (untimed(folder.rows()), calls)
        for row in folder.rows():
            # The wait is a stage of the step; the work goes on in another thread and is none.
            stages = {k: v for k, v in row.items() if k.startswith("timing_s/") and k not in ("timing_s/step", WORK)}
            if "reward/mean" in row:
                assert row["timing_s/step"] == pytest.approx(sum(stages.values()))
                assert row[WORK] > 0
    (serial, serial_calls), (overlapped, calls) = found["serial"], found["overlapped"]
    assert serial == overlapped
    assert {row["step"]: row for row in found["resumed"][0]}[2] == overlapped[-1]
    assert [call[:4] for call in calls] == [call[:4] for call in serial_calls]
    # The trial before the run.
    trial, calls = calls[:2], calls[2:]
    assert [call[:2] for call in trial] == [["whole", 2], ["part", 2]]
    sizes = [(who, size) for who, size, *_ in calls]
    step = [("part", 5), ("part", 5), ("part", 5), ("part", 1), ("whole", 16)]
    validation = [("part", 4), ("whole", 4)]
    assert sizes == [*validation, *step, *step, *validation]
    threads = {(who, thread) for who, size, _, _, thread in calls if size != 4}
    assert threads == {("part", "reward scoring"), ("whole", "MainThread")}
    assert {thread for *_, thread in serial_calls} == {"MainThread"}


def test_a_part_is_scored_while_the_next_is_drawn(small_config, scorers, monkeypatch):
    """The scorer of the first micro-batch returns only when the second one has begun."""
    trainer = FlowGRPOTrainer(small_config(*scorers))
    second_has_begun, waited = threading.Event(), []
    score, sample = trainer.run.reward.score, diffusers_engine.RequestSampler.sample

    def scored(name, *args, **kwargs):
        if name == "part":
            waited.append(second_has_begun.wait(WAIT_S))
        return score(name, *args, **kwargs)

    def sampled(self, rows):
        if rows[0] > 0:
            second_has_begun.set()
        return sample(self, rows)

    trainer.run.reward.score = scored
    monkeypatch.setattr(diffusers_engine.RequestSampler, "sample", sampled)
    trainer.train_step()
    trainer.folder.close()
    assert waited == [True] * 4


def test_a_reward_that_fails_meanwhile_ends_the_step(small_config, scorers):
    trainer = FlowGRPOTrainer(small_config(*scorers))
    score = trainer.run.reward.score

    def failing(name, images, *args, **kwargs):
        return score(name, images, *args, **kwargs) if name != "part" else (_ for _ in ()).throw(RewardError("broken"))

    trainer.run.reward.score = failing
    with pytest.raises(RewardError, match="broken"):
        trainer.train_step()
    assert trainer.step == 0
    trainer.folder.close()
    wait_until(lambda: not any(thread.name == "reward scoring" for thread in threading.enumerate()))
