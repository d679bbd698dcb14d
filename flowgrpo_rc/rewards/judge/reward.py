"""Reward ``judge``: questions to a vision language model about every image."""

import base64
import hashlib
import json
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.reference_files import IMAGES_KEY
from flowgrpo_rc.rewards.answer import CAPTIONS, PARTS, brief_repr
from flowgrpo_rc.rewards.http_client import Request, ServerError, send_all
from flowgrpo_rc.rewards.judge.config import SECTION, JudgeConfig, JudgeQuestion
from flowgrpo_rc.rewards.judge.parsers import PARSERS, Answer, UnreadableAnswer, read_answer, read_models
from flowgrpo_rc.rewards.registry import Places, Rows
from flowgrpo_rc.rewards.remote.protocols import encode


class _Query(NamedTuple):
    """One question about one image, which is the last of the files."""

    question: JudgeQuestion
    words: str
    target: str
    files: tuple[bytes, ...]
    where: str
    """Sample, prompt and question, for messages."""


class JudgeReward:
    """The weighted mean of the judge's scores over ``config.questions``, in [0, 1].

    The constructor has the server name its model, which becomes ``config.model``, and score a blank image, with a blank
    reference for a question that shows references.

    Raises:
        ValueError: the configuration is incomplete, or the server does not answer as it must; in one line.
        ImportError: rapidfuzz is not installed, for the parser ``ocr``.
    """

    streams = True
    """The scores of images do not depend on each other, so that parts of a batch can be judged early."""
    computes_elsewhere = True
    """The server computes, so that images can be judged while the actor learns."""

    def __init__(self, config: JudgeConfig | None = None) -> None:
        self.config = JudgeConfig() if config is None else config
        if self.config.base_url is None:
            raise ValueError(
                f"{SECTION}.base_url: null, so there is no server to ask; give its address, as "
                "http://127.0.0.1:8000/v1, or have one started with reward.reward_model.enable=true"
            )
        if not self.config.questions:
            raise ValueError(f"{SECTION}.questions: none, so there is nothing to ask; give a list, e.g. [yes_no]")
        self._url = self.config.base_url.rstrip("/")
        self._cache: dict[Hashable, tuple[float, str]] = {}
        # A server that is not there should show within seconds.
        tries = min(2, self.config.tries)
        try:
            self.config.model = self._served_model(tries)
            # The score is not used; a plain image is small to send.
            blank = np.full((1, 256, 256, 3), 255, np.uint8)
            row: dict[str, Any] = {name: name for question in self.config.questions for name in question.placeholders}
            row[IMAGES_KEY] = [blank[0]]
            self._judge(self._queries(blank, ['a blank sheet "blank"'], [row], sample="blank image"), tries)
        except ServerError as error:
            raise ValueError(f"{SECTION}: {error}") from None

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """Score images (N, H, W, 3) uint8 RGB.

        Returns:
            (N,) float32 in [0, 1], and the info: transcripts of the parser ``ocr`` as captions, and with several
            questions each one's own scores.

        Raises:
            ServerError: the server failed for good, or an answer could not be read, twice; names sample and prompt.
            ValueError: a row of ``metadata`` lacks a question's placeholder or references.
        """
        verdicts = self._judge(self._queries(images, prompts, metadata), self.config.tries)
        questions: list[JudgeQuestion] = self.config.questions
        table = np.asarray([score for score, _ in verdicts], np.float64).reshape(len(images), len(questions))
        info: dict[str, list[Any]] = {}
        for column, question in enumerate(questions):
            if len(questions) > 1:
                info[f"{PARTS}{question.name}"] = table[:, column].tolist()
            if question.parser == "ocr":
                info.setdefault(CAPTIONS, [text for _, text in verdicts[column :: len(questions)]])
        return weighted_mean(table, [question.weight for question in questions], self.config.mean), info

    def check_prompts(
        self, prompts: Sequence[str], *, sources: Places = None, metadata: Rows = None, **known: Any
    ) -> None:
        """Raise ``ValueError`` for a prompt that lacks the target, columns or references of a question."""
        rows = [{} for _ in prompts] if metadata is None else metadata
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            where = f"prompt {index}" if sources is None else sources[index]
            for question in self.config.questions:
                question.fill(prompt, row, where)
                _references(question, row, where)

    def _served_model(self, tries: int) -> str:
        """The configured model, or the server's only one; ``ValueError`` where there is no such model."""
        request = Request(f"{self._url}/models", name="its models")
        (served,) = send_all([request], self.config, SECTION, read_models, tries=tries)
        names = ", ".join(served[:9]) or "none"
        wanted = self.config.model
        if wanted is None and len(served) == 1:
            return served[0]
        if wanted is None:
            raise ValueError(f"{SECTION}.model: the server {self._url} has {len(served)} models ({names}); name one")
        if wanted not in served:
            raise ValueError(f"{SECTION}.model: the server {self._url} has no model {wanted!r}; it has {names}")
        return wanted

    def _queries(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None,
        sample: str = "sample",
    ) -> list[_Query]:
        """Every question about every image, those about one image side by side."""
        rows = [{} for _ in prompts] if metadata is None else metadata
        # Images of a prompt share references.
        encoded: dict[Any, bytes] = {}
        queries = []
        # Resizing and packing run in C, mostly without the interpreter's lock.
        with ThreadPoolExecutor(4) as pool:
            files = list(pool.map(self._encode, images))
        for index, (prompt, row, file) in enumerate(zip(prompts, rows, files, strict=True)):
            where = f"{sample} {index}, prompt {brief_repr(prompt)}"
            for question in self.config.questions:
                words, target = question.fill(prompt, row, where)
                shown = []
                for reference in _references(question, row, where):
                    # Arrays have no hash; the rows keep them alive, so that no id is used twice.
                    key = reference if isinstance(reference, ReferenceImage) else id(reference)
                    if key not in encoded:
                        encoded[key] = self._encode(np.asarray(reference))
                    shown.append(encoded[key])
                queries.append(_Query(question, words, target, (*shown, file), f"{where}, question {question.name!r}"))
        return queries

    def _judge(self, queries: Sequence[_Query], tries: int) -> list[tuple[float, str]]:
        """Scores and words, in order. An answer that cannot be read is followed by a second request."""
        began_at = time.monotonic()
        # By place without the cache: equal images are judged each for itself, since answers vary.
        keys: list[Hashable] = [self._key(one) for one in queries] if self.config.cache else list(range(len(queries)))
        # A copy: the cache keeps nothing of a batch that fails.
        known = dict(self._cache)
        pending = {key: query for key, query in zip(keys, queries, strict=True) if key not in known}
        unreadable: dict[Hashable, str] = {}
        for is_last in (False, True):
            requests = [
                Request(
                    f"{self._url}/chat/completions", partial(self._body, query, unreadable.get(key)), name=query.where
                )
                for key, query in pending.items()
            ]
            answers = send_all(requests, self.config, SECTION, read_answer, tries=tries, began_at=began_at)
            unreadable = {}
            for (key, query), answer in zip(pending.items(), answers, strict=True):
                try:
                    known[key] = _read(query, answer), answer.text
                except UnreadableAnswer as error:
                    unreadable[key] = answer.text
                    if is_last:
                        raise ServerError(
                            f"{self.config.model} at {self._url} gave no answer that the parser "
                            f"{query.question.parser!r} can read, asked twice, for {query.where}: {error}; it said "
                            f"{brief_repr(answer.text)}"
                        ) from None
            pending = {key: pending[key] for key in unreadable}
        if self.config.cache:
            self._cache = known
        return [known[key] for key in keys]

    def _encode(self, image: np.ndarray) -> bytes:
        """An image (H, W, 3) uint8 as a file of the configured size and format."""
        if self.config.image_size is not None:
            picture = Image.fromarray(image)
            factor = self.config.image_size / max(picture.size)
            width, height = (max(1, round(side * factor)) for side in picture.size)
            image = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
        return encode(image, self.config.image_format, quality=95)

    def _body(self, query: _Query, unreadable: str | None = None) -> bytes:
        """A request; ``unreadable`` is the judge's first answer, where that cannot be read."""
        config = self.config
        kind = f"data:image/{config.image_format};base64"
        urls = [f"{kind},{base64.b64encode(file).decode()}" for file in query.files]
        # The images before the words, as in the examples of Qwen-VL.
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": query.words})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        parser = query.question.parser
        # The judge sees its own answer: a bare repetition would give the same one at temperature 0.
        if unreadable is not None:
            messages.append({"role": "assistant", "content": unreadable[:2000]})
            messages.append({"role": "user", "content": PARSERS[parser].again})
        one_token = parser == "yes_no"
        # A probability needs no second token, and one token is the fastest answer.
        max_tokens = query.question.max_tokens or (1 if one_token else config.max_tokens)
        request = {"model": config.model, "temperature": config.temperature, "max_tokens": max_tokens}
        # Not sent as null, which servers refuse.
        if config.seed is not None:
            request["seed"] = config.seed
        if one_token:
            # Servers give no more by default.
            request |= {"logprobs": True, "top_logprobs": 20}
        return json.dumps({**request, **config.extra_body, "messages": messages}).encode()

    def _key(self, query: _Query) -> bytes:
        """Digest of everything that a score depends on."""
        # The request does not hold what the parser reads.
        return hashlib.sha256(self._body(query) + repr((query.question, query.target)).encode()).digest()


