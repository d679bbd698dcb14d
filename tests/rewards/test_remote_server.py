"""The reward server: what it answers, what it refuses, and how it ends."""

import http.client
import json
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from reward_files import function, write
from reward_server import IMAGES, METADATA, PROMPTS, exchange, post, request_body, serving
from tests_support import wait_until

from flowgrpo_rc import __version__
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rewards import RewardConfig, ScorerConfig, build_reward
from flowgrpo_rc.rewards.remote import server as module
from flowgrpo_rc.rewards.remote.protocols import decode, encode

BRIGHTNESS = function("return images.mean(axis=(1, 2, 3)) / 255, {'tag': [row.get('tag') for row in metadata]}")

HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"


def test_verl_omnis_client_is_answered(tmp_path):
    """Its request for one image, as ``http_scorer_client`` writes it; its JPEG is decoded as PIL does."""
    jpeg = encode(IMAGES[0], "jpeg")
    body = pickle.dumps({"images": [jpeg], "prompts": ["a"], "metadata": {}})
    with serving(write(tmp_path, BRIGHTNESS), "verl_omni") as server:
        status, answer = post(server, body)
        wrong_status, wrong = post(server, request_body("json"))
    assert (status, pickle.loads(answer)) == (200, {"scores": [np.float32(decode([jpeg]).mean() / 255)]})
    assert wrong_status == 400
    assert "no pickle" in pickle.loads(wrong)["error"] or "does not need" in pickle.loads(wrong)["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('gone')", "reward function 'f' raised KeyError: 'gone' at .*mine.py:6, in f"),
        ("sys.exit(0)", "raised SystemExit: 0"),
        ("return [1.0]", r"scores of shape \(1,\), expected \(3,\)"),
    ],
)
def test_a_function_that_fails_is_an_error_and_the_server_goes_on(tmp_path, body, message):
    source = function(f"if prompts[0] == 'a':\n    {body}\nreturn np.ones(len(images))")
    with serving(write(tmp_path, source), timeout_s=0.5) as server:
        status, answer = post(server, request_body())
        again, _ = post(server, request_body(prompts=["x", "y", "z"]))
    assert status == 500
    assert re.search(message, json.loads(answer)["error"])
    assert again == 200


def test_wrong_requests_are_refused_and_the_connection_goes_on(tmp_path):
    expected = {"status": "ok", "function": "f", "version": __version__, "requests": 1, "images": 3, "waiting": 0}
    with serving(write(tmp_path, BRIGHTNESS)) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        for body, status in ((b"{", 400), (request_body(), 200), (request_body(prompts=["a"]), 400)):
            connection.request("POST", "/", body)
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == status
            assert ("error" in answer) == (status == 400)
        connection.close()
        status, body = exchange(server, "GET", "/health")
        assert (status, json.loads(body)) == (200, expected)
        assert exchange(server, "GET", "/secrets")[0] == 404
        assert exchange(server, "DELETE", "/health")[0] == 405


def test_requests_that_are_too_large_or_have_no_length_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_REQUEST", 1000)
    with serving(write(tmp_path, BRIGHTNESS)) as server:
        # More than the sockets buffer: the server has answered before the client has sent all of it.
        status, answer = post(server, b"x" * 20_000_000)
        assert (status, "20000000 bytes" in json.loads(answer)["error"]) == (413, True)
        status, answer = post(server, iter([b"x"]))  # chunked
        assert (status, "Content-Length" in json.loads(answer)["error"]) == (411, True)


def test_two_requests_are_decoded_at_once_at_most(tmp_path, monkeypatch):
    """Eight clients at once: one is scored, the next one is ready, and everyone gets the scores of its own images."""
    decoded, answers = [], {}

    def noting(files):
        decoded.append(server.requests)
        return decode(files)

    def ask(value):
        images = np.full((2, 8, 8, 3), value, np.uint8)
        answers[value] = json.loads(post(server, request_body("json", images, ["a"] * 2, [{}] * 2))[1])["scores"]

    monkeypatch.setattr(module, "decode", noting)
    calls = "global inside\ninside += 1\nassert inside == 1\ntime.sleep(0.02)\ninside -= 1"
    source = function(f"{calls}\nreturn images.mean((1, 2, 3))")
    with serving(write(tmp_path, f"inside = 0\n{source}")) as server:
        threads = [threading.Thread(target=ask, args=[value]) for value in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {value: [value, value] for value in range(8)}
    # The request number n is decoded when n - 1 have been scored.
    assert len(decoded) == 8
    assert all(scored >= number - 1 for number, scored in enumerate(decoded))


def test_a_function_of_torch_tensors_is_refused_where_torch_is_not(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, "def f(solution_image):\n    return 1.0")
    path.write_text(path.read_text().replace("import torch\n", ""))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["serve-reward", "--path", str(path), "--name", "f"]) == 2
    told = "error: --name: 'f' takes its image as a torch tensor, and torch is not installed here"
    assert told in capsys.readouterr().err


