"""The reward of a server: the server's scores in order, and whatever else a server does is an error."""

import base64
import io
import json
import os
import pickle
import socket

import numpy as np
import pytest
from PIL import Image
from reward_files import build, function, write
from reward_server import IMAGES, METADATA, PROMPTS, serving
from stub_server import Reply, StubServer

from flowgrpo_rc.cli.compose import compose, to_yaml
from flowgrpo_rc.rewards import RewardConfig, RewardError, build_reward
from flowgrpo_rc.rewards.mix import build_observers
from flowgrpo_rc.rewards.registry import REWARDS

REDNESS = function("""
    red, green, blue = np.moveaxis(images.astype(np.float64), -1, 0) / 255
    info = {"text": prompts, "row": [row.get("row") for row in metadata]}
    return (red - (green + blue) / 2).mean(axis=(1, 2)), info
""")
MANY = np.random.default_rng(2).integers(0, 256, (10, 8, 6, 3), dtype=np.uint8)
MANY_PROMPTS = [f"p{n}" for n in range(10)]
MANY_ROWS = [{"row": n, "nested": {"list": [n, None, "ä"]}} for n in range(10)]


def remote(url, **options):
    """The reward of the server at ``url`` alone, which is asked once."""
    sections = {"far": {"url": url, "tries": 1, **options}}
    return build_reward(RewardConfig(functions={"far": 1.0}, remote=sections, timeout_s=60.0))


def answers(content, protocol="json"):
    """A server that answers everything with this."""
    body = content
    if not isinstance(content, bytes):
        body = json.dumps(content).encode() if protocol == "json" else pickle.dumps(content)
    return StubServer(lambda call: Reply(body))


# ---------------------------------------------------------------------- what is right


