"""The reward ``judge`` against a judge on loopback that answers rightly, wrongly, or as no server should."""

import io
import math

import numpy as np
import pytest
from fake_judge import MODEL, FakeJudge, number_of, numbered, said
from PIL import Image
from stub_server import Reply, StubServer

from flowgrpo_rc.prompt import ReferenceImage, content_digest
from flowgrpo_rc.rewards import RewardError

BLANK = 255
"""The pixels of the image before training."""

WANTED = np.float32([(n % 11) / 10 for n in range(64)])
"""The score that ``by_number`` gives ``numbered(64)``."""


def by_number(asked):
    """Reasons, and the last digits of the image's number as a score of 10."""
    return f"Well. <Score>{number_of(asked.image) % 11 if asked.image[0, 0, 2] != BLANK else 5}</Score>"


TEN = ({"parser": "score", "scale": 10},)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("flowgrpo_rc.rewards.http_client.LONGEST_BACKOFF_S", 0.01)


def prompts(count=64):
    return [f'a sign that says "{n}"' for n in range(count)]


def after_start(count, do):
    """A judge that does as ``by_number``, and from its call ``count`` after those before training ``do(asked)``."""

    def judge(asked):
        number = asked.call.number - 2  # its models, and the blank image
        return do(asked) if number >= count else by_number(asked)

    return judge


# ---------------------------------------------------------------- right answers


def test_scores_are_in_order():
    with FakeJudge(by_number) as server:
        result = server.reward(TEN, max_concurrent=8)(numbered(64), prompts())
    np.testing.assert_array_equal(result.total, WANTED)


def test_what_is_sent():
    images = np.random.default_rng(0).integers(0, 256, (1, 12, 20, 3), np.uint8)
    settings = {"temperature": 0.5, "seed": 7, "max_tokens": 99, "extra_body": {"top_p": 0.8}}
    with FakeJudge(by_number) as server:
        server.reward(TEN, **settings)(images, ['a "{prompt}"'])
    request = server.asked[-1].request
    np.testing.assert_array_equal(server.asked[-1].image, images[0])
    assert 'Caption: a "{prompt}"' in server.asked[-1].words
    assert {key: value for key, value in request.items() if key != "messages"} == {
        "model": MODEL,
        "temperature": 0.5,
        "seed": 7,
        "max_tokens": 99,
        "top_p": 0.8,
    }


@pytest.mark.parametrize(("size", "shape"), [(None, (12, 20, 3)), (10, (6, 10, 3)), (40, (24, 40, 3))])
def test_images_are_resized_by_their_longest_side(size, shape):
    grey = np.full((1, 12, 20, 3), 77, np.uint8)
    with FakeJudge(by_number) as server:
        server.reward(image_size=size, image_format="jpeg")(grey, ["a"])
    assert server.asked[-1].image.shape == shape
    assert np.abs(server.asked[-1].image.astype(int) - 77).max() <= 2


def test_the_probability_of_yes():
    def judge(asked):
        yes = 0.1 * (1 + number_of(asked.image) % 8)
        tokens = {"Yes": math.log(yes / 2), " yes": math.log(yes / 2), "No": math.log(0.9 - yes / 2)}
        return said("Yes", tokens, finish_reason="length")  # one token is all that is asked for

    with FakeJudge(judge) as server:
        total = server.reward(["yes_no"])(numbered(8), prompts(8)).total
    yes = 0.1 * np.arange(1, 9)
    np.testing.assert_allclose(total, yes / (yes + 0.9 - yes / 2), rtol=1e-6)
    request = server.asked[-1].request
    assert (request["logprobs"], request["top_logprobs"], request["max_tokens"]) == (True, 20, 1)


def test_transcripts_against_the_targets_of_the_prompt_file():
    """The row's ground truth before the quoted text; the transcripts caption the samples."""
    texts = {0: "says 0!", 1: "one", 2: "3"}
    with FakeJudge(lambda asked: texts.get(number_of(asked.image), "x")) as server:
        reward = server.reward(["ocr"])
        rows = [{}, {"reward_model": {"ground_truth": "one two"}}, {}]
        result = reward(numbered(3), prompts(3), rows)
        # "one" against "onetwo": three letters are missing of six.
        np.testing.assert_array_equal(result.total, np.float32([1.0, 0.5, 0.0]))
        assert result.texts == ["says 0!", "one", "3"]
        reward.check_prompts(["no quotes"], sources=["p:1"], metadata=[{"ground_truth": "x"}])
        with pytest.raises(ValueError, match="^p:1: 'no quotes' has no text in double quotes and no column"):
            reward.check_prompts(["no quotes"], sources=["p:1"], metadata=[{}])