def test_a_key_is_asked_for_and_never_logged(tmp_path, capfd):
    with serving(write(tmp_path, BRIGHTNESS), key="s3cret") as server:
        answers = [
            post(server, request_body())[0],
            post(server, request_body(), Authorization="Bearer wr0ng")[0],
            post(server, request_body(), Authorization="Bearer s3cret")[0],
            exchange(server, "POST", "/?key=s3cret", request_body(), {"Authorization": "Bearer s3cret"})[0],
        ]
    assert answers == [401, 401, 200, 200]
    logged = capfd.readouterr().err
    assert "s3cret" not in logged
    assert "wr0ng" not in logged
    assert logged.count(" 200 ") == 2


def test_too_many_waiting_requests_are_sent_away_and_abandoned_ones_not_scored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    gate = function("while not os.path.exists('open'): time.sleep(0.01)\nreturn [1.0] * len(images)")
    body = request_body()
    with serving(write(tmp_path, gate)) as server:
        first = threading.Thread(target=post, args=[server, body])
        first.start()
        wait_until(lambda: server.health()["waiting"] == 1)
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as impatient:
            impatient.sendall(HEAD % len(body) + body[:-1])
            wait_until(lambda: server.health()["waiting"] == 2)
            status, answer = post(server, body)
        Path("open").touch()
        first.join()
        assert (status, "ask again" in json.loads(answer)["error"]) == (503, True)
        wait_until(lambda: server.health()["waiting"] == 0)
        post(server, body)
        assert server.requests == 2


# ---------------------------------------------------------------------- the command

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
before = set(sys.modules)
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rewards import RewardConfig, ScorerConfig, build_reward
code = main(sys.argv[1:])
known = set(sys.stdlib_module_names) | {{"flowgrpo_rc", "numpy", "PIL", "__main__", "__mp_main__"}}
added = [name for name in set(sys.modules) - before if getattr(sys.modules[name], "__file__", None)]
loaded = {{name.partition(".")[0] for name in added}}
print("foreign:", sorted(name for name in loaded - known - {serving!r} if "my_reward" not in name))
sys.exit(code)
"""
SERVING = {"starlette", "uvicorn", "anyio", "h11", "click", "typing_extensions", "exceptiongroup", "idna", "sniffio"}
ABSENT = {"torch", "hydra", "omegaconf", "transformers", "diffusers", "httpx", "yaml", "rich", "accelerate", "jinja2"}
REDNESS = """
import numpy as np
def redness(images, prompts, metadata):
    red, green, blue = np.moveaxis(images.astype(np.float64), -1, 0) / 255
    return (red - (green + blue) / 2).mean(axis=(1, 2))