def weighted_mean(table: np.ndarray, weights: Sequence[float], mean: str) -> np.ndarray:
    """(N,) float32: the weighted ``arithmetic`` or ``geometric`` mean of each row of ``table``, (N, questions) in
    [0, 1]."""
    share = np.asarray(weights, np.float64) / np.sum(weights)
    if mean == "geometric":
        with np.errstate(divide="ignore"):  # the logarithm of 0 is minus infinity, whose exponential is 0 again
            return np.exp(np.log(table) @ share).astype(np.float32)
    return (table @ share).astype(np.float32)


def _references(question: JudgeQuestion, row: Mapping[str, Any], where: str) -> Sequence[Any]:
    """The reference images that a question shows; ``ValueError`` where it shows some and the row has none."""
    if not question.references:
        return ()
    found = row.get(IMAGES_KEY)
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(
            f"{where} has no reference images, which the judge's question {question.name!r} shows; add the column "
            f"{IMAGES_KEY!r} to the prompt file, or set references=false for this question"
        )
    return found


def _read(query: _Query, answer: Answer) -> float:
    parser = query.question.parser
    if parser == "yes_no" and answer.first_tokens is None:
        raise ServerError(
            f"{query.where}: the server answers without the log-probabilities of the first token, which the parser "
            "'yes_no' reads; use a server that gives them, or another parser"
        )
    # A request of yes_no limits the answer to one token, so that every answer to it is cut off.
    if not answer.complete and parser != "yes_no":
        raise UnreadableAnswer("it was refused, or cut off at its length limit (max_tokens) or within its thoughts")
    return PARSERS[parser].read(answer, query.question.scale, query.target)