@pytest.mark.parametrize(("batch_size", "max_concurrent"), [(1, 4), (3, 1), (64, 2)])
def test_scores_are_the_local_functions_to_the_digit_however_they_are_split(tmp_path, batch_size, max_concurrent):
    path = write(tmp_path, REDNESS)
    local = build(path)(MANY, MANY_PROMPTS, MANY_ROWS)
    with serving(path) as server:
        result = remote(server.url, batch_size=batch_size, max_concurrent=max_concurrent)(MANY, MANY_PROMPTS, MANY_ROWS)
        assert server.requests == -(-10 // batch_size)
    assert result.parts["far"].tobytes() == local.parts["f"].tobytes()
    assert result.info["far"] == local.info["f"]
    assert result.texts == MANY_PROMPTS


def test_verl_omnis_protocol_sends_jpeg_and_reads_pickles(tmp_path):
    """Sent as PNG, the scores are the local function's; as JPEG they are those of the changed pixels."""
    path = write(tmp_path, REDNESS)
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(buffer, "JPEG")
    changed = np.asarray(Image.open(buffer))[None]
    local = build(path)
    with serving(path, "verl_omni") as server:
        as_png = remote(server.url, protocol="verl_omni", image_format="png")(IMAGES, PROMPTS, METADATA)
        as_jpeg = remote(server.url, protocol="verl_omni")(IMAGES[:1], ["a"])
    assert as_png.parts["far"].tobytes() == local(IMAGES, PROMPTS).parts["f"].tobytes()
    assert as_jpeg.parts["far"].tobytes() == local(changed, ["a"]).parts["f"].tobytes()
    assert as_jpeg.parts["far"][0] != as_png.parts["far"][0]


def test_flow_grpos_geneval_server():
    """As ``app_geneval.py`` of its reward server answers: a plain pickle of what it computed of rows and JPEGs."""

    def answer(call):
        content = pickle.loads(call.body)
        sizes = [Image.open(io.BytesIO(data), formats=["jpeg"]).size for data in content["images"]]
        assert set(sizes) == {(6, 8)}
        assert content["only_strict"] is True
        rows = content["meta_datas"]
        counts = [row["include"][0]["count"] for row in rows]
        scores = [1 / count for count in counts]
        strict = [float(score == 1) for score in scores]
        groups = {"counting": [s if row["tag"] == "counting" else -10.0 for s, row in zip(strict, rows, strict=True)]}
        answered = {"scores": scores, "rewards": [0.0] * len(scores), "strict_rewards": np.float64(strict)}
        return Reply(pickle.dumps({**answered, "group_rewards": groups, "group_strict_rewards": groups}))

    rows = [
        {"tag": "counting" if n % 2 else "colors", "include": [{"class": "dog", "count": n + 1}]} for n in range(10)
    ]
    with StubServer(answer) as server:
        result = remote(server.url, protocol="flow_grpo", batch_size=4)(MANY, MANY_PROMPTS, rows)
    assert len(server.calls) == 3
    np.testing.assert_array_equal(result.total, np.float32([1 / n for n in range(1, 11)]))
    assert result.info["far"]["strict_accuracy"] == [1.0] + [0.0] * 9
    assert result.info["far"]["counting_strict_accuracy"] == [-10.0, 0.0] * 5


# ---------------------------------------------------------------------- what is wrong

WRONG_ANSWERS = {
    "too few": ({"scores": [1.0, 2.0]}, r"scores of shape \(2,\), expected \(3,\)"),
    "a number": ({"scores": 1.0}, "no list under 'scores'"),
    "texts": ({"scores": ["1.0", "2.0", "3.0"]}, "entry 0 is str '1.0'"),
    "NaN": (b'{"scores": [1.0, NaN, 2.0]}', "what was sent is not JSON .it holds NaN"),
    "infinity": (
        b'{"scores": [1.0, 1e999, 2.0]}',
        "1 non-finite of 3 scores; the first is inf for sample 1, prompt 'b'",
    ),
    "beyond float32": ({"scores": [1.0, 1e39, 2.0]}, "beyond float32's largest number"),
    "a list": ([1.0, 2.0, 3.0], "the answer is a list, where a mapping is expected"),
    "an error": ({"error": "CUDA out of memory"}, "CUDA out of memory"),
    "another key": ({"score": [1.0, 2.0, 3.0]}, "no list under 'scores'; there is 'score'"),
    "info of another length": ({"scores": [1, 2, 3], "info": {"x": [1]}}, "info.'x'. with 1 entries for 3 images"),
    "info that is none": ({"scores": [1, 2, 3], "info": [1]}, "the answer's info is a list"),
    "deep JSON": (b'{"scores": ' + b"[" * 100_000, "what was sent is not JSON"),
    "a pickle": (pickle.dumps({"scores": [1.0, 2.0, 3.0]}), "what was sent is not JSON"),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_a_wrong_answer_is_an_error_that_names_the_server(case):
    content, message = WRONG_ANSWERS[case]
    with answers(content) as server, pytest.raises(RewardError, match=message) as caught:
        remote(server.url)(IMAGES, PROMPTS)
    assert str(caught.value).startswith(f"{server.url}: reward.remote.far, images 0 to 2: ")
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


def test_two_wrong_lengths_do_not_make_a_right_one():
    """Of two batches of two, one is answered with one score and the other with three."""
    with (
        StubServer(lambda call: Reply({"scores": [1.0] * (1 if call.json()["prompts"][0] == "p0" else 3)})) as server,
        pytest.raises(RewardError, match=r"images 0 to 1: .* shape \(1,\), expected \(2,\)"),
    ):
        remote(server.url, batch_size=2)(MANY[:4], MANY_PROMPTS[:4])


@pytest.mark.parametrize("protocol", ["verl_omni", "flow_grpo"])
def test_wrong_pickles_are_errors_too(protocol):
    key = "scores" if protocol == "verl_omni" else "outputs"
    for content, message in (
        ({key: [1.0, float("nan"), 2.0]}, "1 non-finite of 3 scores"),
        ({key: np.array([1.0, 2.0])}, r"shape \(2,\), expected \(3,\)"),
        ({"other": [1.0]}, f"no list under '{key}'"),
        ([1.0, 2.0, 3.0], "the answer is a list"),
        (pickle.dumps({key: [1.0, 2.0, 3.0]})[:-4], "damaged"),
        (pickle.dumps({key: os.getcwd}), r"names (posix|nt).getcwd, which is not loaded"),
    ):
        with answers(content, protocol) as server, pytest.raises(RewardError, match=message):
            remote(server.url, protocol=protocol)(IMAGES, PROMPTS)


# ---------------------------------------------------------------------- before training


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_server_that_is_not_there_is_named_before_training():
    url = f"http://127.0.0.1:{free_port()}"
    match = rf"^reward\.remote\.far\.url: the server does not score a grey image .*: {url}: .*ConnectError"
    with pytest.raises(ValueError, match=match):
        remote(url).check_prompts(["a prompt"], image_size=(8, 8), metadata=[{}])


def test_the_first_prompt_is_asked_with_its_columns_and_size():
    with answers({"scores": [0.5]}) as server:
        remote(server.url).check_prompts(PROMPTS, image_size=(16, 24), metadata=METADATA)
    (call,) = server.calls
    sent = call.json()
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(sent["images"][0]))))
    assert (sent["prompts"], sent["metadata"], image.shape) == (["a"], [METADATA[0]], (16, 24, 3))
    assert (image == 128).all()


@pytest.mark.parametrize(
    ("columns", "rows", "told"),
    [
        (
            None,
            [{}, {"y": 1, "x": b"bytes"}],
            r"train.jsonl:2: the column 'x' cannot be sent to the server: this cannot be written as JSON \(Object of "
            r"type bytes is not JSON serializable\); leave it out by naming in reward\.remote\.far\.columns those that",
        ),
        (["tags"], [{"tag": 1, "include": 2}] * 2, r"reward\.remote\.far\.columns: no prompt has a column 'tags'; "),
    ],
)
def test_rows_that_cannot_be_sent_are_named_with_what_to_do(columns, rows, told):
    with answers({"scores": [0.5]}) as server, pytest.raises(ValueError, match=f"^{told}"):
        remote(server.url, columns=columns).check_prompts(
            ["a", "b"], sources=["train.jsonl:1", "train.jsonl:2"], metadata=rows
        )
    assert not server.calls