"""


def start(tmp_path, source, name, *python):
    """The command in a process; gives it once it listens, and a connection to it."""
    (tmp_path / "my_reward.py").write_text(source)
    command = [sys.executable, *python, "serve-reward", "--path", "my_reward.py", "--name", name, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    first = process.stdout.readline()
    assert first.startswith(f"Serving {name} (my_reward.py) at http://"), process.communicate()[1]
    address = first.split()[4].rstrip(",").removeprefix("http://")
    return process, http.client.HTTPConnection(address, timeout=60)


@pytest.mark.process
def test_the_command_needs_few_packages_and_ends_on_signals(tmp_path):
    process, connection = start(tmp_path, REDNESS, "redness", "-c", BLOCKED.format(blocked=ABSENT, serving=SERVING))
    try:
        connection.request("POST", "/", request_body())
        answer = json.loads(connection.getresponse().read())
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    red, green, blue = np.moveaxis(IMAGES.astype(np.float64), -1, 0) / 255
    expected = (red - (green + blue) / 2).mean(axis=(1, 2)).astype(np.float32)
    assert np.asarray(answer["scores"], np.float32).tobytes() == expected.tobytes()
    assert process.returncode == 0
    assert "Ended after 1 requests with 3 images" in out
    assert out.splitlines()[-1] == "foreign: []"
    assert "Traceback" not in err


@pytest.mark.process
def test_a_signal_ends_a_request_in_flight_with_words(tmp_path):
    slow = "import time\ndef f(images, prompts, metadata):\n    open('called', 'w').close()\n    time.sleep(60)\n"
    process, connection = start(tmp_path, slow, "f", "-m", "flowgrpo_rc.cli.main")
    connection.request("POST", "/", request_body())
    wait_until((tmp_path / "called").exists)
    process.send_signal(signal.SIGTERM)
    response = connection.getresponse()
    assert response.status == 503
    assert json.loads(response.read()) == {"error": "the server is being ended"}
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "none.py"], "--path: 'none.py' is not a file"),
        (["--path", "mine.py", "--name", "g"], "--name: .*mine.py defines no 'g'; it defines f"),
        (["--path", "mine.py", "--name", "f", "reward.ocr.mode=full"], "reward.ocr.mode=full: it is an option of"),
        (["--path", "mine.py", "--name", "f", "--timeout", "0"], "--timeout: got 0.0"),
        (["--path", "mine.py", "--name", "f", "--host", "203.0.113.7"], "--host, --port: 203.0.113.7:18080 cannot be"),
        (["--path", "mine.py", "--name", "f", "--port", "99999"], "--host, --port: 127.0.0.1:99999 cannot be"),
        (["--path", "mine.py", "--name", "f", "--api-key-env", "sk-123"], "--api-key-env: give the name of an environ"),
        (["--reward", "ocr", "reward.ocr.mode=none"], "reward.ocr.mode: got 'none'; choose one of recognition, full"),
        (["--reward", "ocr", "reward.ocr.moode=full"], "reward.ocr: has no key moode; .*its keys are mode, "),
        (["--reward", "ocr", "reward.judge.cache=1"], "reward.judge.cache=1: give the options of --reward ocr"),
        (["--reward", "jpeg_compressibility", "reward.jpeg_compressibility.q=1"], ".*jpeg_compressibility has no"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, BRIGHTNESS)
    assert main(["serve-reward", *options]) == 2
    said = capsys.readouterr().err.strip()
    assert re.match(f"error: {message}", said), said
    assert "\n" not in said


@pytest.mark.slow
def test_a_built_in_reward_is_served_with_its_options(monkeypatch):
    """The scores over HTTP are those of the same reward made from a configuration, to the digit."""
    answers = []
    serve = module.RewardServer.serve

    def serve_one_request(server):
        def ask():
            answers.append(json.loads(post(server, request_body())[1]))
            server.stop()

        threading.Thread(target=ask).start()
        serve(server)

    monkeypatch.setattr(module.RewardServer, "serve", serve_one_request)
    options = ["--port", "0", "reward.pickscore.model_path=asset:tiny_clip", "reward.pickscore.device=cpu"]
    assert main(["serve-reward", "--reward", "pickscore", *options]) == 0
    section = ScorerConfig(model_path="asset:tiny_clip", device="cpu")
    local = build_reward(RewardConfig(functions={"pickscore": 1.0}, pickscore=section))(IMAGES, PROMPTS, METADATA)
    assert np.asarray(answers[0]["scores"], np.float32).tobytes() == local.parts["pickscore"].tobytes()


def test_packages_that_are_missing_are_named_with_their_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve-reward", "--path", str(write(tmp_path, BRIGHTNESS)), "--name", "f"]) == 2
    assert "serve-reward needs uvicorn and starlette" in capsys.readouterr().err


def test_listening_beyond_this_machine_without_a_key_is_warned_of(tmp_path, monkeypatch, capsys):
    path = str(write(tmp_path, BRIGHTNESS))
    monkeypatch.setattr(module.RewardServer, "serve", lambda server: None)
    for host, expected in (("127.0.0.2", False), ("0.0.0.0", True)):
        assert main(["serve-reward", "--path", path, "--name", "f", "--port", "0", "--host", host]) == 0
        said = capsys.readouterr()
        assert ("warning: anyone who reaches" in said.err) == expected
        assert f"at http://{host}:" in said.out
