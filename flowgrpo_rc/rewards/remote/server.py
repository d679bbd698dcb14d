"""Answers requests for the scores of one reward function, with Python's own HTTP server.

Every connection has a thread, which reads and decodes its requests. The function itself runs on the main thread, one
request after the other: there it may use signals, an event loop and a GPU as it may in a training run, and
``RewardMix`` guards it and checks what it returns in the same way.
"""

from __future__ import annotations

import hmac
import json
import queue
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, cast

import numpy as np

from flowgrpo_rc import __version__
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rewards.mix import RewardMix
from flowgrpo_rc.rewards.remote.images import decode
from flowgrpo_rc.rewards.remote.protocols import Answer, Request, Served

LARGEST_REQUEST = 256 * 2**20
"""Bytes of a request."""

MOST_WAITING = 64
"""Requests that wait for the function. Whoever asks beyond them is told to come again."""

IDLE_S = 120.0
"""Seconds after which a connection that sends nothing is closed."""

POLL_S = 0.1
"""Seconds after which the threads look whether the server ends."""

FAREWELL_S = 2.0
"""Seconds that a client has for taking an answer that cuts its request short, or that the server's end does."""


class _Stopping(Exception):
    """The server ends before a request was answered."""


@dataclass(kw_only=True)
class _Job:
    """One decoded request, on its way to the main thread and back."""

    images: np.ndarray
    request: Request
    connection: socket.socket
    answer: Future[Answer] = field(default_factory=Future)
    told: threading.Event = field(default_factory=threading.Event)
    """Set when the answer has been sent."""

    def is_wanted(self) -> bool:
        """Whether the one who asked is still there; a client that gave up has often asked again already."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                return not selector.select(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False


class RewardServer:
    """One reward function behind an address.

    Args:
        reward: a mix of one function.
        protocol: one of ``protocols.SERVED``.
        host: the address to listen at; ``127.0.0.1`` is reached from this machine alone.
        port: its port; 0 for a free one.
        key: what a request must bring as ``Authorization: Bearer KEY``; None for no key.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, reward: RewardMix, protocol: Served, host: str, port: int, key: str | None = None) -> None:
        (self.name,) = reward.functions
        self.protocol = protocol
        self.key = key
        self.jobs: queue.Queue[_Job] = queue.Queue(MOST_WAITING)
        self.stopping = False
        self.requests = 0
        self.images = 0
        self._reward = reward
        self._http = _Http(host, port, self)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._http.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"

    def serve(self) -> None:
        """Answer requests until ``stop``, or an exception such as the ``KeyboardInterrupt`` of a signal."""
        listener = threading.Thread(target=self._http.serve_forever, args=[POLL_S], name="reward server", daemon=True)
        listener.start()
        try:
            while not self.stopping:
                try:
                    job = self.jobs.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                self._work(job)
        finally:
            self._close()

    def stop(self) -> None:
        """Have ``serve`` return, from another thread."""
        self.stopping = True

    def _work(self, job: _Job) -> None:
        try:
            if not job.is_wanted():
                raise _Stopping("the connection was closed")
            job.answer.set_result(self._score(job))
        except Exception as error:
            job.answer.set_exception(error)
        except BaseException:  # the server is being ended
            job.answer.set_exception(_Stopping())
            job.told.wait(FAREWELL_S)
            raise

    def _score(self, job: _Job) -> Answer:
        result = self._reward(job.images, job.request.prompts, job.request.metadata)
        self.requests += 1
        self.images += len(job.images)
        return Answer(scores=result.parts[self.name], info=result.info[self.name])

    def _close(self) -> None:
        self.stopping = True
        self._http.shutdown()
        self._http.server_close()
        while not self.jobs.empty():
            job = self.jobs.get_nowait()
            job.answer.set_exception(_Stopping())
            job.told.wait(FAREWELL_S)

    def health(self) -> dict[str, Any]:
        """What ``GET /health`` answers."""
        served = {"requests": self.requests, "images": self.images, "waiting": self.jobs.qsize()}
        return {"status": "ok", "function": self.name, "version": __version__, **served}


class _Http(ThreadingHTTPServer):
    """The listening socket; a thread for every connection, none of which keeps the process."""

    daemon_threads = True

    def __init__(self, host: str, port: int, reward_server: RewardServer) -> None:
        self.reward_server = reward_server
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Python's asks the name service for the machine's name, which may take long and is not used.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = map(str, self.server_address[:2])  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # which a connection that breaks off is
            _log(f"{client_address[0]} unexpected {type(error).__name__}: {one_line(error or Exception(), 300)}")


class _Refused(Exception):
    """A request that gets an error: its status and words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection. Neither paths, headers nor prompts are logged, so that no secret is."""

    protocol_version = "HTTP/1.1"  # connections stay open between requests
    _unread = False
    server_version = f"flowgrpo_rc/{__version__}"
    sys_version = ""
    timeout = IDLE_S

    @property
    def reward_server(self) -> RewardServer:
        return cast(_Http, self.server).reward_server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/health":
            self._send(404, "application/json", b'{"error": "GET /health, or POST images"}')
            return
        self._send(200, "application/json", json.dumps(self.reward_server.health()).encode())

    def do_POST(self) -> None:
        start = time.monotonic()
        protocol = self.reward_server.protocol
        job = None
        try:
            job = self._job(self._body())
            status, body = 200, self._wait_for(job)
            outcome = f"{len(job.images)} images"
        except _Refused as refused:
            status, body = refused.status, protocol.write_error(str(refused))
            outcome = str(refused)
        try:
            self._send(status, protocol.content_type, body)
            if self._unread:
                self._take_in_the_rest()
        finally:
            if job is not None:
                job.told.set()
        _log(f"{self.client_address[0]} {status} {time.monotonic() - start:.2f} s {outcome}")

    def _body(self) -> bytes:
        """The request's body, once it is known to be wanted."""
        length = self.headers.get("Content-Length", "")
        # What is not read stands before the next request: the connection cannot go on.
        self._unread = self.close_connection = True
        key = self.reward_server.key
        given = self.headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise _Refused(401, "the key in the header Authorization (Bearer KEY) is missing or wrong")
        if not length.isdecimal():
            raise _Refused(411, "the header Content-Length is missing")
        if int(length) > LARGEST_REQUEST:
            raise _Refused(413, f"the request has {length} bytes; at most {LARGEST_REQUEST} are read, so send fewer")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(400, f"the request ended after {len(body)} of {length} bytes")
        self._unread = False
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        return body

    def _take_in_the_rest(self) -> None:
        """Read what is still being sent, for a while: closing before would take the answer from the client."""
        ends_at = time.monotonic() + FAREWELL_S
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(FAREWELL_S)
            while time.monotonic() < ends_at and self.connection.recv(2**16):
                pass

    def _job(self, body: bytes) -> _Job:
        try:
            request = self.reward_server.protocol.read_request(body)
            return _Job(images=decode(request.files), request=request, connection=self.connection)
        except ValueError as error:
            raise _Refused(400, one_line(error)) from error

    def _wait_for(self, job: _Job) -> bytes:
        try:
            if self.reward_server.stopping:
                raise _Stopping
            self.reward_server.jobs.put_nowait(job)
            return self.reward_server.protocol.write_answer(job.answer.result())
        except queue.Full:
            raise _Refused(503, f"{MOST_WAITING} requests are waiting already; ask again later") from None
        except _Stopping:
            raise _Refused(503, "the server is being ended") from None
        except Exception as error:
            raise _Refused(500, one_line(error)) from error

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "5")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Python's own lines, which hold the path, are not written."""


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
