"""HTTP server that answers requests for the scores of one reward function: starlette on uvicorn.

uvicorn runs in a thread, which receives and decodes requests. The function runs on the main thread, one request after
the other: there it may use signals, an event loop and a GPU as in a training run.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo_rc import __version__
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rewards.mix import RewardMix
from flowgrpo_rc.rewards.remote.protocols import Answer, JsonProtocol, Request, decode

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

LARGEST_REQUEST = 256 * 2**20
"""Largest size of a request in bytes."""
MOST_WAITING = 64
"""Most requests that wait or are scored; further ones are answered 503."""
MOST_DECODED = 2
"""Most requests in memory: one is scored while the next is received and decoded."""
BACKLOG = 2048
"""Connections that the system holds until they are accepted. It resets those beyond."""
IDLE_S = 120
"""Seconds after which a connection without a request, or a request that does not arrive, is given up."""
FAREWELL_S = 2
"""Seconds in which clients can take their last answers when the server ends."""
_ENDING = "the server is being ended"


class _Refused(Exception):
    """A request is answered with an error of this status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class RewardServer:
    """One reward function behind an address.

    Args:
        reward: a mix of one function.
        protocol: one of ``protocols.SERVED``.
        host: the address to listen at; ``127.0.0.1`` is reached from this machine alone.
        port: its port; 0 for a free one.
        key: the secret that every request must have as ``Authorization: Bearer KEY``; None for none.

    Raises:
        ImportError: uvicorn or starlette is not installed.
        OSError: the address cannot be listened at.
        OverflowError: the port is no port number.
    """

    def __init__(self, reward: RewardMix, protocol: JsonProtocol, host: str, port: int, key: str | None = None) -> None:
        (self.name,) = reward.functions
        self.protocol = protocol
        self.key = key
        self.stopping = False
        self.requests = 0
        self.images = 0
        self._reward = reward
        self._waiting = 0
        self._jobs: queue.SimpleQueue[tuple[Future[Answer], np.ndarray, Request] | None] = queue.SimpleQueue()
        self._decoded = asyncio.Semaphore(MOST_DECODED)
        # First, so that a missing package shows before the port is taken.
        self._http = self._server()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        name, number = self._socket.getsockname()[:2]
        self.url = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"

    def serve(self) -> None:
        """Answer requests until ``stop``, or an exception such as the ``KeyboardInterrupt`` of a signal."""
        listener = threading.Thread(target=self._http.run, args=([self._socket],), name="reward server", daemon=True)
        listener.start()
        try:
            while not self.stopping and (job := self._jobs.get()) is not None:
                self._score(*job)
        finally:
            self.stopping = True
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None:
                    job[0].set_exception(_Refused(503, _ENDING))
            self._http.should_exit = True
            listener.join(2 * FAREWELL_S)

    def stop(self) -> None:
        """Have ``serve`` return, from another thread."""
        self.stopping = True
        # Wakes ``serve`` where it waits for a job.
        self._jobs.put(None)

    def health(self) -> dict[str, Any]:
        """The answer to ``GET /health``."""
        counts = {"requests": self.requests, "images": self.images, "waiting": self._waiting}
        return {"status": "ok", "function": self.name, "version": __version__, **counts}

    def _score(self, answer: Future[Answer], images: np.ndarray, request: Request) -> None:
        # Cancelled with its connection.
        if not answer.set_running_or_notify_cancel():
            return
        try:
            result = self._reward(images, request.prompts, request.metadata)
        except Exception as error:
            answer.set_exception(_Refused(500, one_line(error)))
            return
        except BaseException:
            # Ctrl-C, or a deadline that cannot be handled: the client learns of the end before the process goes.
            answer.set_exception(_Refused(503, _ENDING))
            raise
        self.requests += 1
        self.images += len(images)
        answer.set_result((result.parts[self.name], result.info[self.name]))

    def _server(self) -> Any:
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.requests import ClientDisconnect
            from starlette.responses import JSONResponse, Response
            from starlette.routing import Route
        except ImportError as error:
            raise ImportError(
                f"serve-reward needs uvicorn and starlette ({error}); pip install '.[serve]' in a checkout, or in an "
                "environment without this package's other dependencies pip install uvicorn starlette"
            ) from error
        self._disconnected = ClientDisconnect

        async def health(request: HTTPRequest) -> Response:
            return JSONResponse(self.health())

        async def other(request: HTTPRequest) -> Response:
            return JSONResponse({"error": "GET /health, or POST images"}, 404)

        async def score(request: HTTPRequest) -> Response:
            start = time.monotonic()
            try:
                images, body = await self._answer(request)
                status = 200
                outcome = f"{images} images"
            except _Refused as refused:
                status = refused.status
                outcome = str(refused)
                body = self.protocol.write_error(outcome)
            # Neither paths, headers nor prompts, which may hold secrets.
            client = "" if request.client is None else request.client.host
            text = f"{client} {status} {time.monotonic() - start:.2f} s {outcome}"
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
            return Response(body, status, {"Retry-After": "5"} if status == 503 else None, self.protocol.content_type)

        posted = Route("/{path:path}", score, methods=["POST"])
        app = Starlette(routes=[Route("/health", health), posted, Route("/{path:path}", other)])
        return uvicorn.Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                # uvicorn's own lines would have the paths.
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=FAREWELL_S,
            )
        )

    async def _answer(self, request: HTTPRequest) -> tuple[int, bytes]:
        """Number of images and body of the answer; raises ``_Refused`` where there is an error to answer instead."""
        try:
            # Before the body is received: it may be large, and the key wrong.
            self._check_headers(request)
        except _Refused:
            # A client that still sends may not see the answer, so its body is received for a while.
            with suppress(Exception):
                await asyncio.wait_for(_discard(request), FAREWELL_S)
            raise
        self._waiting += 1
        try:
            async with self._decoded:
                # A client that lost its network would otherwise keep one of the few places for ever.
                body = await asyncio.wait_for(request.body(), IDLE_S)
                # In a thread: decoding takes seconds, and health checks must be answered meanwhile.
                scored, images = await asyncio.to_thread(self._decode, body)
                # A client that gave up has often sent the request again.
                if await request.is_disconnected():
                    raise _Refused(400, "the client has closed the connection")
                if self.stopping:
                    raise _Refused(503, _ENDING)
                answer: Future[Answer] = Future()
                self._jobs.put((answer, images, scored))
                return len(images), self.protocol.write_answer(await asyncio.wrap_future(answer))
        except asyncio.TimeoutError:
            raise _Refused(408, f"the request was not received within {IDLE_S} s") from None
        except self._disconnected:
            raise _Refused(400, "the client has closed the connection") from None
        finally:
            self._waiting -= 1

    def _check_headers(self, request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "")
        # In constant time, so that the time of an answer gives no hint of the key.
        if self.key is not None and not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise _Refused(401, "the key in the header Authorization (Bearer KEY) is missing or wrong")
        length = request.headers.get("content-length")
        # A body without a length could grow without end.
        if length is None or "transfer-encoding" in request.headers:
            raise _Refused(411, "the header Content-Length is missing")
        if int(length) > LARGEST_REQUEST:
            raise _Refused(413, f"the request has {length} bytes; at most {LARGEST_REQUEST} are read, so send fewer")
        if self._waiting >= MOST_WAITING:
            raise _Refused(503, f"{MOST_WAITING} requests are waiting already; ask again later")

    def _decode(self, body: bytes) -> tuple[Request, np.ndarray]:
        try:
            request = self.protocol.read_request(body)
            return request, decode(request.files)
        except ValueError as error:
            raise _Refused(400, one_line(error)) from error


async def _discard(request: HTTPRequest) -> None:
    async for _ in request.stream():
        pass