@pytest.mark.parametrize(("columns", "sent"), [(["tag"], [{"tag": "counting"}, {}]), ([], [{}, {}])])
def test_only_the_columns_that_are_named_are_sent(columns, sent):
    rows = [{"tag": "counting", "images": b"bytes"}, {"images": b"bytes"}]
    with answers({"scores": [0.5]}) as server:
        reward = remote(server.url, columns=columns, batch_size=1, max_concurrent=1)
        reward.check_prompts(PROMPTS[:2], metadata=rows)
        reward(IMAGES[:2], PROMPTS[:2], rows)
    assert [call.json()["metadata"] for call in server.calls] == [[sent[0]], [sent[0]], [sent[1]]]


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        ({"far": {}}, "far.url: is not given"),
        ({"far": {"url": "127.0.0.1:80"}}, "far.url: got '127.0.0.1:80'"),
        ({"far": {"url": "http://h", "protocol": "grpc"}}, "far.protocol: got 'grpc'; choose one of json, verl"),
        ({"far": {"url": "http://h", "batch_size": 0}}, "far.batch_size: got 0"),
        ({"far": {"url": "http://h", "api_key_env": "sk-123"}}, "far.api_key_env: give the name of an environ"),
        ({"far": {"url": "http://h", "urls": 1}}, "far: has no key urls; nearest: url; its keys are"),
        ({"far": "http://h"}, "far: got 'http://h'; give a RemoteConfig or a mapping"),
        ({"ocr": {"url": "http://h"}}, "ocr: another reward is called 'ocr' too"),
        ({"mean": {"url": "http://h"}}, "mean: got 'mean', but the run logs reward/mean"),
    ],
)
def test_wrong_settings_are_refused_by_name(remote, message):
    with pytest.raises(ValueError, match=rf"^reward\.remote\.{message}"):
        RewardConfig(functions={"far": 1.0}, remote=remote)


def test_sections_of_servers_have_names_which_messages_list():
    with pytest.raises(ValueError, match=r"^reward.remote: got 'http"):
        RewardConfig(remote="http://h")
    with pytest.raises(ValueError, match=rf"'near' is not a known reward; known are {', '.join([*REWARDS, 'far'])}"):
        RewardConfig(functions={"near": 1.0}, remote={"far": {"url": "http://h"}})


def test_overrides_name_a_server_and_the_whole_section_is_recorded():
    url = "http://127.0.0.1:18085"
    overrides = [f"reward.remote.geneval.url={url}", "reward.remote.geneval.protocol=flow_grpo"]
    config = compose("tiny_qwen_image_ocr", [*overrides, "reward.functions={geneval: 1.0}"])
    assert config.reward.weights() == {"geneval": 1.0}
    recorded = to_yaml(config)
    assert f"geneval:\n      url: {url}\n      protocol: flow_grpo\n      batch_size: 64\n" in recorded
    again = RewardConfig(**config.to_dict()["reward"])
    assert again.remote["geneval"] == config.reward.remote["geneval"]


# ---------------------------------------------------------------------- secrets


def test_a_served_reward_asks_for_the_key_that_the_client_brings(tmp_path, monkeypatch):
    path = write(tmp_path, REDNESS)
    with serving(path, key="sk-very-secret") as server:
        with pytest.raises(RewardError, match=r"answers 401: .*Authorization .Bearer KEY. is missing or wrong"):
            remote(server.url)(IMAGES, PROMPTS)
        monkeypatch.setenv("SCORER_KEY", "sk-very-secret")
        result = remote(server.url, api_key_env="SCORER_KEY")(IMAGES, PROMPTS)
    assert result.total.tobytes() == build(path)(IMAGES, PROMPTS).total.tobytes()


def test_a_server_may_only_look_and_shares_no_name(tmp_path):
    with answers({"scores": [1, 2, 3]}) as server:
        config = RewardConfig(
            functions={"jpeg_compressibility": 1.0}, remote={"far": {"url": server.url}}, val_functions={"far": True}
        )
        looked = build_observers(config)(IMAGES, PROMPTS)
    np.testing.assert_array_equal(looked.parts["far"], [1, 2, 3])
    entry = {"path": str(write(tmp_path, REDNESS)), "name": "f"}
    with pytest.raises(ValueError, match=r"^reward.reward_functions.far: another reward is called 'far' too"):
        RewardConfig(remote={"far": {"url": "http://127.0.0.1:9"}}, reward_functions={"far": entry})
