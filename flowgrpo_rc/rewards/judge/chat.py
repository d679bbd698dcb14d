"""Requests and answers of OpenAI's protocol: ``/chat/completions`` and ``/models``."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rc.messages import printable
from flowgrpo_rc.rewards.http_client import parse_json
from flowgrpo_rc.rewards.judge.config import JudgeConfig, JudgeQuestion
from flowgrpo_rc.rewards.judge.parsers import PARSERS, Answer
from flowgrpo_rc.rewards.remote import protocols


def encode(image: np.ndarray, config: JudgeConfig) -> bytes:
    """An image (H, W, 3) uint8 as a file of the configured size and format."""
    if config.image_size is not None:
        picture = Image.fromarray(image)
        factor = config.image_size / max(picture.size)
        width, height = (max(1, round(side * factor)) for side in picture.size)
        image = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    return protocols.encode(image, config.image_format, quality=95)


def body(
    words: str, files: Sequence[bytes], question: JudgeQuestion, config: JudgeConfig, unreadable: str | None
) -> bytes:
    """A request about the last of ``files``; ``unreadable`` is the judge's first answer, where that cannot be read."""
    urls = [f"data:image/{config.image_format};base64,{base64.b64encode(file).decode()}" for file in files]
    # The images before the words, as in the examples of Qwen-VL.
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*content, {"type": "text", "text": words}]}]
    # The judge sees its own answer: a bare repetition would give the same one at temperature 0.
    if unreadable is not None:
        messages.append({"role": "assistant", "content": unreadable[:2000]})
        messages.append({"role": "user", "content": PARSERS[question.parser].again})
    one_token = question.parser == "yes_no"
    # A probability needs no second token, and one token is the fastest answer.
    max_tokens = question.max_tokens or (1 if one_token else config.max_tokens)
    request = {"model": config.model, "temperature": config.temperature, "max_tokens": max_tokens}
    # Not sent as null, which servers refuse.
    if config.seed is not None:
        request["seed"] = config.seed
    if one_token:
        # Servers give no more by default.
        request |= {"logprobs": True, "top_logprobs": 20}
    return json.dumps({**request, **config.extra_body, "messages": messages}).encode()


def read_answer(text: bytes) -> Answer:
    """The judge's answer in a server's; ``ValueError`` where that is none of ``/chat/completions``."""
    answer = parse_json(text)
    try:
        choice = answer["choices"][0]
        words = choice["message"]["content"]
        complete = words is not None and choice.get("finish_reason") not in ("length", "content_filter")
        # A model that thinks first may show it. If it never stops, all of its words are thoughts.
        words = re.sub(r"^.*</think>", "", words or "", flags=re.DOTALL).strip()
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"answers with no text in choices[0].message.content: {text[:200].decode(errors='replace')!r}"
        ) from None
    tokens = None if choice.get("logprobs") is None else _first_tokens(choice)
    return Answer(words, tokens, complete and not words.startswith("<think>"))


def _first_tokens(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    try:
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        tokens = [(str(entry["token"]), float(entry["logprob"])) for entry in top]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        raise ValueError("answers with log-probabilities but no numbers in logprobs.content[0].top_logprobs") from None
    for token, logprob in tokens:
        # Rounding may carry the logarithm of 1 a little above 0.
        if not -1e9 < logprob < 1e-3:
            raise ValueError(f"answers with the log-probability {logprob:g} of the token {token[:40]!r}")
    return tokens


def read_models(text: bytes) -> list[str]:
    """The names of a server's models, from its answer to ``GET /models``; ``ValueError`` for any other answer."""
    answer = parse_json(text)
    try:
        # Messages, logs and config.yaml repeat the names.
        return [printable(str(model["id"])) for model in answer["data"]]
    except (KeyError, TypeError):
        raise ValueError(f"answers with no list of models: {text[:200].decode(errors='replace')!r}") from None