@pytest.mark.parametrize(("mean", "wanted"), [("arithmetic", [0.25, 0.4]), ("geometric", [0.0, 0.4])])
def test_several_questions(mean, wanted):
    """Weights 3 and 1: (3 x 0 + 1) / 4 and (3 x 0.4 + 0.4) / 4; each question's own scores are logged."""

    def judge(asked):
        first = [0, 2][number_of(asked.image) % 2]
        second = [5, 2][number_of(asked.image) % 2]
        return f"<Score>{first if asked.words == 'Is it a?' else second}</Score>"

    questions = [
        {"parser": "score", "question": "Is it {prompt}?", "name": "what", "weight": 3.0},
        {"parser": "score", "question": "Is it fine?", "name": "looks"},
    ]
    with FakeJudge(judge) as server:
        result = server.reward(questions, mean=mean)(numbered(2), ["a", "a"])
    np.testing.assert_allclose(result.total, wanted, rtol=1e-6)
    assert result.inner_parts.keys() == {"judge/what", "judge/looks"}
    np.testing.assert_allclose(result.inner_parts["judge/what"], [0.0, 0.4])
    np.testing.assert_allclose(result.inner_parts["judge/looks"], [1.0, 0.4])


@pytest.mark.parametrize(("cache", "calls"), [(False, 12), (True, 4)])
def test_what_the_cache_saves(cache, calls):
    """Four different images, two of them twice, in two batches."""
    images = numbered(4)[[0, 1, 2, 3, 0, 1]]
    with FakeJudge(by_number) as server:
        reward = server.reward(TEN, cache=cache)
        before = len(server.asked)
        first = reward(images, prompts(1) * 6).total
        np.testing.assert_array_equal(reward(images, prompts(1) * 6).total, first)
        assert len(server.asked) - before == calls
        reward(images, prompts(2)[1:] * 6)  # another prompt is another question
        assert len(server.asked) - before == (18 if not cache else 8)
    np.testing.assert_array_equal(first, np.float32([0, 0.1, 0.2, 0.3, 0, 0.1]))


EDIT = {"parser": "score", "scale": 10, "question": "The last is an edit: {prompt}. Give a score.", "references": True}


def picture(shade, size=(12, 6)):
    """A reference image in memory."""
    file = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(file, format="PNG")
    return ReferenceImage(content_digest(file.getvalue()), *size, "p:1", content=file.getvalue())


def test_a_question_shows_the_references_before_the_image():
    """Two of them before each image, and none in the question that does not ask for them."""
    plain = {"parser": "score", "scale": 10, "name": "looks"}
    rows = [{"images": [picture(10), picture(20)]}, {"images": [picture(30), picture(20)]}]
    with FakeJudge(by_number) as server:
        result = server.reward([EDIT, plain], image_size=6)(numbered(2), ["a", "b"], rows)
        asked = server.asked[2:]
    assert sorted(len(one.references) for one in server.asked[:2]) == [0, 1]  # a blank one, before training
    assert result.inner_parts.keys() == {"judge/score", "judge/looks"}
    found = {(one.words.partition("\n")[0], *(int(shown[0, 0, 0]) for shown in one.references)) for one in asked}
    assert {one for one in found if len(one) > 1} == {
        ("The last is an edit: a. Give a score.", 10, 20),
        ("The last is an edit: b. Give a score.", 30, 20),
    }
    assert len(asked) == 4
    assert sum(not one.references for one in asked) == 2
    assert {one.references[0].shape for one in asked if one.references} == {(3, 6, 3)}  # resized like the image


def test_the_cache_knows_an_image_by_its_references_too():
    with FakeJudge(by_number) as server:
        reward = server.reward([EDIT], cache=True)
        with pytest.raises(ValueError, match=r"^p:1 has no reference images, which the judge's question 'score' shows"):
            reward.check_prompts(["a"], sources=["p:1"], metadata=[{}])
        before = len(server.asked)
        for shade in (10, 10, 20):
            reward(numbered(1), ["a"], [{"images": [picture(shade)]}])
        assert len(server.asked) - before == 2


# ---------------------------------------------------------------- answers that cannot be read


