"""The section ``reward.judge`` of a configuration. Importing this loads no client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.forms import ground_truth
from flowgrpo_rc.rewards.http_client import HTTPOptions, check_url, own_fields_first
from flowgrpo_rc.rewards.judge.parsers import PARSERS
from flowgrpo_rc.rewards.ocr import quoted_target
from flowgrpo_rc.rewards.registry import METRIC_NAME
from flowgrpo_rc.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Read,
    Section,
    complaints,
    convert,
    one_of,
    read_mapping,
)

SECTION = "reward.judge"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
FreeKeys = Annotated[Any, Read(read_mapping("a mapping of keys to values, e.g. {top_p: 0.8}"))]


@documented_fields
@dataclass(kw_only=True, slots=True)
class JudgeQuestion(Section):
    """One question that the judge answers about every image."""

    section = f"{SECTION}.questions"

    parser: Annotated[str, one_of(PARSERS)] = "yes_no"
    """Parser that makes a score between 0 and 1 of the answer: ``score``, ``unified_reward_1_5``,
    ``unified_reward_2``, ``yes_no`` or ``ocr``."""
    question: str | None = None
    """Text of the question; null for the parser's own. ``{prompt}`` is the image's prompt, ``{target}`` the text that
    the image should show, and any other name in braces the value of that column of the prompt file."""
    references: bool = False
    """Show the judge the prompt's reference images too, in their order and before the image, which is the last. Needs a
    ``question`` that explains them, since the parsers' own speak of one image."""
    name: str | None = None
    """Name in the metric ``reward/judge/<name>``; null for the parser's."""
    weight: PositiveFloat = 1.0
    """Weight in the mean over the questions."""
    scale: PositiveFloat = 5.0
    """The best score that the question of the parser ``score`` allows; the worst is 0."""
    max_tokens: PositiveInt | None = None
    """Longest answer in tokens; null for ``reward.judge.max_tokens``, and for 1 where the parser is ``yes_no``."""

    def problems(self) -> Iterator[str]:
        """A name that no metric can have, and references without words about them."""
        if self.question is not None and not self.question.strip():
            yield "question: it is blank; give the words, or null for the parser's own"
        if self.references and self.question is None:
            yield (
                "references: got true without a question; give one that says what the images are, e.g. "
                "question='The second image is an edit of the first: {prompt}. Is it right? Answer with Yes or No.'"
            )
        if self.name is None:
            self.name = self.parser
        if not METRIC_NAME.fullmatch(self.name):
            metric = f"which becomes the metric reward/judge/{self.name}"
            yield f"name: got {self.name!r}, {metric}; use the letters a to z, digits and underscores"

    @property
    def words(self) -> str:
        """The question before its placeholders are filled."""
        return self.question or PARSERS[self.parser].question

    @property
    def placeholders(self) -> set[str]:
        """The names in braces in the question."""
        return set(_PLACEHOLDER.findall(self.words))

    @property
    def wants_target(self) -> bool:
        """True for a question about the text that the image should show."""
        return self.parser == "ocr" or "target" in self.placeholders

    def fill(self, prompt: str, row: Mapping[str, Any], where: str) -> tuple[str, str]:
        """The question about the image of one prompt, and the text that the image should show (empty if not needed).
        Raises ``ValueError``, which begins with ``where``, for a prompt or row that lacks what the question needs."""
        target = target_text(prompt, row) if self.wants_target else ""
        if target is None:
            raise ValueError(
                f"{where}: {prompt!r} has no text in double quotes and no column ground_truth, which the judge's "
                f'question {self.name!r} needs; write the wanted text in quotes, as in: a sign that says "42"'
            )
        # The two names come last, so that no column of the same name hides them.
        values: dict[str, Any] = {**row, "prompt": prompt, "target": target}
        lacking = sorted(name for name in self.placeholders if not isinstance(values.get(name), str | int | float))
        if lacking:
            raise ValueError(
                f"{where} has no {', '.join(lacking)}, which the judge's question {self.name!r} asks about; add it as "
                "a column of a .parquet or .jsonl file, of text or numbers"
            )
        # In one pass, so that braces in a prompt stay as they are.
        return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), self.words), target


def target_text(prompt: str, row: Mapping[str, Any]) -> str | None:
    """The text that an image should show: the row's ground truth, or the prompt's text in double quotes, or None."""
    # Other data sets hold numbers or lists in the column, which no transcript is compared with.
    truth = ground_truth(row)
    return truth if isinstance(truth, str) and truth.strip() else quoted_target(prompt)


def read_questions(questions: Any) -> list[JudgeQuestion]:
    """The field ``questions``: one question or several, each as a section, a mapping of its keys or a parser's name."""
    if isinstance(questions, str | Mapping):
        questions = [questions]
    if not isinstance(questions, Sequence):
        raise ValueError(f"got {show(questions)}; give a list, e.g. [ocr] or [{{parser: yes_no, question: ...}}]")
    read: list[JudgeQuestion] = [
        convert(JudgeQuestion, {"parser": one} if isinstance(one, str) else one) for one in questions
    ]
    names = [one.name for one in read]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} names two questions; give each a name of its own")
    return read


@documented_fields
@own_fields_first
@dataclass(kw_only=True, slots=True)
class JudgeConfig(HTTPOptions):
    """The vision language model of the reward ``judge``, its server and its questions."""

    section = SECTION

    base_url: str | None = None
    """Address of a server that speaks OpenAI's protocol, with its version: ``http://127.0.0.1:8000/v1``. null where
    ``reward.reward_model`` starts one."""
    model: str | None = None
    """Name of the model that judges; null for the only one that the server has. The run's ``config.yaml`` records the
    name."""
    questions: Annotated[Any, Read(read_questions)] = field(default_factory=list)
    """Questions about each image: a list of mappings with the keys of ``JudgeQuestion``. The name of a parser is short
    for that parser with its own question, as in ``[ocr]``."""
    mean: Annotated[str, one_of(("arithmetic", "geometric"))] = "arithmetic"
    """Mean that makes one score of several questions, weighted: ``arithmetic`` or ``geometric``. The latter is 0 if one
    of the scores is."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the judge's answers. Even at 0 they vary a little with the server's other work."""
    seed: int | None = 0
    """Seed that the server draws answers from; null sends none."""
    max_tokens: PositiveInt = 512
    """Longest answer in tokens."""
    extra_body: FreeKeys = field(default_factory=dict)
    """Further keys of every request, e.g. ``{chat_template_kwargs: {enable_thinking: false}}``."""
    image_size: PositiveInt | None = None
    """Longest side in pixels of the images that are sent; null sends them as they are."""
    image_format: Annotated[str, one_of(("png", "jpeg"))] = "png"
    """File format of the images: ``png``, which keeps every pixel, or ``jpeg``, which is smaller."""
    cache: bool = False
    """Keep scores in memory, so that no image is judged twice. The images of training never repeat; those of
    validation may."""

    def problems(self) -> Iterator[str]:
        """An address or a key's name that cannot be used."""
        if self.base_url is not None:
            yield from complaints(check_url, "base_url", self.base_url)
        yield from HTTPOptions.problems(self)
