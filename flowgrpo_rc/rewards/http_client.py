"""Asks a server many things at once and waits for all answers: the HTTP client of rewards that score elsewhere.

``send_all`` is an ordinary call. The requests run on an event loop in a thread of their own, so that the caller may be
interrupted at any moment: by Ctrl-C, or by the deadline that ``isolation`` sets for every reward function. What a
network does wrong is tried again (connections that fail or break off, the answers 408, 409, 429 and 5xx, and bodies
that ``read`` refuses); everything else ends in one ``ServerError`` that names the server, the request and the reason.

Nothing here holds more of an answer than ``max_answer_bytes``, follows a redirect, or puts the key into a message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from flowgrpo_rc.messages import one_line, printable
from flowgrpo_rc.rewards.errors import AnswerError
from flowgrpo_rc.rewards.http_options import HTTPOptions, is_loopback

if TYPE_CHECKING:
    import httpx

T = TypeVar("T", str, bytes)

CONNECT_S = 5.0
"""Longest time in seconds until a connection stands."""

LONGEST_BACKOFF_S = 30.0
"""Longest pause in seconds before another try that this client chooses itself; a server may ask for a longer one."""

POLL_S = 0.1
"""How often in seconds the waiting thread runs a line of Python, where an interrupt of another thread can reach it."""

RETRIED = (408, 409, 429)
"""Answers below 500 after which the same request may succeed: too slow, a conflict, too many requests."""

WORDS = 300
"""Characters of a server's own words that a message repeats."""

LONGEST_ERROR = 2**16
"""Bytes of an answer with an error that are read."""

SHORTEST_KEY = 8
"""Characters of a key that is taken for a secret. Servers that want none get a word such as EMPTY or 1, which may occur
in their answers."""

THREAD = "reward requests"
"""Name of the thread in which requests run."""

LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy")
"""Loggers that would write a line or more for each request, with all that a server says in its headers."""

_random = random.Random()
# Not the global generator, which belongs to users' rewards and whose state checkpoints hold.


class ServerError(AnswerError):
    """A server did not answer as it must, after every try that it was due. The message names address and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to ask."""

    url: str
    body: bytes | Callable[[], bytes] | None = field(default=None, repr=False)
    """What is posted, or a function that makes it when its turn comes; None for a GET."""
    _: KW_ONLY
    name: str = ""
    """Says in messages what this request is about, e.g. ``sample 3, prompt 'a cat'``; by default its number."""
    content_type: str = "application/json"
    """Of the body."""


def send_all(
    requests: Sequence[Request],
    options: HTTPOptions,
    read: Callable[[bytes], Any] = lambda body: body,
    *,
    began_at: float | None = None,
) -> list[Any]:
    """Send all requests, at most ``max_concurrent`` at once, and return what ``read`` makes of their answers, in order.

    Args:
        requests: any number of them; one client with its connections serves them all.
        read: from an answer's body to what is wanted. A ``ValueError`` that it raises means that the body is not what
            the server should send, and its text says why; the request is then tried again.
        began_at: the ``time.monotonic()`` that ``deadline_s`` is counted from; by default now.

    Raises:
        ServerError: a request failed for good, or not all were answered within ``deadline_s``. The others are dropped.
        ValueError: the key is not there.
        ImportError: httpx is not installed.
    """
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{options.section} asks a server, which needs httpx; pip install httpx") from error
    if not requests:
        return []
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_of_others)  # once, however often it is added
    return _wait_in_thread(_Batch(requests, options, read, began_at))