def test_an_answer_that_cannot_be_read_is_asked_again():
    def judge(asked):
        if number_of(asked.image) % 3 == 0 and not asked.again:
            return "I would say four of five."
        return by_number(asked)

    with FakeJudge(judge) as server:
        total = server.reward(TEN)(numbered(9), prompts(9)).total
    np.testing.assert_array_equal(total, WANTED[:9])
    again = [asked for asked in server.asked if asked.again and asked.image.shape == (8, 8, 3)]
    assert sorted(number_of(asked.image) for asked in again) == [0, 3, 6]
    roles = [message["role"] for message in again[0].request["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert again[0].request["messages"][1]["content"] == "I would say four of five."
    assert "<Score>X</Score>" in again[0].words


def test_and_then_it_is_an_error_that_names_prompt_and_answer():
    with FakeJudge(after_start(1, lambda asked: "I cannot\nsay.")) as server:
        reward = server.reward(TEN)
        with pytest.raises(
            RewardError,
            match=rf"^{MODEL} at {server.url}/v1 gave no answer that the parser 'score' can read, asked twice, for "
            r"sample 0, prompt 'a sign that says \"0\"', question 'score': it holds no <Score>x</Score>; it said "
            r"'I cannot\\nsay.'$",
        ):
            reward(numbered(2), prompts(2))
    assert len(server.calls) == 2 + 4


CUT_OFF = {
    "no text": said(None, finish_reason="length"),
    "refused": said("", finish_reason="content_filter"),
    "thoughts": said("<think>I see 0, but"),
    "half": said("a sign that <Score>5</Score> 0", finish_reason="length"),
}


@pytest.mark.parametrize("parser", ["ocr", "score"])
@pytest.mark.parametrize("kind", CUT_OFF)
def test_an_answer_that_is_cut_off_is_asked_again_and_never_scored(parser, kind):
    """Not even by ``ocr``, whose answers have no form: the transcript of nothing would be a 0."""
    whole = {"ocr": "0", "score": "<Score>5</Score>"}[parser]

    def judge(asked):
        number = number_of(asked.image)
        blank = asked.image[0, 0, 2] == BLANK
        return CUT_OFF[kind] if not blank and (number == 1 or not asked.again) else whole

    with FakeJudge(judge) as server:
        reward = server.reward([parser])
        np.testing.assert_array_equal(reward(numbered(1), prompts(1)).total, np.float32([1.0]))
        with pytest.raises(RewardError, match=r"asked twice, for sample 1, .*: it was refused, or cut off at its"):
            reward(numbered(2), prompts(2))


def test_a_server_without_log_probabilities():
    with FakeJudge(lambda asked: "Yes") as server, pytest.raises(ValueError, match="'yes_no' reads; use a server that"):
        server.reward(["yes_no"])


# ---------------------------------------------------------------- before training


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"base_url": None}, r"base_url: null, so there is no server to ask; give"),
        ({"questions": []}, r"questions: none, so there is nothing to ask"),
        ({"model": "gpt"}, rf"model: the server http.* has no model 'gpt'; it has {MODEL}"),
        ({"questions": [{"references": True}]}, "questions.references: got true without a question; give one that"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "api_key_env: the environment variable that it names is not set"),
    ],
)
def test_what_is_wrong_is_told_before_training(settings, told):
    with FakeJudge(by_number) as server, pytest.raises(ValueError, match=rf"^reward\.judge\.{told}"):
        server.reward(**settings)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply("key!", status=401), 'its models: answers 401: "key!"'),
        (Reply(status=503), r"its models: answers 503 \(tried 2 times\)"),
        (Reply(said("<Score>1</Score>")), "its models: answers with no list of models"),
    ],
)
def test_a_server_of_another_kind(reply, told):
    with (
        StubServer(lambda call: reply) as server,
        pytest.raises(ValueError, match=rf"^reward\.judge: http.*{told}") as caught,
    ):
        FakeJudge.reward(server)
    assert "\n" not in str(caught.value)


def test_the_deadline_of_a_batch_covers_what_is_asked_again():
    def judge(asked):
        return Reply(said("<Score>1</Score>"), after_s=60) if asked.again else "no score"

    with FakeJudge(after_start(1, judge)) as server:
        reward = server.reward(TEN, deadline_s=0.6)
        with pytest.raises(RewardError, match=r"0 of 2 requests were answered within reward\.judge\.deadline_s=0.6 s"):
            reward(numbered(2), prompts(2))
