"""Rewards of a batch in parts, in the background and ahead: the same calls and scores whoever makes them, and when."""

import base64
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reward_files import build, function, write
from stub_server import Reply, StubServer
from tests_support import untimed, wait_until

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.rewards import PartialScoring, RewardConfig, RewardError, RewardMix, build_reward
from flowgrpo_rc.rewards.judge.reward import JudgeReward
from flowgrpo_rc.rewards.scoring import NOW, THREAD_NAME, CallQueue
from flowgrpo_rc.rollout import RolloutSyncError
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.scoring import RolloutScoring

R = "actor_rollout_ref.rollout"
WAIT_S = 60
"""Seconds that a test waits for another thread before it fails."""
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)
PROMPTS = [f"prompt {i}" for i in range(7)]
METADATA: list[dict[str, Any]] = [{"index": i} for i in range(7)]


def noting(calls: list[Any], name: str, streams: object = True) -> Callable[..., Any]:
    """Scores by index and mean, with captions and a key that only full parts of three report; notes its calls."""

    def score(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        calls.append((name, [row["index"] for row in metadata], threading.current_thread().name))
        info = {"text": list(prompts)} | ({"full": [3] * 3} if len(prompts) == 3 else {})
        return images.reshape(len(images), -1).mean(1) + [row["index"] for row in metadata], info

    score.streams = streams  # type: ignore[attr-defined]
    return score


def mix_of(calls: list[Any]) -> RewardMix:
    streaming = {"whole": False, "one": True, "two": True}
    functions = {name: noting(calls, name, streams) for name, streams in streaming.items()}
    return RewardMix(functions, {"whole": 1.0, "one": 0.5, "two": -2.0})


@pytest.mark.parametrize("delivered", [0, 3, 7])
def test_calls_and_scores_do_not_depend_on_when_parts_come(delivered: int) -> None:
    calls: list[Any] = []
    mix = mix_of(calls)
    scoring = PartialScoring(mix, PROMPTS, METADATA, part=3)
    for start in range(0, delivered, 3):
        scoring.score_ahead(IMAGES[start : start + 3])
    result = scoring.result(IMAGES)
    parts = ([0, 1, 2], [3, 4, 5], [6])
    in_parts = [(name, part) for part in parts for name in ("one", "two")]
    # The background goes on beside the calls of this thread; each has its order.
    early = [call for call in calls if call[2] == THREAD_NAME]
    late = [call[:2] for call in calls if call[2] == "MainThread"]
    done = 2 * -(-delivered // 3)
    assert [call[:2] for call in early] == in_parts[:done]
    assert late == [*in_parts[done:], ("whole", list(range(7)))]
    at_once = mix(IMAGES, PROMPTS, METADATA)
    assert list(result.parts) == list(at_once.parts) == ["whole", "one", "two"]
    for name, scores in at_once.parts.items():
        np.testing.assert_array_equal(result.parts[name], scores)
    np.testing.assert_array_equal(result.total, at_once.total)
    assert result.texts == PROMPTS
    assert result.info["one"]["full"] == [3, 3, 3, 3, 3, 3, None]


def test_a_part_of_the_score_that_not_every_call_reports_is_an_error() -> None:
    def sometimes(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        info = {"part/always": [0.5] * len(prompts)}
        return [0.5] * len(prompts), info if len(prompts) < 3 else info | {"part/x": [0.5] * len(prompts)}

    sometimes.streams = True  # type: ignore[attr-defined]
    mix = RewardMix({"f": sometimes}, {"f": 1.0})
    even = PartialScoring(mix, PROMPTS[:6], METADATA[:6], part=3).result(IMAGES[:6])
    assert even.inner_parts["f/x"].tolist() == [0.5] * 6
    message = r"reward function 'f' returned info\['part/x'\] for 6 of 7 images .*; .* report part/x for every image"
    with pytest.raises(RewardError, match=message):
        PartialScoring(mix, PROMPTS, METADATA, part=3).result(IMAGES)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('gone')", r"reward function 'f' raised KeyError: 'gone' at .*mine\.py:5, in f"),
        ("return [float('nan')] * len(prompts)", r"'f' returned 3 non-finite of 3 scores"),
    ],
)
def test_a_failure_in_the_background_is_raised_by_the_result(tmp_path: Any, body: str, message: str) -> None:
    mix = build(write(tmp_path, f"{function(body)}\nf.streams = True\n"))
    scoring = PartialScoring(mix, PROMPTS, METADATA, 3)
    scoring.score_ahead(IMAGES[:3])
    wait_until(lambda: not scoring_threads())
    with pytest.raises(RewardError, match=message):
        scoring.raise_failure()
    with pytest.raises(RewardError, match=message):
        scoring.result(IMAGES[:3])


def test_a_failing_function_ends_the_calls_of_the_others() -> None:
    """In a validation nobody else would: a server would go on scoring what nobody reads."""
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def far(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        calls.append(len(images))
        begun.set()
        assert go_on.wait(WAIT_S)
        return [0.0] * len(images)

    def near(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        assert begun.wait(WAIT_S)
        raise KeyError("gone")

    far.streams = far.computes_elsewhere = near.streams = True  # type: ignore[attr-defined]
    mix = RewardMix({"far": far, "near": near}, {"far": 1.0, "near": 1.0}, builtin=["far"])
    scoring = PartialScoring(mix, PROMPTS, METADATA, 3)
    scoring.score_ahead(IMAGES[:3], ["far"])
    scoring.score_ahead(IMAGES[3:], ["far"])
    with pytest.raises(RewardError, match="'near' raised KeyError"):
        scoring.result(IMAGES)
    go_on.set()
    wait_until(lambda: not scoring_threads())
    assert calls == [3]


def scoring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_the_thread_computes_where_the_one_that_draws_does(monkeypatch):
    """Torch gives each thread a current GPU of its own, at first the machine's first."""
    devices = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(devices, "current", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(devices, "current", device))
    torch.cuda.set_device(3)
    torch.set_num_threads(3)
    found = CallQueue().submit(NOW, lambda: (torch.cuda.current_device(), torch.get_num_threads())).result(WAIT_S)
    assert found == (3, 3)


# ---------------------------------------------------------------------- batches of a rollout


def elsewhere(calls: list[Any], before: Callable[[str, str], object] = lambda *_: None) -> RewardMix:
    """``far`` computes elsewhere; ``near``, a user's own, only claims to."""

    def make(name: str) -> Any:
        def score(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
            calls.append((name, prompts[0], len(prompts)))
            before(name, prompts[0])
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


def test_batches_are_scored_before_the_trainer_comes_to_them():
    calls: list[Any] = []
    mix = elsewhere(calls)
    assert RolloutScoring(mix, records(0), 3, overlaps=False, ahead=True).take_ahead is None
    assert RolloutScoring(mix, records(0), 3, overlaps=True).take_ahead is None
    scorings = [RolloutScoring(mix, records(batch), 3, overlaps=True, ahead=True) for batch in range(3)]
    for scoring in scorings:
        deliver(scoring)
    parts = [(f"{batch} {first}", size) for batch in range(3) for first, size in [(0, 3), (3, 3), (6, 1)]]
    wait_until(lambda: len(calls) == 9)
    assert of("far", calls) == parts
    alone = mix(IMAGES, [record.prompt for record in records(0)])
    for scoring in scorings:
        with scoring:
            result = scoring.result(IMAGES)
        assert list(result.parts) == ["near", "far"]
        np.testing.assert_array_equal(result.total, alone.total)
    assert of("near", calls)[1:] == parts, "after the one call for the expectation"


def test_a_validation_goes_before_images_of_batches_to_come():
    """It is scored as soon as the call in progress has ended."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(name: str, prompt: str) -> None:
        if name == "far" and prompt == "train 0":
            begun.set()
            assert go_on.wait(WAIT_S)

    calls: list[Any] = []
    mix = elsewhere(calls, hold)
    training = RolloutScoring(mix, records("train"), 3, overlaps=True, ahead=True)
    deliver(training)
    assert begun.wait(WAIT_S)
    scoring = PartialScoring(mix, [record.prompt for record in records("val")], [{}] * len(IMAGES), 4)
    validation = threading.Thread(target=scoring.result, args=(IMAGES,))
    validation.start()
    wait_until(lambda: len(mix.queues["far"]._waiting) == 4)
    assert of("far", calls) == [("train 0", 3)], "two calls at once"
    go_on.set()
    validation.join(WAIT_S)
    wait_until(lambda: len(of("far", calls)) == 5)
    assert of("far", calls) == [("train 0", 3), ("val 0", 4), ("val 4", 3), ("train 3", 3), ("train 6", 1)]
    assert training.seconds > 0


@pytest.mark.parametrize(
    ("rows", "spoilt", "message"),
    [
        (torch.arange(3), IMAGES // 2, "answered with other images than it delivered.*in rows 0 to 2"),
        (torch.arange(1, 4), IMAGES, r"delivered rows \[1, 2, 3\] after 0 images"),
    ],
)
def test_an_engine_must_deliver_its_answer(rows, spoilt, message):
    def score(scoring: RolloutScoring) -> None:
        scoring.take(rows, torch.from_numpy(spoilt[:3]))
        scoring.result(IMAGES)

    with pytest.raises(RolloutSyncError, match=message):
        score(RolloutScoring(elsewhere([]), records(0), 3, overlaps=True))


@pytest.mark.process
def test_rewards_that_are_computed_elsewhere(tmp_path):
    """Servers that score each image for itself, the judge, and worker processes; no function of the user's own."""
    path = write(tmp_path, f"{function('return [1.0] * len(prompts)')}\nf.streams = f.computes_elsewhere = True\n")
    assert not build(path).queues
    remote = {"each": {"url": "http://127.0.0.1:9", "streams": True}, "whole": {"url": "http://127.0.0.1:9"}}
    config = RewardConfig(functions={"each": 1.0, "whole": 1.0, "jpeg_compressibility": 1.0}, remote=remote)
    mix = build_reward(config)
    assert mix.streaming == ("each", "jpeg_compressibility")
    assert list(mix.queues) == ["each"]
    assert JudgeReward.streams
    assert JudgeReward.computes_elsewhere
    mix = build_reward(RewardConfig(num_workers=1))
    try:
        assert list(mix.queues) == ["ocr"]
    finally:
        mix.close()


# ---------------------------------------------------------------------- runs with a server, one batch ahead


class Scorer:
    """A reward server; notes the bytes of the images and the prompts of each request."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[bytes], list[str]]] = []
        self.settings: tuple[str, ...] = ()
        """Overrides of a run that trains on it."""
        self.before: Callable[[], object] = lambda: None
        """Called before each answer."""

    def __call__(self, call: Any) -> Reply:
        content = call.json()
        files = [base64.b64decode(image) for image in content["images"]]
        self.calls.append((files, content["prompts"]))
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


def training_calls(far: Scorer) -> list[tuple[list[bytes], list[str]]]:
    """Those for training batches: 16 images as 5, 5, 5 and 1. Validation has 4."""
    return [call for call in far.calls if len(call[1]) != 4]


def trainer_of(config: Any, far: Scorer) -> FlowGRPOTrainer:
    """A trainer, after its checks before training, which call the server too."""
    trainer = FlowGRPOTrainer(config)
    far.calls.clear()
    return trainer


@pytest.mark.run
def test_a_run_has_the_numbers_and_the_calls_of_a_serial_one(small_config, far, pooled):
    runs = {}
    for name, settings in (
        ("late", [f"{R}.adapter_lag=2"]),
        ("ahead", [f"{R}.ahead=2"]),
        ("all at the end", [f"{R}.ahead=2", "reward.overlap=false"]),
    ):
        if name == "ahead":
            pooled()
        rows = untimed(trainer_of(small_config(*far.settings, *settings, folder=name), far).fit().rows())
        runs[name] = rows, sorted(training_calls(far)), sorted(far.calls)
    assert len(runs["late"][1]) == 4 * 4
    assert runs["ahead"] == runs["late"]
    assert runs["all at the end"] == runs["late"]


@pytest.mark.run
def test_they_are_scored_while_the_actor_learns(small_config, far, pooled):
    """Each update begins when all of the next batch has been scored."""
    pooled()
    settings = ("trainer.test_freq=-1", "trainer.val_before_train=false", "data.val_files=null")
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1", *settings), far)
    update = trainer.run.actor.update

    def updating(*args, **kwargs):
        wanted = 4 * min(trainer.step + 2, 4)
        wait_until(lambda: len(far.calls) >= wanted)
        found.append(len(far.calls) - wanted)
        return update(*args, **kwargs)

    found: list[int] = []
    trainer.run.actor.update = updating
    rows = trainer.fit().rows()
    assert found == [0] * 4
    assert all(row["timing_s/reward_work"] > 0 for row in rows)


@pytest.mark.run
def test_a_failure_ends_the_step_that_learns_from_the_batch(small_config, far, pooled):
    def fail():
        if len(training_calls(far)) > 4:
            raise OSError("broken")  # breaks the connection

    far.before = fail
    pooled(engines=1)  # two engines draw two batches at once, and a call of the second may come before one of the first
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1", "trainer.save_freq=1"), far)
    with pytest.raises(RewardError, match=r"reward.remote.far, images 0 to 4"):
        trainer.fit()
    assert [row["step"] for row in trainer.folder.rows()] == [0, 1]
    assert (trainer.folder.checkpoints / "latest").read_text() == "step_1"


@pytest.mark.run
def test_a_run_that_ends_waits_for_no_score_and_begins_none(small_config, far, pooled):
    go_on = threading.Event()

    def slow():
        if len(training_calls(far)) > 4:
            assert go_on.wait(WAIT_S)

    far.before = slow
    pooled(engines=1)  # as above: the fifth call is one of the second batch
    trainer = trainer_of(small_config(*far.settings, f"{R}.ahead=1"), far)

    def failing(*_args, **_kwargs):
        wait_until(lambda: len(training_calls(far)) == 5)
        raise RuntimeError("the update failed")

    trainer.run.actor.update = failing
    with pytest.raises(RuntimeError, match="the update failed"):
        trainer.fit()
    assert scoring_threads(), "the run has waited for the score"
    go_on.set()
    wait_until(lambda: not scoring_threads())
    assert len(training_calls(far)) == 5
