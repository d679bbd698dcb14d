"""A built-in reward in worker processes: scores and order as in one, and no process left behind."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from tests_support import alive, wait_until

from flowgrpo_rc.processes import RemoteObject
from flowgrpo_rc.rewards import OCRConfig, OCRReward, RewardConfig, RewardError, build_reward
from flowgrpo_rc.rewards.workers import WorkerReward

pytestmark = pytest.mark.process
WAIT_S = 60
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


def test_scores_order_and_captions_are_those_of_one_process() -> None:
    reward = WorkerReward("ocr", OCRConfig(num_threads=1), 3, streams=True)
    pids = pids_of(reward)
    assert len(set(pids)) == 3
    images = pictures()
    scores, info = OCRReward(OCRConfig(num_threads=1))(images, PROMPTS)
    assert {0.0, 1.0} <= set(scores.tolist())
    for count in (7, 4, 2, 1, 0):
        found, reported = reward(images[:count], PROMPTS[:count], [{}] * count)
        np.testing.assert_array_equal(found, scores[:count])
        assert found.dtype == np.float32
        assert reported["text"] == info["text"][:count]
    with pytest.raises(ValueError, match=r"^prompt 0: 'a cat' has no text in double quotes.*reward\.functions\.ocr=0$"):
        reward(images[:2], [PROMPTS[0], "a cat"])
    with pytest.raises(ValueError, match=r"train\.txt:9: 'a cat' has no text in double quotes"):
        reward.check_prompts(["a cat"], image_size=(48, 64), sources=["train.txt:9"])
    assert reward(images[:1], PROMPTS[:1])[0].tolist() == [1.0]
    with pytest.raises(RuntimeError, match=r"^IndexError in a worker process: tuple index out of range$"):
        reward(np.zeros((1, 4), np.uint8)[:, 0], PROMPTS[:1])
    reward.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="a worker process of the reward 'ocr' died of signal 9"):
        reward(images[:1], PROMPTS[:1])


def test_a_worker_that_is_killed_is_an_error_of_the_reward() -> None:
    mix = build_reward(RewardConfig(num_workers=2, functions={"ocr": 1.0, "jpeg_compressibility": 0.5}))
    assert mix.streaming == ("ocr", "jpeg_compressibility")
    with pytest.raises(ValueError, match="'a cat' has no text in double quotes"):
        mix.check_prompts(["a cat"], image_size=(48, 64))
    assert mix(pictures()[:2], PROMPTS[:2]).parts["ocr"].tolist() == [1.0, 1.0]
    pids = pids_of(mix.functions["ocr"].function)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RewardError, match=r"a worker process of the reward 'ocr' died of signal 9"):
        mix(pictures()[:2], PROMPTS[:2])
    mix.close()
    assert not any(map(alive, pids))


def test_ctrl_c_ends_a_call_and_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for their answers would last as long as the call."""
    reward = WorkerReward("ocr", OCRConfig(num_threads=1), 1, streams=True)
    monkeypatch.setattr(RemoteObject, "call", lambda worker, *_, **__: worker.wait(WAIT_S))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        reward(pictures(), PROMPTS)
    assert not any(map(alive, pids_of(reward)))


SCRIPT = """
import sys, time
from flowgrpo_rc.processes import RemoteObject
from flowgrpo_rc.rewards import OCRConfig
from flowgrpo_rc.rewards.workers import WorkerReward
reward = WorkerReward("ocr", OCRConfig(num_threads=1), 1, True)
print(reward.workers[0].pid, flush=True)
time.sleep(99 if sys.argv[1] == "is killed" else 0)
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_they_end_with_the_trainer(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        if how == "is killed":
            trainer.kill()
    wait_until(lambda: not alive(pid))


def pids_of(reward: WorkerReward) -> list[int]:
    return [worker.pid for worker in reward.workers]
