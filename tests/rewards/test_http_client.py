"""The client of rewards that score elsewhere, against a server on loopback that does everything wrong."""

import asyncio
import gzip
import logging
import os
import re
import signal
import threading
import traceback

import pytest
from stub_server import Call, Reply, StubServer

from flowgrpo_rc.rewards import http_client as module
from flowgrpo_rc.rewards.answer import RewardError
from flowgrpo_rc.rewards.http_client import HTTPOptions, Request, ServerError, check_url, parse_json, send_all

SECRET = "sk-verySecret0123456789"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)


def ask(url, count=1, read=parse_json, **values):
    requests = [Request(f"{url}/x", b'{"n": %d}' % n) for n in range(count)]
    return send_all(requests, HTTPOptions(**values), "reward.judge", read)


def echo(call: Call) -> Reply:
    return Reply(call.json())


def test_every_answer_in_order_through_busy_signs_and_faults():
    """64 requests; calls 7, 14, ... get 503, calls 11, 22, ... 429: each of those is one try more, and no other."""

    def answer(call):
        if call.number % 11 == 0:
            return Reply("slow down", status=429, headers={"retry-after": "0.02"}, after_s=0.001)
        if call.number % 7 == 0:
            return Reply("busy", status=503, after_s=0.001)
        return Reply(call.json(), after_s=0.001)

    with StubServer(answer) as server:
        got = ask(server.url, 64, max_concurrent=8, tries=20)
    assert got == [{"n": n} for n in range(64)]
    calls = len(server.calls)
    # The calls that were refused number as many as the multiples of 7 or 11 up to the last call.
    assert calls == 64 + calls // 7 + calls // 11 - calls // 77
    assert calls == 81
    assert 1 < server.most_at_once <= 8
    bodies = [call.body for call in server.calls]
    assert {bodies.count(body) for body in bodies} >= {1, 2}
    assert len(set(bodies)) == 64


@pytest.mark.parametrize(
    "bad",
    [
        Reply({"n": 0, "more": "x" * 100}, cut_at=20),
        Reply(b"<html>busy</html>"),
        Reply(b'{"n": NaN}'),
        Reply(b"[" * 100_000),
        Reply(raw=b"what is HTTP?\r\n\r\n"),
        Reply(raw=b""),
    ],
    ids=["cut off", "html", "nan", "nested", "not http", "closed"],
)
def test_a_broken_answer_is_tried_again_and_then_told(bad):
    with StubServer(lambda call: bad if call.number < 3 else echo(call)) as server:
        assert ask(server.url) == [{"n": 0}]
    with (
        StubServer(lambda call: bad) as server,
        pytest.raises(ServerError, match=rf"^{server.url}/x: request 0 of 1: .*\(tried 3 times\)$"),
    ):
        ask(server.url, tries=3)
    assert len(server.calls) == 3


@pytest.mark.parametrize("status", [400, 404])
def test_what_cannot_pass_ends_at_once_with_the_servers_words(status):
    with (
        StubServer(lambda call: Reply(b"no\n such  model " + b"x" * 10_000, status=status)) as server,
        pytest.raises(RewardError, match=rf"request 0 of 1: answers {status}: no such model x+\.\.\.$") as caught,
    ):
        ask(server.url)
    assert len(server.calls) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("status", [200, 404])
def test_a_servers_words_have_no_escape_codes(status):
    def read(body):
        raise ValueError(body.decode())

    with (
        StubServer(lambda call: Reply(b"\x1b]0;title\x07\x1b[31mred\x9b2J\xc2\x9b2J", status=status)) as server,
        pytest.raises(ServerError, match="red") as caught,
    ):
        ask(server.url, read=lambda body: read(body.replace(b"\x9b2J\xc2", b"\xc2")), tries=1)
    assert str(caught.value).isprintable()


def test_a_redirect_is_refused():
    headers = {"location": "http://u:pw@elsewhere.example/x?token=abc"}
    with (
        StubServer(lambda call: Reply(status=307, headers=headers)) as server,
        pytest.raises(
            ServerError, match=r"answers 307, a redirect to another address, which is not followed; give"
        ) as caught,
    ):
        ask(server.url)
    assert len(server.calls) == 1
    assert not re.search("abc|pw", str(caught.value))


def test_a_huge_answer_is_cut_off(monkeypatch):
    """100 MB, once announced and once not: refused after the limit. The sender notices little more."""
    limit = 2**21
    monkeypatch.setattr(module, "LARGEST_ANSWER", limit)
    for reply in (Reply(bytes(2**20), repeat=100), Reply(raw=b"HTTP/1.1 200 OK\r\n\r\n" + bytes(3 * limit))):
        with (
            StubServer(lambda call, reply=reply: reply) as server,
            pytest.raises(ServerError, match=f"answers with more than {limit} bytes, which is cut off$"),
        ):
            ask(server.url, read=bytes)
        assert len(server.calls) == 1
        assert server.sent_bytes < 30 * 2**20  # the sockets' buffers


def test_a_packed_answer_is_not_unpacked():
    """It could become a thousand times as large."""
    packed = gzip.compress(b'"x"')
    with StubServer(lambda call: Reply(packed, headers={"content-encoding": "gzip"})) as server:
        assert ask(server.url, read=bytes) == [packed]
    assert server.calls[0].headers["accept-encoding"] == "identity"