class _Failed(Exception):
    """One try failed. ``wait_s`` is the pause that the server asks for, None where it names none."""

    def __init__(self, reason: str, *, again: bool = True, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s


class _Batch:
    """The requests of one call of ``send_all``; its methods run in the event loop's thread."""

    def __init__(
        self, requests: Sequence[Request], options: HTTPOptions, read: Callable[[bytes], Any], began_at: float | None
    ) -> None:
        self.requests = requests
        self.options = options
        self.read = read
        self.key = options.api_key()
        self.ends_at = (time.monotonic() if began_at is None else began_at) + options.deadline_s
        self.answered = 0
        self.last_failure = ""
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Called from any thread, at any time: end what is under way."""
        self._stopped = True
        if self._running is not None:
            loop, task = self._running
            with suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(task.cancel)

    async def run(self) -> list[Any]:
        import httpx

        task = asyncio.current_task()
        assert task is not None
        self._running = (asyncio.get_running_loop(), task)
        if self._stopped:
            raise asyncio.CancelledError
        options = self.options
        # A proxy for the outer world cannot reach a server on this machine.
        proxied = not any(is_loopback(urlsplit(request.url).hostname or "") for request in self.requests)
        limits = httpx.Limits(max_connections=options.max_concurrent, max_keepalive_connections=options.max_concurrent)
        timeout = httpx.Timeout(options.timeout_s, connect=min(CONNECT_S, options.timeout_s), pool=None)
        headers = {"accept-encoding": "identity", "user-agent": "flowgrpo_rc"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        client = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=timeout, trust_env=proxied, verify=_certificates()
        )
        async with client:
            free = asyncio.Semaphore(options.max_concurrent)
            tasks = [asyncio.ensure_future(self._ask(client, free, index)) for index in range(len(self.requests))]
            try:
                left = max(self.ends_at - time.monotonic(), 0.0)
                done, late = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if task in done:
                task.result()  # the first that failed, in the order of the requests
        if late:
            raise self._late()
        return [task.result() for task in tasks]

    async def _ask(self, client: httpx.AsyncClient, free: asyncio.Semaphore, index: int) -> Any:
        """The answer to one request, after as many tries as it takes."""
        for number in range(1, self.options.tries + 1):
            try:
                async with free:
                    answer = await self._try(client, self.requests[index])
            except _Failed as failure:
                self.last_failure = str(failure)
                if not failure.again or number == self.options.tries:
                    times = f" (tried {number} times)" if number > 1 else ""
                    raise self._error(index, f"{failure}{times}") from None
                # Outside the semaphore: others may go on meanwhile.
                await asyncio.sleep(self._pause(index, failure, number))
            else:
                self.answered += 1
                return answer
        raise AssertionError("the last try returns or raises")

    async def _try(self, client: httpx.AsyncClient, request: Request) -> Any:
        import httpx

        try:
            body = await asyncio.wait_for(self._exchange(client, request), self.options.timeout_s)
        except httpx.ConnectTimeout:
            raise _Failed("no connection within a few seconds") from None
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise _Failed(f"no answer within {self._named('timeout_s')}") from None
        except httpx.TransportError as error:
            # A header that cannot be sent is repeated in the message.
            raise _Failed(self._without_key(f"{type(error).__name__}: {one_line(error, WORDS)}")) from None
        try:
            return self.read(body)
        except ValueError as error:
            raise _Failed(one_line(error, 2 * WORDS)) from None

    async def _exchange(self, client: httpx.AsyncClient, request: Request) -> bytes:
        """Send one request once; the body of an answer of status 2xx."""
        body = request.body() if callable(request.body) else request.body
        method = "GET" if body is None else "POST"
        headers = {} if body is None else {"content-type": request.content_type}
        async with client.stream(method, request.url, content=body, headers=headers) as response:
            if response.is_success:
                return await self._body(response)
            status = response.status_code
            if response.has_redirect_location:
                elsewhere = request.url if response.next_request is None else str(response.next_request.url)
                target = self._without_key(_address(elsewhere))
                raise _Failed(
                    f"answers {status}, a redirect to {target!r}, which is not followed; give the address of the "
                    "server itself",
                    again=False,
                )
            words = await self._words(response)
            again = status in RETRIED or status >= 500
            raise _Failed(f"answers {status}{words}", again=again, wait_s=_retry_after(response.headers))

    async def _body(self, response: httpx.Response) -> bytes:
        """The whole body, unless it is too large or packed, which could make it so."""
        packed = response.headers.get("content-encoding", "identity")
        if packed.lower() != "identity":
            raise _Failed(f"answers in the encoding {packed[:40]!r}, though asked for none", again=False)
        limit = self.options.max_answer_bytes
        length = response.headers.get("content-length", "0")
        body = bytearray()
        if not length.isdigit() or int(length[:20]) <= limit:
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    break
            else:
                return self._without_key(bytes(body))
        raise _Failed(f"answers with more than {limit} bytes, which is cut off", again=False)

    async def _words(self, response: httpx.Response) -> str:
        """``: what the server says``, from the beginning of an answer that is an error."""
        import httpx

        body = b""
        with suppress(httpx.TransportError):
            async for chunk in response.aiter_raw():
                body += chunk[:LONGEST_ERROR]
                if len(body) >= LONGEST_ERROR:
                    break
        text = printable(self._without_key(body).decode(errors="replace"))
        return f": {text if len(text) <= WORDS else f'{text[:WORDS]}...'}" if text else ""

    def _pause(self, index: int, failure: _Failed, number: int) -> float:
        """Seconds until the next try, which lies before the deadline."""
        pause = min(self.options.backoff_s * 2.0 ** min(number - 1, 60), LONGEST_BACKOFF_S) * _random.uniform(0.5, 1)
        if failure.wait_s is None:
            return pause
        if time.monotonic() + failure.wait_s > self.ends_at:
            raise self._error(
                index,
                f"{failure}; it asks to wait {failure.wait_s:.4g} s (retry-after), which "
                f"{self._named('deadline_s')} leaves no time for",
            ) from None
        # With some jitter too, since many may have been told the same moment.
        return failure.wait_s + pause * 0.1

    def _named(self, name: str) -> str:
        return f"{self.options.section}.{name}={getattr(self.options, name):g} s"

    def _late(self) -> ServerError:
        last = f"; the last failure: {self.last_failure}" if self.last_failure else ""
        return ServerError(
            f"{_address(self.requests[0].url)}: {self.answered} of {len(self.requests)} requests were answered within "
            f"{self._named('deadline_s')}{last}. Look at the server, or raise the deadline"
        )

    def _error(self, index: int, reason: str) -> ServerError:
        request = self.requests[index]
        name = request.name or f"request {index} of {len(self.requests)}"
        return ServerError(self._without_key(f"{_address(request.url)}: {name}: {reason}"))

    def _without_key(self, text: T) -> T:
        """Servers repeat a key that they do not know. Hidden at once, since whoever reads the answer may quote it."""
        if self.key is None or len(self.key) < SHORTEST_KEY:
            return text
        if isinstance(text, bytes):
            return _spelled(self.key).sub("(the key)", text.decode("latin-1")).encode("latin-1")
        return _spelled(self.key).sub("(the key)", text)


@cache
def _spelled(key: str) -> re.Pattern[str]:
    """The key as it is, or with JSON's escapes in place of some of its characters."""
    return re.compile("".join(rf"\\{{0,4}}(?:{re.escape(letter)}|u00(?i:{ord(letter):02x}))" for letter in key))


@cache
def _certificates() -> ssl.SSLContext:
    """The authorities that are trusted, read once and not for every batch."""
    import httpx

    return httpx.create_ssl_context()


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.threadName != THREAD


def _wait_in_thread(batch: _Batch) -> list[Any]:
    """Run the batch in a thread; whatever interrupts the wait for it ends it."""
    outcome: Future[list[Any]] = Future()

    async def work() -> None:
        # Before the loop is torn down, which a host name that is still being looked up may hold up.
        try:
            outcome.set_result(await batch.run())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon, so that a connection which does not close cannot keep the process from ending.
    threading.Thread(target=lambda: asyncio.run(work()), name=THREAD, daemon=True).start()
    try:
        # In short turns: an exception that is set on this thread is raised only where it runs Python.
        while not outcome.done():
            wait([outcome], POLL_S)
        return outcome.result()
    finally:
        batch.stop()


def parse_json(body: bytes) -> Any:
    """The value of a JSON text that came over the wire.

    Raises:
        ValueError: it is not JSON, holds NaN or infinity, or is nested too deeply.
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("what was sent is not JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"what was sent is not JSON ({error}): {body[:80].decode(errors='replace')!r}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds that the header ``retry-after`` asks to wait, which gives them or a date; None where it says neither."""
    text = headers.get("retry-after", "")
    with suppress(ValueError):
        seconds = float(text)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    with suppress(ValueError, TypeError, OverflowError):
        moment = parsedate_to_datetime(text)
        # A date without a zone is in that of Greenwich.
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return max((moment - datetime.now(timezone.utc)).total_seconds(), 0.0)
    return None


def _address(url: str) -> str:
    """Scheme, host, port and path of an address, without what may be secret in it."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "an address that cannot be read"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"[:WORDS]
