"""Reward ``judge``: questions to a vision language model about every image, as many at once as its server takes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.rewards.answer import CAPTIONS, PARTS
from flowgrpo_rc.rewards.errors import brief_repr
from flowgrpo_rc.rewards.http_client import Request, ServerError, send_all
from flowgrpo_rc.rewards.judge import chat
from flowgrpo_rc.rewards.judge.config import SECTION, JudgeConfig, JudgeQuestion
from flowgrpo_rc.rewards.judge.parsers import PARSERS, Answer, UnreadableAnswer, Wanted
from flowgrpo_rc.rewards.judge.wording import fill, placeholders

REFERENCES = "images"
"""The key of ``metadata`` that holds a prompt's reference images."""
_CHECK_TRIES = 2
"""Tries of the questions before training: a server that is not there should show within seconds."""
_ENCODERS = 4
"""Threads that turn images into files."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question about one image of a batch."""

    index: int
    """Of the image."""
    question: JudgeQuestion
    words: str
    target: str
    files: tuple[bytes, ...]
    """What the judge is shown, the image last."""
    where: str
    """Sample, prompt and question, for messages."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """What became of a question."""

    score: float
    text: str
    """The judge's words."""


class JudgeReward:
    """The weighted mean of the judge's scores over ``config.questions``, in [0, 1].

    When it is made, the server must answer, name its model (which becomes ``config.model``) and score a blank image,
    and with a blank reference where a question shows references.

    Raises:
        ValueError: the configuration lacks something, or the server does not do what it must; one line.
        ImportError: httpx is not installed, or rapidfuzz for the parser ``ocr``.
    """

    streams = True
    """An image's score has nothing to do with the others', so the judge may work while the next ones are drawn."""

    computes_elsewhere = True
    """It is the server that computes, so it may be asked while the actor learns."""

    def __init__(self, config: JudgeConfig | None = None) -> None:
        self.config = JudgeConfig() if config is None else config
        if self.config.base_url is None:
            raise ValueError(
                f"{SECTION}.base_url: null, so there is no server to ask; give its address, as "
                "http://127.0.0.1:8000/v1, or have one started with reward.reward_model.enable=true"
            )
        if not self.config.questions:
            raise ValueError(
                f"{SECTION}.questions: none, so there is nothing to ask the judge; give a list, e.g. "
                f"{SECTION}.questions=[yes_no]"
            )
        self._url = self.config.base_url.rstrip("/")
        self._cache: dict[bytes, _Judged] = {}
        tries = min(_CHECK_TRIES, self.config.tries)
        try:
            self.config.model = self._served_model(tries)
            blank = np.full((1, 256, 256, 3), 255, np.uint8)
            row: dict[str, Any] = {name: name for question in self.config.questions for name in placeholders(question)}
            row[REFERENCES] = [blank[0]]
            self._judge(self._questions(blank, ['a blank sheet "blank"'], [row], sample="blank image"), tries)
        except ServerError as error:
            raise ValueError(f"{SECTION}: {error}") from None

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """Score images (N, H, W, 3) uint8 RGB.

        Returns:
            (N,) float32 in [0, 1]; and in the info the transcripts as captions, where the parser ``ocr`` makes some,
            and each question's own scores, where there are several.

        Raises:
            ServerError: the server failed for good, or an answer could not be read, twice; names sample and prompt.
            ValueError: a question's placeholder has no value in a row of ``metadata``, or it is about references and
                the row has none.
        """
        asked = self._questions(images, prompts, metadata)
        judged = self._judge(asked, self.config.tries)
        questions: list[JudgeQuestion] = self.config.questions
        table = np.asarray([one.score for one in judged], np.float64).reshape(len(images), len(questions))
        info: dict[str, list[Any]] = {}
        for column, question in enumerate(questions):
            if len(questions) > 1:
                info[f"{PARTS}{question.name}"] = table[:, column].tolist()
            if question.parser == "ocr":
                info.setdefault(CAPTIONS, [one.text for one in judged[column :: len(questions)]])
        return weighted_mean(table, [question.weight for question in questions], self.config.mean), info

    def check_prompts(
        self,
        prompts: Sequence[str],
        *,
        image_size: tuple[int, int] | None = None,
        sources: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Refuse prompts that lack what a question needs, before training.

        Raises:
            ValueError: names the prompt, where it stands, and what it lacks.
        """
        rows = [{} for _ in prompts] if metadata is None else metadata
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            where = f"prompt {index}" if sources is None else sources[index]
            for question in self.config.questions:
                fill(question, prompt, row, where)
                _references(question, row, where)

    def _served_model(self, tries: int) -> str:
        """The name of the model that judges.

        Raises:
            ValueError: the server has not the one that is asked for, or several and none is asked for.
        """
        request = Request(f"{self._url}/models", name="its models")
        (served,) = send_all([request], self.config, SECTION, chat.read_models, tries=tries)
        names = ", ".join(served[:9]) or "none"
        wanted = self.config.model
        if wanted is None and len(served) == 1:
            return served[0]
        if wanted is None:
            raise ValueError(f"{SECTION}.model: the server {self._url} has {len(served)} models ({names}); name one")
        if wanted not in served:
            raise ValueError(f"{SECTION}.model: the server {self._url} has no model {wanted!r}; it has {names}")
        return wanted

    def _questions(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None,
        sample: str = "sample",
    ) -> list[_Asked]:
        """Every question about every image, those about one image side by side."""
        rows = [{} for _ in prompts] if metadata is None else metadata
        wheres = [f"{sample} {index}, prompt {brief_repr(prompt)}" for index, prompt in enumerate(prompts)]
        showing = [question for question in self.config.questions if question.references][:1]
        references = [
            [one for question in showing for one in _references(question, row, where)]
            for row, where in zip(rows, wheres, strict=True)
        ]
        # The images of a prompt have the same references.
        distinct = {_identity(one): one for shown in references for one in shown}
        with ThreadPoolExecutor(_ENCODERS) as pool:
            files = list(pool.map(partial(chat.encode, config=self.config), images))
            encoded = pool.map(lambda one: chat.encode(np.asarray(one), self.config), distinct.values())
            reference_files = dict(zip(distinct, encoded, strict=True))
        asked = []
        for index, (prompt, row, file, where) in enumerate(zip(prompts, rows, files, wheres, strict=True)):
            before = [reference_files[_identity(one)] for one in references[index]]
            for question in self.config.questions:
                words, target = fill(question, prompt, row, where)
                shown = (*before, file) if question.references else (file,)
                asked.append(_Asked(index, question, words, target, shown, f"{where}, question {question.name!r}"))
        return asked

    def _judge(self, asked: Sequence[_Asked], tries: int) -> list[_Judged]:
        """The scores, in order. What was not asked before is asked; what cannot be read is asked once more."""
        began_at = time.monotonic()
        keys = [self._key(one) for one in asked]
        known = dict(self._cache)
        new = {key: one for key, one in zip(keys, asked, strict=True) if key not in known}
        answers = dict(zip(new, self._ask(list(new.values()), tries, began_at), strict=True))
        unreadable = {}
        for key, one in new.items():
            try:
                known[key] = _read(one, answers[key])
            except UnreadableAnswer:
                unreadable[key] = one
        texts = [answers[key].text for key in unreadable]
        again = self._ask(list(unreadable.values()), tries, began_at, texts)
        for (key, one), answer in zip(unreadable.items(), again, strict=True):
            try:
                known[key] = _read(one, answer)
            except UnreadableAnswer as error:
                raise ServerError(
                    f"{self.config.model} at {self._url} gave no answer that the parser {one.question.parser!r} can "
                    f"read, asked twice, for {one.where}: {error}; it said {brief_repr(answer.text)}"
                ) from None
        if self.config.cache:
            self._cache = known
        return [known[key] for key in keys]

    def _ask(
        self, asked: Sequence[_Asked], tries: int, began_at: float, unreadable: Sequence[str] | None = None
    ) -> list[Answer]:
        """The judge's answers, in order; ``unreadable`` are those that it gave before."""
        before = [None] * len(asked) if unreadable is None else list(unreadable)
        requests = [
            Request(
                f"{self._url}/chat/completions",
                partial(
                    chat.body,
                    one.words,
                    one.files,
                    self.config.image_format,
                    chat.parameters(one.question, self.config),
                    one.question.parser,
                    text,
                ),
                name=one.where,
            )
            for one, text in zip(asked, before, strict=True)
        ]
        return send_all(requests, self.config, SECTION, chat.read_answer, tries=tries, began_at=began_at)

    def _key(self, one: _Asked) -> bytes:
        """Digest of everything that a score rests on. Without the cache the image's place in the batch is part of it,
        so that each is judged by itself."""
        place = None if self.config.cache else one.index
        said = [
            one.words,
            one.target,
            one.question.parser,
            one.question.scale,
            chat.parameters(one.question, self.config),
        ]
        digest = hashlib.blake2b(json.dumps([place, one.question.name, *said], default=str).encode(), digest_size=32)
        for file in one.files:
            digest.update(len(file).to_bytes(8, "big"))
            digest.update(file)
        return digest.digest()


def weighted_mean(table: np.ndarray, weights: Sequence[float], mean: str) -> np.ndarray:
    """(N,) float32: the weighted ``arithmetic`` or ``geometric`` mean of each row of ``table``, (N, questions) in
    [0, 1]."""
    share = np.asarray(weights, np.float64) / np.sum(weights)
    if mean == "geometric":
        with np.errstate(divide="ignore"):  # the logarithm of 0 is minus infinity, whose exponential is 0 again
            return np.exp(np.log(table) @ share).astype(np.float32)
    return (table @ share).astype(np.float32)


def _references(question: JudgeQuestion, row: Mapping[str, Any], where: str) -> Sequence[Any]:
    """The images that a question shows before the one that it is about.

    Raises:
        ValueError: the row has none, though the question shows some.
    """
    if not question.references:
        return ()
    found = row.get(REFERENCES)
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(
            f"{where} has no reference images, which the judge's question {question.name!r} shows; add the column "
            f"{REFERENCES!r} to the prompt file, or set references=false for this question"
        )
    return found


def _identity(reference: Any) -> Any:
    """What tells a reference from others of a batch."""
    return reference if isinstance(reference, ReferenceImage) else id(reference)


def _read(asked: _Asked, answer: Answer) -> _Judged:
    if asked.question.parser == "yes_no" and answer.first_tokens is None:
        raise ServerError(
            f"{asked.where}: the server answers without the log-probabilities of the first token, which the parser "
            "'yes_no' reads; use a server that gives them, or another parser"
        )
    # The first token is all that yes_no asks for, so that every answer to it is cut off.
    if not answer.complete and asked.question.parser != "yes_no":
        raise UnreadableAnswer("it was refused, or cut off at its length limit (max_tokens) or within its thoughts")
    wanted = Wanted(scale=asked.question.scale, target=asked.target)
    return _Judged(PARSERS[asked.question.parser](answer, wanted), answer.text)