def test_a_slow_answer_is_tried_again():
    with StubServer(lambda call: Reply(call.json(), after_s=30 if call.number == 1 else 0)) as server:
        assert ask(server.url, timeout_s=0.3) == [{"n": 0}]
    assert len(server.calls) == 2


def test_retry_after_beyond_the_deadline_ends_at_once():
    with (
        StubServer(lambda call: Reply("later", status=429, headers={"retry-after": "86400"})) as server,
        pytest.raises(ServerError, match=r"answers 429: \"later\"; it asks to wait 8.64e\+04 s .*deadline_s=600 s"),
    ):
        ask(server.url)
    assert len(server.calls) == 1


def test_the_deadline_ends_the_whole_batch():
    with (
        StubServer(lambda call: Reply(call.json(), after_s=0 if call.number <= 3 else 60)) as server,
        pytest.raises(
            ServerError, match=rf"^{server.url}/x: 3 of 8 requests were answered within reward\.judge\.deadline_s=0.5 s"
        ),
    ):
        ask(server.url, 8, deadline_s=0.5, max_concurrent=1)


def test_an_interrupt_ends_the_batch():
    """Ctrl-C in the main thread, while the server keeps everybody waiting."""
    with StubServer(lambda call: Reply(after_s=60)) as server:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ask(server.url, 4)


@pytest.mark.parametrize("count", [1, 4])
def test_a_loop_may_run_in_the_thread_that_asks(count):
    """As in a notebook."""

    async def cell(url):
        return ask(url, count)

    with StubServer(echo) as server:
        assert asyncio.run(cell(server.url)) == [{"n": n} for n in range(count)]


class TestSecrets:
    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", f" {SECRET}\n")

    @pytest.mark.parametrize(
        "reply",
        [
            Reply(f"Incorrect API key provided: {SECRET}", status=401),
            Reply({"error": f"{'x' * 280} Bearer {SECRET}"}, status=500),
            Reply(f"no JSON but {SECRET}".encode()),
            Reply(status=302, headers={"location": f"http://elsewhere.example/{SECRET}"}),
            Reply(raw=f"{SECRET}\r\n\r\n".encode()),
            Reply({"content": f"I know {SECRET}"}),
        ],
        ids=["401", "500", "garbage", "redirect", "no http", "content"],
    )
    def test_it_is_nowhere_to_be_read(self, reply, caplog):
        caplog.set_level(logging.DEBUG)

        def read(body):
            raise ValueError(f"cannot make out {parse_json(body)!r}")

        with StubServer(lambda call: reply) as server, pytest.raises(ServerError) as caught:
            ask(server.url, read=read, api_key_env="JUDGE_KEY", tries=2)
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET[:8] not in told + repr(caught.value) + str(caught.value)
        assert SECRET[:8] not in caplog.text
        assert SECRET[:8] not in repr(HTTPOptions(api_key_env="JUDGE_KEY")) + repr(Request("http://x", SECRET.encode()))

    @pytest.mark.parametrize("value", [" ", "schlüssel-1234", "a\nb-12345678"])
    def test_a_key_that_no_header_can_hold(self, value, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(ValueError, match=r"reward\.judge\.api_key_env: the environment variable") as caught:
            ask("http://127.0.0.1:9", api_key_env="JUDGE_KEY")
        assert not value.strip() or value not in str(caught.value)

    def test_a_word_for_a_key_may_stand_in_answers(self, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", "EMPTY")
        with StubServer(lambda call: Reply("EMPTY")) as server:
            assert ask(server.url, api_key_env="JUDGE_KEY") == ["EMPTY"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://u:p@x/v1", "http://x/v1?key=1", "http://x:99999"])
def test_addresses_that_cannot_be_used(url):
    with pytest.raises(ValueError, match=r"^reward\.judge\.base_url: ") as caught:
        check_url("reward.judge.base_url", url)
    assert "u:p" not in str(caught.value)
    assert "key=1" not in str(caught.value)


def test_a_proxy_is_not_asked_about_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with StubServer(echo) as server:
        assert ask(server.url) == [{"n": 0}]


def test_bodies_are_made_when_their_turn_comes():
    made = []

    def body(n):
        made.append(n)
        return b"%d" % n

    with StubServer(lambda call: Reply(call.body)) as server:
        requests = [Request(server.url, lambda n=n: body(n)) for n in range(6)]
        assert send_all(requests, HTTPOptions(max_concurrent=2), "x") == [b"%d" % n for n in range(6)]
        assert send_all([], HTTPOptions(), "x") == []
        assert send_all([Request(f"{server.url}/models")], HTTPOptions(), "x") == [b""]
    assert sorted(made) == list(range(6))
    assert [call.method for call in server.calls] == ["POST"] * 6 + ["GET"]


def test_a_body_that_cannot_be_made_is_no_fault_of_the_server():
    def body():
        raise ValueError("no image")

    with StubServer(echo) as server, pytest.raises(ValueError, match="^no image$"):
        send_all([Request(server.url, body)], HTTPOptions(), "x")
    assert not server.calls
