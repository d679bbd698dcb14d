"""From a judge's words to a score, by hand."""

import json
import math

import numpy as np
import pytest

from flowgrpo_rc.rewards.judge.config import JudgeConfig, JudgeQuestion, target_text
from flowgrpo_rc.rewards.judge.parsers import PARSERS, Answer, UnreadableAnswer, read_answer, read_models
from flowgrpo_rc.rewards.judge.reward import weighted_mean

THREE = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"


@pytest.mark.parametrize(
    ("parser", "text", "scale", "score"),
    [
        ("score", "<Score>4</Score>", 5, 0.8),
        ("score", "It is fine.\n<score> 3.5 </SCORE> thank you", 5, 0.7),
        ("score", "<Score>4/5</Score>", 5, 0.8),
        ("score", "<Score>7</Score>", 10, 0.7),
        ("unified_reward_1_5", "Final Score: 4", 5, 0.8),
        ("unified_reward_1_5", "**Final Score:** 3.5", 5, 0.7),
        ("unified_reward_1_5", "final score:1 ... Final Score: 5", 5, 1.0),
        ("unified_reward_2", THREE.format(1, 1, 1), 5, 0.0),
        ("unified_reward_2", THREE.format(4, 3, 5), 5, 0.75),  # mean 4, (4 - 1) / 4
        ("unified_reward_2", THREE.format(4.5, 2.5, 2), 5, 0.5),  # mean 3
        ("unified_reward_2", "**Alignment Score (1-5):** 2\n**Coherence Score:** 3\nStyle score: 4", 5, 0.5),
        ("ocr", 'The text is "New  York".', 5, 1.0),  # contained
        ("ocr", "new yark", 5, 6 / 7),
        ("ocr", "", 5, 0.0),
    ],
)
def test_a_score_in_words(parser, text, scale, score):
    assert PARSERS[parser].read(Answer(text), scale, "new york") == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("tokens", "score"),
    [
        ({"Yes": 0.6, "No": 0.2}, 0.75),
        ({"Yes": 0.4, "yes": 0.1, " Yes": 0.1, "No": 0.15, "NO": 0.05, "Maybe": 0.2}, 0.75),  # .6 / (.6 + .2)
        ({"ĠYes": 0.001, "The": 0.9}, 1.0),
        ({"Yes": 1e-4, "No": 3e-4, "Yesterday": 0.5, "Not": 0.4}, 0.25),
    ],
)
def test_yes_no(tokens, score):
    answer = Answer("Yes", [(token, math.log(p)) for token, p in tokens.items()])
    assert PARSERS["yes_no"].read(answer, 5.0, "") == pytest.approx(score, rel=1e-12)


@pytest.mark.parametrize(
    ("parser", "text", "why"),
    [
        ("score", "I would say 4", "no <Score>"),
        ("score", "<Score>6</Score>", "6 is not between 0 and 5"),
        ("score", "<Score>8/10</Score>", "out of 10, not of 5"),
        ("score", f"<Score>{'9' * 400}</Score>", "inf is not between"),
        ("unified_reward_1_5", "Final Score: 0", "0 is not between 1 and 5"),
        ("unified_reward_2", "Alignment Score (1-5): 3\nStyle Score (1-5): 4", "no 'Coherence Score"),
        ("unified_reward_2", THREE.format(3, 9, 3), "Coherence Score 9 is not between"),
    ],
)
def test_what_cannot_be_read_is_an_error(parser, text, why):
    with pytest.raises(UnreadableAnswer, match=why):
        PARSERS[parser].read(Answer(text), 5.0, "")
    for tokens in (None, [], [("Maybe", -0.1)]):
        with pytest.raises(UnreadableAnswer, match="neither Yes nor No"):
            PARSERS["yes_no"].read(Answer("Maybe", tokens), 5.0, "")


def test_what_a_model_thinks_first_is_passed_over():
    text = b'{"choices": [{"message": {"content": "<think><Score>1</Score></think> <Score>5</Score>"}}]}'
    assert read_answer(text) == Answer("<Score>5</Score>", None)


