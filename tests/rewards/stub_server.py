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
    """One request. Calls are numbered from 1, and the names of headers are in lower case."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """An answer. Without the other fields: this body, whole and at once."""

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
    """Times that the body is sent."""


class StubServer(ThreadingHTTPServer):
    """``with StubServer(answer) as server:``; ``answer`` gets a ``Call`` and returns a ``Reply``."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, answer: Callable[[Call], Reply]) -> None:
        self.answer = answer
        self.calls: list[Call] = []
        self.most_at_once = 0
        self.sent_bytes = 0
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.at_once = 0
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> StubServer:
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Break every connection and take no more."""
        self.ended.set()
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *args: Any) -> None:
        """The client has gone: part of many tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubServer

    def do_POST(self) -> None:
        stub = self.server
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with stub.lock:
            call = Call(len(stub.calls) + 1, self.command, self.path, headers, body)
            stub.calls.append(call)
            stub.at_once += 1
            stub.most_at_once = max(stub.most_at_once, stub.at_once)
        try:
            reply = stub.answer(call)
            stub.ended.wait(reply.after_s)
        finally:
            # Before the answer: when the client has it, it may send the next request at once.
            with stub.lock:
                stub.at_once -= 1
        self.close_connection = reply.raw is not None or reply.cut_at is not None
        if reply.raw is not None:
            self.wfile.write(reply.raw)
            return
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"content-length": str(len(body) * reply.repeat), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for _ in range(reply.repeat):
            self.wfile.write(body[: reply.cut_at])
            stub.sent_bytes += len(body)

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        """Nothing: a test looks at ``calls``."""
