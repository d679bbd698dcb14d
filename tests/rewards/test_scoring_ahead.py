"""Rewards of batches to come: asked of other processes while the actor learns, to the digit those of a serial run."""

import base64
import gc
import io
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reward_files import build, function, write
from stub_server import Reply, StubServer
from tests_support import untimed, wait_until

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.rewards import PartialScoring, RewardConfig, RewardError, RewardMix, build_reward, streaming
from flowgrpo_rc.rewards.judge.reward import JudgeReward
from flowgrpo_rc.rewards.turns import RewardTurns
from flowgrpo_rc.rollout import RolloutError, RolloutPool
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.scoring import BatchScoring, RolloutScoring

R = "actor_rollout_ref.rollout"
WAIT_S = 60
"""So long a test waits for another thread before it fails."""
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)


class Scorer:
    """Scores images as a server does, and notes what it was asked: their bytes and prompts."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[bytes], list[str]]] = []
        self.settings: tuple[str, ...] = ()
        """Overrides of a run that trains on it."""
        self.before: Callable[[], object] = lambda: None
        """Called before each answer."""

    def __call__(self, call: Any) -> Reply:
        content = call.json()
        files = [base64.b64decode(image) for image in content["images"]]
        self.asked.append((files, content["prompts"]))
        self.before()
        return Reply({"scores": [float(np.asarray(Image.open(io.BytesIO(file))).mean() / 255) for file in files]})


@pytest.fixture
def far():
    """A server's scorer."""
    scorer = Scorer()
    with StubServer(scorer) as server:
        scorer.settings = (
            f"reward.remote.far.url={server.url}",
            "reward.remote.far.streams=true",
            "reward.remote.far.tries=1",
            "reward.functions.far=0.5",
            "reward.functions.jpeg_compressibility=0.1",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
            f"{R}.micro_batch_size=5",
            "trainer.total_training_steps=4",
            "trainer.test_freq=2",
        )
        yield scorer


def trained_on(asked: list[tuple[list[bytes], list[str]]]) -> list[tuple[list[bytes], list[str]]]:
    """What was asked of training batches: 16 images as 5, 5, 5 and 1. Validation has 4."""
    return [one for one in asked if len(one[1]) != 4]


def trainer_of(config: Any, far: Scorer) -> FlowGRPOTrainer:
    """A trainer, after its checks before training, which ask the server too."""
    trainer = FlowGRPOTrainer(config)
    far.asked.clear()
    return trainer


@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_has_the_numbers_and_the_calls_of_a_serial_one(batches, small_config, far, pooled):
    runs = {}
    for name, settings in (
        ("late", [f"{R}.adapter_lag={batches}"]),
        ("ahead", [f"{R}.ahead={batches}"]),
        ("all at the end", [f"{R}.ahead={batches}", "reward.overlap=false"]),
    ):
        if name == "ahead":
            pooled()
        rows = untimed(trainer_of(small_config(*far.settings, *settings, folder=name), far).fit().rows())
        runs[name] = rows, trained_on(far.asked), sorted(far.asked)
    assert len(runs["late"][1]) == 4 * 4
    assert runs["ahead"] == runs["late"]
    assert runs["all at the end"] == runs["late"]


def test_they_are_scored_while_the_actor_learns(small_config, far, pooled):
    """Each update begins when all of the next batch has been scored."""
    pooled()
    settings = ("trainer.test_freq=-1", "trainer.val_before_train=false", "data.val_files=null")
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1", *settings), far)
    update = trainer.run.actor.update

    def updating(*args, **kwargs):
        wanted = 4 * min(trainer.step + 2, 4)
        wait_until(lambda: len(far.asked) >= wanted)
        found.append(len(far.asked) - wanted)
        return update(*args, **kwargs)

    found: list[int] = []
    trainer.run.actor.update = updating
    rows = trainer.fit().rows()
    assert found == [0] * 4
    assert all(row["timing_s/reward_work"] > 0 for row in rows)


def test_a_failure_ends_the_step_that_learns_from_the_batch(small_config, far, pooled):
    def fail():
        if len(trained_on(far.asked)) > 4:
            raise OSError("broken")  # breaks the connection

    far.before = fail
    pooled()
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1", "trainer.save_freq=1"), far)
    with pytest.raises(RewardError, match=r"reward.remote.far, images 0 to 4"):
        trainer.fit()
    assert [row["step"] for row in trainer.folder.rows()] == [0, 1]
    assert (trainer.folder.checkpoints / "latest").read_text() == "step_1"


