"""A server on loopback whose answers a test chooses: right ones, and every kind of wrong one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Call:
    """What the server was asked."""

    number: int
    """Counts the calls, from 1."""
    method: str
    path: str
    headers: dict[str, str]
    """With names in lower case."""
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """What it answers. Without the other fields: this body, whole and at once."""

    body: Any = b""
    """Bytes, or a value that becomes JSON."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    """Pause before the answer; the end of the server ends it."""
    cut_at: int | None = None
    """Bytes of the body after which the connection breaks, though the header has promised all of them."""
    raw: bytes | None = None
    """Written to the connection in place of an answer of HTTP."""
    repeat: int = 1
    """How often the body is sent; nothing of that size is held."""


class StubServer:
    """``with StubServer(answer) as server:``; ``answer`` gets a ``Call`` and returns a ``Reply``."""

    def __init__(self, answer: Callable[[Call], Reply]) -> None:
        self.answer = answer
        self.calls: list[Call] = []
        self.most_at_once = 0
        self.sent_bytes = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._at_once = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.stub = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StubServer:
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Break every connection and take no more."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.break_connections()

    def begin(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Call:
        with self._lock:
            call = Call(len(self.calls) + 1, method, path, headers, body)
            self.calls.append(call)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        return call

    def end(self) -> None:
        with self._lock:
            self._at_once -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    stub: StubServer

    def __init__(self, *args: Any) -> None:
        self.connections: list[socket.socket] = []
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def break_connections(self) -> None:
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *args: Any) -> None:
        """The client has gone: part of many tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        stub = self.server.stub
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = stub.begin(self.command, self.path, headers, body)
        try:
            reply = stub.answer(call)
            stub.ended.wait(reply.after_s)
        finally:
            # Before the answer: when the client has it, it may send the next request at once.
            stub.end()
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        if reply.raw is not None:
            self.wfile.write(reply.raw)
            self.close_connection = True
            return
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"content-length": str(len(body) * reply.repeat), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.cut_at is not None:
            self.wfile.write(body[: reply.cut_at])
            self.close_connection = True
            return
        for _ in range(reply.repeat):
            self.wfile.write(body)
            self.server.stub.sent_bytes += len(body)

    def log_message(self, *args: Any) -> None:
        """Nothing: a test looks at ``calls``."""
