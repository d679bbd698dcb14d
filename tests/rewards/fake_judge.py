"""A judge on loopback that speaks OpenAI's protocol and says what a test wants."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from stub_server import Call, Reply, StubServer

from flowgrpo_rc.rewards import RewardConfig, RewardMix, build_reward

MODEL = "Qwen/Qwen3-VL-8B-Instruct"


@dataclass
class Asked:
    """One request to the judge, unpacked."""

    call: Call
    words: str
    """The question, or the last of what was said."""
    image: np.ndarray
    """(H, W, 3) uint8."""
    references: list[np.ndarray]
    """The text shown before it."""
    request: dict[str, Any]

    @property
    def again(self) -> bool:
        """True if this asks for an answer that can be read."""
        return len(self.request["messages"]) > 1


def said(text: str | None, tokens: dict[str, float] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    """The answer of a server whose judge says this; ``tokens`` are the likeliest first ones with log-probabilities."""
    message = {"role": "assistant", "content": text}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    if tokens is not None:
        top = [{"token": token, "logprob": logprob, "bytes": None} for token, logprob in tokens.items()]
        choice["logprobs"] = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": top}]}
    return {"object": "chat.completion", "model": MODEL, "choices": [choice]}


def unpack(call: Call) -> Asked:
    request = call.json()
    *shown, said_last = request["messages"][0]["content"]
    *references, image = [_pixels(part["image_url"]["url"]) for part in shown]
    last = request["messages"][-1]["content"]
    words = said_last["text"] if isinstance(last, list) else last
    return Asked(call, words, image, references, request)


def _pixels(url: str) -> np.ndarray:
    kind, _, data = url.partition(";base64,")
    file = base64.b64decode(data)
    assert kind == {b"\x89P": "data:image/png", b"\xff\xd8": "data:image/jpeg"}[file[:2]]
    return np.asarray(Image.open(io.BytesIO(file)))


class FakeJudge(StubServer):
    """``judge`` gets what is asked and returns words, or a ``Reply``; the blank image before training included."""

    def __init__(self, judge: Callable[[Asked], Any], models: tuple[str, ...] = (MODEL,)) -> None:
        self.asked: list[Asked] = []

        def answer(call: Call) -> Reply:
            if call.path == "/v1/models":
                return Reply({"object": "list", "data": [{"id": name, "object": "model"} for name in models]})
            assert call.path == "/v1/chat/completions"
            one = unpack(call)
            self.asked.append(one)
            answer = judge(one)
            return answer if isinstance(answer, Reply) else Reply(said(answer) if isinstance(answer, str) else answer)

        super().__init__(answer)

    def reward(self, questions: Any = ("score",), **settings: Any) -> RewardMix:
        """The reward ``judge`` alone, with this server."""
        judge = {"base_url": f"{self.url}/v1", "questions": list(questions), **settings}
        return build_reward(RewardConfig(functions={"judge": 1.0}, judge=judge))


def numbered(count: int, side: int = 8) -> np.ndarray:
    """Images that tell their number: pixel (0, 0) is it, as red and green."""
    images = np.zeros((count, side, side, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(count) // 256
    images[:, 0, 0, 1] = np.arange(count) % 256
    return images


def number_of(image: np.ndarray) -> int:
    """The number of an image of ``numbered``."""
    return int(image[0, 0, 0]) * 256 + int(image[0, 0, 1])