def test_a_run_that_ends_waits_for_no_score_and_asks_for_none(small_config, far, pooled):
    go_on = threading.Event()

    def slow():
        if len(trained_on(far.asked)) > 4:
            assert go_on.wait(WAIT_S)

    far.before = slow
    pooled()
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1"), far)

    def failing(*_args, **_kwargs):
        wait_until(lambda: len(trained_on(far.asked)) == 5)
        raise RuntimeError("the update failed")

    trainer.run.actor.update = failing
    with pytest.raises(RuntimeError, match="the update failed"):
        trainer.fit()
    assert scoring_threads(), "the run has waited for the score"
    go_on.set()
    wait_until(lambda: not scoring_threads())
    assert len(trained_on(far.asked)) == 5


def test_a_batch_that_cannot_be_asked_for_leaves_no_thread(small_config, far, pooled, monkeypatch):
    def gone(*_args):
        raise RolloutError("no rollout engine is left")

    pooled()
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1"), far)
    monkeypatch.setattr(RolloutPool, "submit", gone)
    with pytest.raises(RolloutError):
        trainer.rollouts.next(0)
    trainer.run.engine.close()
    trainer.folder.close()
    wait_until(lambda: not scoring_threads())


def scoring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reward scoring"]


# ---------------------------------------------------------------------- its parts


