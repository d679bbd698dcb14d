"""What a server that speaks OpenAI's protocol is sent (``/chat/completions``, ``/models``), and what it sends back."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rc.checks import show
from flowgrpo_rc.messages import printable
from flowgrpo_rc.rewards.http_client import parse_json
from flowgrpo_rc.rewards.judge.config import JudgeConfig, JudgeQuestion
from flowgrpo_rc.rewards.judge.parsers import Answer
from flowgrpo_rc.rewards.judge.questions import FORMS
from flowgrpo_rc.rewards.remote import images

JPEG_QUALITY = 95
TOP_LOGPROBS = 20
"""Likeliest first tokens that are asked for; the most that servers give unless told otherwise."""
CUT_OFF = ("length", "content_filter")
"""Values of ``finish_reason`` of an answer that was ended before the judge had said everything."""
REPEATED = 2000
"""Characters of an unreadable answer that the judge is shown again."""


def encode(image: np.ndarray, config: JudgeConfig) -> bytes:
    """An image (H, W, 3) uint8 as a file, resized as the configuration says."""
    if config.image_size is not None:
        picture = Image.fromarray(image)
        factor = config.image_size / max(picture.size)
        width, height = (max(1, round(side * factor)) for side in picture.size)
        image = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    return images.encode(image, config.image_format, JPEG_QUALITY)


def parameters(question: JudgeQuestion, config: JudgeConfig) -> dict[str, Any]:
    """Everything in a request but the words and the images."""
    one_token = question.parser == "yes_no"
    asked: dict[str, Any] = {
        "model": config.model,
        "temperature": config.temperature,
        "max_tokens": question.max_tokens or (1 if one_token else config.max_tokens),
    }
    if config.seed is not None:
        asked["seed"] = config.seed
    if one_token:
        asked |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
    return asked | dict(config.extra_body)


def body(
    words: str,
    files: Sequence[bytes],
    image_format: str,
    asked: Mapping[str, Any],
    parser: str,
    unreadable: str | None = None,
) -> bytes:
    """A request about one image, the last of ``files``; ``unreadable`` is the judge's answer to it before, which could
    not be read."""
    urls = [f"data:image/{image_format};base64,{base64.b64encode(file).decode()}" for file in files]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": words})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if unreadable is not None:
        messages.append({"role": "assistant", "content": unreadable[:REPEATED]})
        messages.append({"role": "user", "content": FORMS[parser].again})
    return json.dumps({**asked, "messages": messages}).encode()


def read_answer(text: bytes) -> Answer:
    """The judge's answer in a server's.

    Raises:
        ValueError: this is no answer of ``/chat/completions``.
    """
    answer = parse_json(text)
    try:
        choice = answer["choices"][0]
        words = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"answers with no choices[0].message.content: {text[:200].decode(errors='replace')!r}"
        ) from None
    if not isinstance(words, str | None):
        raise ValueError(f"answers with a message that is {type(words).__name__} and not text")
    said = words is not None and choice.get("finish_reason") not in CUT_OFF
    # A model that thinks first may show it. If it never stops, all of its words are thoughts.
    words = re.sub(r"^.*</think>", "", words or "", flags=re.DOTALL).strip()
    complete = said and not words.startswith("<think>")
    return Answer(words, None if choice.get("logprobs") is None else _first_tokens(choice), complete)


def _first_tokens(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    try:
        tokens = [(top["token"], top["logprob"]) for top in choice["logprobs"]["content"][0]["top_logprobs"]]
    except (KeyError, IndexError, TypeError):
        raise ValueError("answers with log-probabilities but no logprobs.content[0].top_logprobs") from None
    return [(_checked_token(token), _checked_logprob(logprob)) for token, logprob in tokens]


def _checked_token(token: Any) -> str:
    if not isinstance(token, str):
        raise ValueError(f"answers with the token {token!r}, which is no text")
    return token


def _checked_logprob(logprob: Any) -> float:
    # Rounding may carry the logarithm of 1 a little above 0.
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not -1e9 < logprob < 1e-3:
        raise ValueError(f"answers with the log-probability {show(logprob)} of a token")
    return float(logprob)


def read_models(text: bytes) -> list[str]:
    """The names of a server's models, from its answer to ``GET /models``.

    Raises:
        ValueError: it is none.
    """
    answer = parse_json(text)
    try:
        return [printable(str(model["id"])) for model in answer["data"]]
    except (KeyError, TypeError):
        raise ValueError(f"answers with no list of models: {text[:200].decode(errors='replace')!r}") from None
