"""A built-in reward in worker processes: scores and order as in one, errors in a line, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flowgrpo_rc.rewards import OCRConfig, OCRReward, RewardConfig, RewardError, build_reward
from flowgrpo_rc.rewards.mix import build_observers
from flowgrpo_rc.rewards.workers import WorkerReward

WORDS = ["42", "7", "90", "13", "5", "61", "28"]
PROMPTS = [f'the text "{word}"' for word in WORDS]


def pictures() -> np.ndarray:
    """A word on each; the third is left white."""
    made = []
    for index, word in enumerate(WORDS):
        image = Image.new("RGB", (64, 48), "white")
        if index != 2:
            ImageDraw.Draw(image).text((8, 4), word, fill="black", font=ImageFont.load_default(32))
        made.append(np.asarray(image))
    return np.stack(made)


@pytest.fixture(scope="module")
def workers():
    reward = WorkerReward("ocr", OCRConfig(num_threads=1), 3, streams=True)
    yield reward
    reward.close()


def test_scores_order_and_captions_are_those_of_one_process(workers: WorkerReward) -> None:
    images = pictures()
    scores, info = OCRReward(OCRConfig(num_threads=1))(images, PROMPTS)
    assert {0.0, 1.0} <= set(scores.tolist())
    for count in (7, 4, 2, 1, 0):
        found, told = workers(images[:count], PROMPTS[:count], [{}] * count)
        np.testing.assert_array_equal(found, scores[:count])
        assert found.dtype == np.float32
        assert told["text"] == info["text"][:count]
    assert len(set(workers.pids)) == 3


def test_an_error_of_a_worker_is_told_in_a_line(workers: WorkerReward) -> None:
    with pytest.raises(ValueError, match=r"^prompt 0: 'a cat' has no text in double quotes.*reward\.functions\.ocr=0$"):
        workers(pictures()[:2], [PROMPTS[0], "a cat"])
    with pytest.raises(ValueError, match=r"train\.txt:9: 'a cat' has no text in double quotes"):
        workers.check_prompts(["a cat"], image_size=(48, 64), sources=["train.txt:9"])
    with pytest.raises(RuntimeError, match=r"^IndexError in a worker process: tuple index out of range$"):
        workers(np.zeros((1, 4), np.uint8)[:, 0], PROMPTS[:1])
    assert workers(pictures()[:1], PROMPTS[:1])[0].tolist() == [1.0]  # the answers are still those of the calls


def test_a_run_s_reward_has_them_where_it_is_asked_to() -> None:
    mix = build_reward(RewardConfig(num_workers=2, functions={"ocr": 1.0, "jpeg_compressibility": 0.5}))
    reward = mix.functions["ocr"].function
    assert isinstance(reward, WorkerReward)
    assert mix.streaming == ("ocr", "jpeg_compressibility")
    with pytest.raises(ValueError, match="'a cat' has no text in double quotes"):
        mix.check_prompts(["a cat"], image_size=(48, 64))
    assert mix(pictures()[:2], PROMPTS[:2]).parts["ocr"].tolist() == [1.0, 1.0]
    os.kill(reward.pids[1], signal.SIGKILL)
    with pytest.raises(
        RewardError, match=r"worker process \d+ of the reward 'ocr' died of signal 9 before it answered"
    ):
        mix(pictures()[:2], PROMPTS[:2])
    assert not any(alive(pid) for pid in reward.pids)


def test_a_call_after_they_have_ended_says_so() -> None:
    reward = WorkerReward("ocr", OCRConfig(num_threads=1), 1, streams=True)
    reward.close()
    with pytest.raises(RuntimeError, match=r"^worker process \d+ of the reward 'ocr' died of signal 9 before it"):
        reward(pictures()[:1], PROMPTS[:1])


def test_files_of_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("queue", "flowgrpo_rc", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user's')")
    monkeypatch.chdir(tmp_path)
    reward = WorkerReward("ocr", OCRConfig(num_threads=1), 1, streams=True)
    assert reward(pictures()[:1], PROMPTS[:1])[0].tolist() == [1.0]
    reward.close()


def test_they_end_with_the_mix_of_the_training_and_with_that_of_validation() -> None:
    shared: dict[str, Any] = {"num_workers": 1, "functions": {"ocr": 1.0}}
    looking: dict[str, Any] = {"functions": {"jpeg_compressibility": 1.0}, "val_functions": {"ocr": True}}
    for mix in (build_reward(RewardConfig(**shared)), build_observers(RewardConfig(**shared | looking))):
        assert mix is not None
        (pid,) = mix.functions["ocr"].function.pids
        assert alive(pid)
        mix.close()
        assert not alive(pid)
        mix.close()


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_they_end_with_the_trainer(tmp_path: Path, how: str) -> None:
    code = (
        "import sys, time\n"
        "from flowgrpo_rc.rewards import OCRConfig\n"
        "from flowgrpo_rc.rewards.workers import WorkerReward\n"
        "reward = WorkerReward('ocr', OCRConfig(num_threads=1), 1, True)\n"
        "print(*reward.pids, flush=True)\n"
        "time.sleep(99 if sys.argv[1] == 'is killed' else 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        if how == "is killed":
            trainer.kill()
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A child that nobody has waited for is still listed.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("count", [-1, 1.5, "many"])
def test_a_number_of_workers_that_is_none(count: object) -> None:
    with pytest.raises(ValueError, match=r"reward\.num_workers: got"):
        RewardConfig(num_workers=count)  # type: ignore[arg-type]