def elsewhere(calls: list[Any], before: Callable[[str], object] = lambda _: None) -> RewardMix:
    """``far`` may be asked ahead; ``near``, of one's own, may not, whatever it says of itself."""

    def make(name: str) -> Any:
        def score(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
            calls.append((name, prompts[0], len(prompts), threading.current_thread() is threading.main_thread()))
            before(name)
            return images.reshape(len(images), -1).mean(1)

        score.streams = True  # type: ignore[attr-defined]
        score.computes_elsewhere = True  # type: ignore[attr-defined]
        return score

    functions = {name: make(name) for name in ("near", "far")}
    return RewardMix(functions, {"near": 1.0, "far": 2.0}, builtin=["far"])


def deliver(scoring: RolloutScoring, images: np.ndarray = IMAGES, part: int = 3) -> None:
    assert scoring.take_ahead is not None
    for rows in torch.arange(len(images)).split(part):
        scoring.take_ahead(rows, torch.from_numpy(images[rows.numpy()]))


def records(batch: object) -> list[PromptRecord]:
    return [PromptRecord(prompt=f"{batch} {i}") for i in range(len(IMAGES))]


def of(name: str, calls: list[Any]) -> list[Any]:
    return [call[1:] for call in calls if call[0] == name]


def test_batches_are_scored_in_turn_whichever_comes_first():
    """And before the trainer comes to the first of them."""
    calls: list[Any] = []
    mix = elsewhere(calls)
    batches = BatchScoring(mix, 3, overlaps=False, ahead=True)
    assert batches.ahead == () == BatchScoring(mix, 3, overlaps=True).ahead
    batches = BatchScoring(mix, 3, overlaps=True, ahead=True)
    assert batches.ahead == ("far",)
    scorings = [batches(records(batch)) for batch in range(3)]
    for scoring in scorings[::-1]:
        deliver(scoring)
    parts = [(batch, first, size) for batch in range(3) for first, size in [(0, 3), (3, 3), (6, 1)]]
    wait_until(lambda: len(calls) == 9)
    assert of("far", calls) == [(f"{batch} {first}", size, False) for batch, first, size in parts]
    results = []
    for scoring in scorings:
        with scoring:
            results.append(scoring.result(IMAGES))
    assert len(of("far", calls)) == 9
    assert of("near", calls) == [(f"{batch} {first}", size, True) for batch, first, size in parts]
    alone = mix(IMAGES, [record.prompt for record in records(0)])
    for result in results:
        assert list(result.parts) == ["near", "far"]
        np.testing.assert_array_equal(result.total, alone.total)


def test_a_result_waits_for_what_is_still_scored():
    def slow(_: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)

    calls: list[Any] = []
    scoring = BatchScoring(elsewhere(calls, slow), 3, overlaps=True, ahead=True)(records(0))
    with scoring:
        deliver(scoring)
        result = scoring.result(IMAGES)
    assert of("far", calls) == [("0 0", 3, False), ("0 3", 3, False), ("0 6", 1, False)]
    np.testing.assert_array_equal(result.parts["far"], IMAGES.reshape(len(IMAGES), -1).mean(1).astype(np.float32))


def test_batches_after_one_that_failed_are_not_scored():
    def fail(_: str) -> None:
        raise OSError("broken")

    calls: list[Any] = []
    batches = BatchScoring(elsewhere(calls, fail), 3, overlaps=True, ahead=True)
    scorings = [batches(records(batch)) for batch in range(3)]
    for scoring in scorings:
        deliver(scoring)
    wait_until(lambda: not scoring_threads())
    assert calls == [("far", "0 0", 3, False)]
    for scoring in scorings:
        with scoring, pytest.raises(RewardError, match="OSError: broken"):
            scoring.result(IMAGES)


def test_what_a_batch_was_scored_with_is_kept_no_longer_than_it():
    batches = BatchScoring(elsewhere([]), 3, overlaps=True, ahead=True)
    kept = []
    for batch in range(3):
        scoring = batches(records(batch))
        kept.append(weakref.ref(scoring._early))
        deliver(scoring)
        with scoring:
            scoring.result(IMAGES)
        del scoring
    gc.collect()
    assert [found() is not None for found in kept] == [False, False, True], "the next one waits for the last"


def test_a_validation_goes_before_images_of_batches_to_come(monkeypatch):
    """It is scored as soon as the call that goes on has ended; that it had to wait is no time in reward functions."""
    go_on = threading.Event()
    clock = [0.0]
    monkeypatch.setattr(streaming, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    calls: list[Any] = []

    def hold(name: str) -> None:
        if name == "far" and len(of("far", calls)) == 1:
            assert go_on.wait(WAIT_S)

    mix = elsewhere(calls, hold)
    training = BatchScoring(mix, 3, overlaps=True, ahead=True)(records("train"))
    deliver(training)
    wait_until(lambda: calls)
    prompts = [record.prompt for record in records("val")]
    scoring = PartialScoring(mix, prompts, [{}] * len(prompts), 4)
    validation = threading.Thread(target=scoring.result, args=(IMAGES,))
    validation.start()
    wait_until(lambda: mix.turns["far"]._wanted)
    assert of("far", calls) == [("train 0", 3, False)], "two calls at once"
    clock[0] += 100.0
    go_on.set()
    validation.join(WAIT_S)
    wait_until(lambda: len(of("far", calls)) == 5)
    assert of("far", calls)[1] == ("val 0", 4, False)
    assert (scoring.seconds, training.seconds) == (0.0, 100.0)


def test_who_computes_elsewhere(tmp_path):
    """Servers that score each image for itself, and worker processes."""
    path = write(tmp_path, f"{function('return [1.0] * len(prompts)')}\nf.streams = f.computes_elsewhere = True\n")
    assert not build(path).turns
    remote = {"each": {"url": "http://127.0.0.1:9", "streams": True}, "whole": {"url": "http://127.0.0.1:9"}}
    config = RewardConfig(functions={"each": 1.0, "whole": 1.0, "jpeg_compressibility": 1.0}, remote=remote)
    mix = build_reward(config)
    assert mix.streaming == ("each", "jpeg_compressibility")
    assert list(mix.turns) == ["each"]
    assert JudgeReward.streams
    assert JudgeReward.computes_elsewhere
    mix = build_reward(RewardConfig(num_workers=1))
    try:
        assert list(mix.turns) == ["ocr"]
    finally:
        mix.close()


def test_what_is_wanted_now_goes_before_what_is_wanted_later():
    turns = RewardTurns()
    order: list[str] = []
    go_on = threading.Event()

    def call(kind: str, name: str) -> None:
        with getattr(turns, kind)():
            order.append(name)
            assert go_on.wait(WAIT_S)

    first = threading.Thread(target=call, args=("later", "goes on"))
    first.start()
    wait_until(lambda: order)
    threads = [threading.Thread(target=call, args=("later", f"later {i}")) for i in range(2)]
    threads += [threading.Thread(target=call, args=("now", f"now {i}")) for i in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: turns._wanted == 2)
    assert order == ["goes on"], "two calls at once"
    go_on.set()
    for thread in (first, *threads):
        thread.join(WAIT_S)
    assert sorted(order[1:3]) == ["now 0", "now 1"]
    assert sorted(order[3:]) == ["later 0", "later 1"]


def test_a_turn_ends_with_an_error_and_with_an_interrupt_of_the_wait(monkeypatch):
    turns = RewardTurns()
    for kind in ("now", "later"):
        with pytest.raises(RewardError), getattr(turns, kind)():
            raise RewardError("broken")

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.now().__enter__()
    with turns.later():  # waits for ever where the interrupted one counts as waiting
        pass