@pytest.mark.parametrize(
    ("content", "finish_reason", "answer"),
    [
        (None, "length", Answer("", complete=False)),
        ("", "content_filter", Answer("", complete=False)),
        ("4", "length", Answer("4", complete=False)),
        ("<think>I see 42", "stop", Answer("<think>I see 42", complete=False)),
        ("<think>no</think> <think>I see 42", "stop", Answer("<think>I see 42", complete=False)),
        ("", "stop", Answer("")),
    ],
)
def test_whether_a_judge_said_everything(content, finish_reason, answer):
    choice = {"message": {"content": content}, "finish_reason": finish_reason}
    assert read_answer(json.dumps({"choices": [choice]}).encode()) == answer


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"content": "a"}, "logprobs": {}}]}',
        *(
            b'{"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"top_logprobs": [%s]}]}}]}' % top
            for top in (
                b'{"token": "Yes"}',
                b'{"token": "Yes", "logprob": "x"}',
                b'{"token": "Yes", "logprob": NaN}',
                b'{"token": "Yes", "logprob": 1e999}',
                b'{"token": "Yes", "logprob": 0.5}',
                b'{"token": "Yes", "logprob": -1%s}' % (b"0" * 400),
            )
        ),
    ],
)
def test_answers_of_another_shape(text):
    with pytest.raises(ValueError, match="^(answers with|what was sent is not JSON) "):
        read_answer(text)


def test_the_names_of_models_are_read_without_escape_codes():
    assert read_models(b'{"data": [{"id": "\\u001b[31mred\\nmodel"}]}') == ["[31mred model"]
    for text in (b"[]", b'{"data": [{}]}', b"<html>"):
        with pytest.raises(ValueError, match="^(answers with|what was sent is not JSON) "):
            read_models(text)


def test_means():
    table = np.asarray([[0.25, 1.0], [0.0, 1.0], [0.5, 0.5]])
    np.testing.assert_allclose(weighted_mean(table, [1, 3], "arithmetic"), [0.8125, 0.75, 0.5], rtol=1e-6)
    # 0.25 ** (1/4) * 1 ** (3/4)
    np.testing.assert_allclose(weighted_mean(table, [1, 3], "geometric"), [0.25**0.25, 0.0, 0.5], rtol=1e-6)


def test_placeholders():
    question = JudgeQuestion(question='{"a": 1} {prompt} has {count} of {target}? {prompt}', parser="score")
    row = {"count": 3, "prompt": "not this"}
    words, target = question.fill('a {count} "42"', row, "p.jsonl:1")
    assert words == '{"a": 1} a {count} "42" has 3 of 42? a {count} "42"'
    assert target == "42"
    with pytest.raises(ValueError, match=r"^p\.jsonl:1 has no count, which the judge's question 'score' asks about"):
        question.fill('a "42"', {"count": None}, "p.jsonl:1")
    with pytest.raises(ValueError, match=r"^p\.jsonl:1: 'none' has no text in double quotes and no column"):
        question.fill("none", row, "p.jsonl:1")


@pytest.mark.parametrize(
    ("row", "target"),
    [
        ({}, "quoted"),
        ({"ground_truth": "column"}, "column"),
        ({"reward_model": {"ground_truth": "nested"}}, "nested"),
        ({"reward_model": {"ground_truth": "nested"}, "ground_truth": "column"}, "nested"),
        ({"ground_truth": 3}, "quoted"),
    ],
)
def test_the_text_that_an_image_should_show(row, target):
    assert target_text('a "quoted" text', row) == target


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"questions": 3}, "questions: got 3"),
        ({"questions": ["yes"]}, r"questions\.parser: got 'yes'; choose one of score, unified_reward_1_5,"),
        ({"questions": ["ocr", "ocr"]}, "questions: ocr names two questions"),
        ({"questions": [{"parser": "ocr", "words": "x"}]}, "questions: has no key words"),
        ({"questions": [{"question": " "}]}, r"questions\.question: it is blank"),
        ({"questions": [{"name": "a b"}]}, r"questions\.name: got 'a b'"),
        ({"questions": [{"weight": 0}]}, r"questions\.weight: got 0"),
        ({"image_format": "gif"}, "image_format: got 'gif'"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"extra_body": [1]}, "extra_body: got"),
        ({"api_key_env": "sk-secret"}, "api_key_env: give the name"),
    ],
)
def test_settings_that_cannot_be_used(settings, told):
    with pytest.raises(ValueError, match=rf"^reward\.judge\.{told}"):
        JudgeConfig(**settings)


def test_a_question_may_be_given_by_its_parser_alone():
    assert JudgeConfig(questions="ocr").questions == [JudgeQuestion(parser="ocr", name="ocr")]
    assert JudgeConfig(questions=({"question": "Why?"},)).questions[0].words == "Why?"
