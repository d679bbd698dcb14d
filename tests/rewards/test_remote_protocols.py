"""The three protocols: what is written can be read, and is what the servers and clients of others expect."""

import base64
import io
import json
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from reward_server import IMAGES, METADATA, PROMPTS

from flowgrpo_rc.rewards.remote.protocols import PROTOCOLS, SERVED, ProtocolError, Request, decode, encode

FILES = [encode(image, "png") for image in IMAGES]
REQUEST = Request(files=FILES, prompts=PROMPTS, metadata=METADATA)


def test_requests_are_what_the_servers_read():
    """DeQA reads the images, UnifiedReward the prompts too, GenEval the rows, which hold their prompt in its files."""
    content = json.loads(PROTOCOLS["json"].write_request(REQUEST))
    assert (content["prompts"], content["metadata"]) == (PROMPTS, METADATA)
    for text, image in zip(content["images"], IMAGES, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))), image)
    plain = {"images": FILES, "prompts": PROMPTS}
    assert pickle.loads(PROTOCOLS["verl_omni"].write_request(REQUEST)) == {**plain, "metadata": {}}
    rows = [{"prompt": p, **row} for p, row in zip(PROMPTS, METADATA, strict=True)]
    found = pickle.loads(PROTOCOLS["flow_grpo"].write_request(REQUEST))
    assert found == {**plain, "meta_datas": rows, "only_strict": True}


@pytest.mark.parametrize("name", SERVED)
def test_a_request_comes_back(name):
    read = SERVED[name].read_request(SERVED[name].write_request(REQUEST))
    assert (read.files, read.prompts) == (FILES, PROMPTS)
    assert read.metadata == (METADATA if name == "json" else [{}, {}, {}])


@pytest.mark.parametrize("name", SERVED)
def test_scores_come_back_to_the_digit(name):
    scores = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    scores[:3] = [np.finfo(np.float32).max, 1e-45, -0.0]
    read, _ = SERVED[name].read_answer(SERVED[name].write_answer((scores, {})))
    assert np.asarray(read, np.float32).tobytes() == scores.tobytes()


def test_info_comes_back_as_json_has_it():
    info = {"text": ["a", "ä"], "x": [np.float32(0.5), np.nan], "y": [np.arange(2), {"z": (1, None)}], "w": [{1}, b"q"]}
    _, read = SERVED["json"].read_answer(SERVED["json"].write_answer(([0.0, 0.0], info)))
    assert read == {"text": ["a", "ä"], "x": [0.5, None], "y": [[0, 1], {"z": [1, None]}], "w": ["{1}", "b'q'"]}


@pytest.mark.parametrize("name", SERVED)
def test_a_refusal_brings_the_servers_words(name):
    with pytest.raises(ProtocolError, match="no GPU left"):
        SERVED[name].read_answer(SERVED[name].write_error("no GPU left"))


def test_flow_grpos_answers():
    """Its GenEval server's, with the parts of a score: `test_flow_grpos_geneval_server`."""
    answer = pickle.dumps({"outputs": [0.5, 0.25]})
    assert PROTOCOLS["flow_grpo"].read_answer(answer) == ([0.5, 0.25], {})


WRONG_REQUESTS = {
    b"": "not JSON",
    b'{"images": ["YQ=="], "prompts": ["a"], "metadata": [{"x": NaN}]}': "not JSON .it holds NaN",
    b"[]": "the request is a list",
    b"{}": "no list under 'images'; there is no key",
    b'{"images": [5], "prompts": ["a"]}': r"images\[0\] is not base64",
    b'{"images": ["a b"], "prompts": ["a"]}': r"images\[0\] is not base64",
    b'{"images": ["YQ=="], "prompts": [5]}': "prompts must be a list of texts",
    b'{"images": ["YQ=="], "prompts": ["a", "b"]}': "1 images, 2 prompts and 1 rows",
    b'{"images": ["YQ=="], "prompts": ["a"], "metadata": ["x"]}': "metadata must be a list of objects",
}


@pytest.mark.parametrize("body", WRONG_REQUESTS)
def test_wrong_requests_are_refused_in_words(body):
    with pytest.raises(ValueError, match=WRONG_REQUESTS[body]):
        SERVED["json"].read_request(body)


def test_metadata_that_json_cannot_hold_is_refused():
    for value in (object(), float("nan"), b"bytes"):
        with pytest.raises(ProtocolError, match="cannot be written as JSON"):
            SERVED["json"].write_request(Request(files=[], prompts=[], metadata=[{"x": value}]))


def test_images_come_back_to_the_pixel_as_png_and_nearly_as_jpeg():
    np.testing.assert_array_equal(decode(FILES), IMAGES)
    smooth = np.tile(np.linspace(0, 255, 32).astype(np.uint8)[:, None, None], (1, 24, 3))
    jpeg = encode(smooth, "jpeg")
    assert decode([jpeg]).shape == (1, 32, 24, 3)
    assert np.abs(decode([jpeg])[0].astype(int) - smooth).max() < 16


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_images_of_other_kinds_are_read_as_rgb(mode):
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[0]).convert(mode).save(buffer, "PNG")
    expected = np.asarray(Image.fromarray(IMAGES[0]).convert(mode).convert("RGB"))
    np.testing.assert_array_equal(decode([buffer.getvalue()])[0], expected)


def png_of(width, height):
    """A small file that says it is large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "there are no images"),
        ([b"hello"], "image 0 is no PNG or JPEG"),
        ([FILES[0], FILES[0][:40]], "image 1 is (damaged|no PNG)"),
        ([FILES[0], encode(IMAGES[0][:4], "png")], "differ in size .6 x 4, 6 x 8."),
        ([b"GIF89a" + b"\0" * 20], "image 0 is no PNG or JPEG"),
        ([png_of(9_000, 9_000)] * 4, "4 images of 9000 x 9000 pixels are more than"),
        ([png_of(60_000, 60_000)], "image 0 is no PNG or JPEG file .*DecompressionBomb"),
    ],
)
def test_images_that_cannot_be_read_are_refused_in_words(files, message):
    with pytest.raises(ValueError, match=message):
        decode(files)
