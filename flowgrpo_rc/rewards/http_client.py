"""HTTP client of rewards behind a server: its settings, and many requests at once with their answers in order.

The requests run on an event loop in a background thread. Cancelling them there ends a batch at once, whatever the
server does, when Ctrl-C or a deadline interrupts the caller. httpx is imported with the first request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.messages import one_line, printable
from flowgrpo_rc.rewards.answer import AnswerError, shortened
from flowgrpo_rc.section import PositiveFloat, PositiveInt, Section, complaints

if TYPE_CHECKING:
    import httpx
    import tenacity

T = TypeVar("T")
CONNECT_S = 5.0
"""Longest time in seconds until a connection is established."""
BACKOFF_S = 0.5
"""Pause in seconds before the second try. It doubles with each further one up to ``LONGEST_BACKOFF_S``, and is drawn
from its upper half."""
LONGEST_BACKOFF_S = 30.0
"""Longest pause in seconds; a server may ask for a longer one."""
LARGEST_ANSWER = 16 * 2**20
"""Size in bytes beyond which an answer is refused."""
RETRIED = (408, 409, 429)
"""Statuses below 500 after which the same request may succeed: too slow, a conflict, too many requests."""
# Not the global generator, which belongs to users' rewards and whose state checkpoints hold.
_random = random.Random()


@documented_fields
@dataclass(kw_only=True, slots=True)
class HTTPOptions(Section):
    """The requests of a reward to its server."""

    max_concurrent: PositiveInt = 32
    """Most requests that are under way at once, of each process of the run."""
    tries: PositiveInt = 4
    """Most times that a request is sent: after a connection that fails or breaks off, the answers 408, 409, 429 and
    5xx, and an answer that cannot be read."""
    timeout_s: PositiveFloat = 60.0
    """Longest time in seconds of one try, with the time in the server's queue."""
    deadline_s: PositiveFloat = 600.0
    """Longest time in seconds of all requests for a batch together, with every pause."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; null for a server without one. The key is sent as
    ``Authorization: Bearer KEY``, and neither stored nor shown."""

    def problems(self) -> Iterator[str]:
        """A key in the place of the variable that holds it."""
        yield from complaints(_check_key_name, "api_key_env", self.api_key_env)


def own_fields_first(cls: type[T]) -> type[T]:
    """Decorator of a dataclass that extends ``HTTPOptions``: its own fields come first in config.yaml."""
    fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    own = {name: field for name, field in fields.items() if name not in HTTPOptions.__dataclass_fields__}
    cls.__dataclass_fields__ = own | fields  # type: ignore[attr-defined]
    return cls


def check_url(field_name: str, url: str) -> None:
    """Raise ``ValueError`` unless ``url`` is the address of a server and holds nothing that must stay secret."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
        parts = None
    # Messages and logs show the address, so it may hold no secret; this one does not repeat it either.
    if parts is not None and (parts.username is not None or parts.query or parts.fragment):
        raise ValueError(
            f"{field_name}: the address holds a user name, a query or a fragment; give scheme, host, port and path "
            "alone, and a key through api_key_env"
        )
    if not known or not re.fullmatch(r"[!-~]+", url):
        raise ValueError(f"{field_name}: got {url[:300]!r}; give an address as http://127.0.0.1:8000/v1")


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(field_name: str, variable: str | None) -> str | None:
    """The key from the environment variable, without white space around it; None where ``variable`` is None. The
    message of its ``ValueError`` shows neither name, which might be a key in the wrong place, nor value."""
    # The command line's option has not been checked as the configuration has.
    _check_key_name(field_name, variable)
    if variable is None:
        return None
    # Files of keys end with a line break.
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(
            f"{field_name}: the environment variable that it names is not set, is empty or holds characters that a key "
            "cannot have; export it, or name none where no key is wanted"
        )
    return key


def _check_key_name(field_name: str, name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{field_name}: give the name of an environment variable that holds the key, not the key")


class ServerError(AnswerError):
    """A server did not answer as it must, after all tries. The message names address, request and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a POST of ``body``, or a GET without one."""

    url: str
    body: bytes | Callable[[], bytes] | None = field(default=None, repr=False)
    """A function is called when the request is sent, so that not all bodies are in memory at once."""
    _: KW_ONLY
    name: str = ""
    """Name in messages, e.g. ``sample 3, prompt 'a cat'``; by default the request's number."""
    content_type: str = "application/json"


def send_all(
    requests: Sequence[Request],
    options: HTTPOptions,
    section: str,
    read: Callable[[bytes], Any] = bytes,
    *,
    tries: int | None = None,
    began_at: float | None = None,
) -> list[Any]:
    """Send all requests, at most ``max_concurrent`` at once, and return what ``read`` makes of the answers, in order.

    Args:
        section: the configuration's section of ``options``, for messages.
        read: from an answer's body to its value. After a ``ValueError`` the request is tried again.
        tries: replaces ``options.tries``.
        began_at: the ``time.monotonic()`` from which ``deadline_s`` counts; by default now.

    Raises:
        ServerError: a request failed for good, or not all were answered within ``deadline_s``. The others are dropped.
        ValueError: the environment variable of the key is not set.
        Exception: whatever the function of a body raises, at once.
    """
    if not requests:
        return []
    key = read_key(f"{section}.api_key_env", options.api_key_env)
    ends_at = (time.monotonic() if began_at is None else began_at) + options.deadline_s
    for name in ("httpx", "httpcore"):
        # They would log every request, with the server's headers.
        logging.getLogger(name).setLevel(logging.WARNING)
    batch = _Batch(requests, options, section, read, tries or options.tries, key, ends_at)
    outcome = asyncio.run_coroutine_threadsafe(batch.run(), _loop(os.getpid()))
    try:
        return outcome.result()
    finally:
        # Ctrl-C interrupts the wait alone; the requests go on until they are cancelled.
        outcome.cancel()


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of all batches of a process. A fork has no copy of its thread, and so needs its own."""
    loop = asyncio.new_event_loop()
    # A daemon: a connection that does not close cannot keep the process from ending.
    threading.Thread(target=loop.run_forever, name="reward requests", daemon=True).start()
    return loop


class _Failed(Exception):
    """A try failed. ``wait_s`` is the pause that the server wants before the next one."""

    def __init__(self, reason: str, *, again: bool, wait_s: float) -> None:
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s


@dataclass
class _Batch:
    """The requests of one call of ``send_all``; its methods run on the event loop."""

    requests: Sequence[Request]
    options: HTTPOptions
    section: str
    read: Callable[[bytes], Any]
    tries: int
    key: str | None
    ends_at: float
    last_failure: str = ""

    async def run(self) -> list[Any]:
        import httpx

        options = self.options
        free = asyncio.Semaphore(options.max_concurrent)
        # All requests of a batch go to one server.
        address = urlsplit(self.requests[0].url)
        authorization = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        client = httpx.AsyncClient(
            # Answers are small, and an unpacked size could not be limited.
            headers={"accept-encoding": "identity", "user-agent": "flowgrpo_rc", **authorization},
            # The semaphore limits requests; a limit here would count the wait for a connection as time of the server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=options.max_concurrent),
            timeout=httpx.Timeout(options.timeout_s, connect=min(CONNECT_S, options.timeout_s)),
            # A proxy for the outer world cannot reach a server on this machine.
            trust_env=not is_loopback(address.hostname or ""),
            # Reading the authorities' certificates takes longer than a request.
            verify=address.scheme == "https",
        )
        async with client:
            tasks = [asyncio.ensure_future(self._answer(client, free, index)) for index in range(len(self.requests))]
            try:
                left = max(self.ends_at - time.monotonic(), 0.0)
                # One request that fails for good makes the answers of the others useless.
                done, late = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in tasks:
                    task.cancel()
                # The client may only be closed when no task uses it.
                await asyncio.gather(*tasks, return_exceptions=True)
        answers = [task.result() for task in tasks if task in done]
        if late:
            raise ServerError(
                f"{self.requests[0].url}: {len(done)} of {len(tasks)} requests were answered within "
                f"{self._named('deadline_s')}{self.last_failure}. Look at the server, or raise the deadline"
            )
        return answers

    async def _answer(self, client: httpx.AsyncClient, free: asyncio.Semaphore, index: int) -> Any:
        """The answer to one request, after as many tries as it takes."""
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        request = self.requests[index]
        name = request.name or f"request {index} of {len(self.requests)}"

        async def once() -> Any:
            # For one try alone: other requests may use the place during a pause.
            async with free:
                # In a thread, since the images of a request take seconds to encode. A body that cannot be made is no
                # fault of the server, so that it ends the batch.
                body = await asyncio.to_thread(request.body) if callable(request.body) else request.body
                return await self._try(client, request, body)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.tries),
            wait=_pause,
            retry=retry_if_exception(lambda error: isinstance(error, _Failed) and error.again),
            reraise=True,
        )
        try:
            return await retrying(once)
        except _Failed as failure:
            number = retrying.statistics["attempt_number"]
            times = f" (tried {number} times)" if number > 1 else ""
            raise ServerError(f"{request.url}: {name}: {failure}{times}") from None

    async def _try(self, client: httpx.AsyncClient, request: Request, sent: bytes | None) -> Any:
        """Send a request once; raises ``_Failed`` with a reason in one line, without the key."""
        import httpx

        again = True
        wait_s = 0.0
        try:
            # httpx limits each read; an answer that trickles in needs a limit on the whole.
            response, body = await asyncio.wait_for(_exchange(client, request, sent), self.options.timeout_s)
            body = self._without_key(body)
            if response.is_success and len(body) <= LARGEST_ANSWER:
                return self.read(body)
            again = response.status_code in RETRIED or response.status_code >= 500
            # Seconds; a date, the other form of the header, counts as none.
            asked = response.headers.get("retry-after", "")
            wait_s = float(asked) if re.fullmatch(r"\d+(\.\d+)?", asked) else 0.0
            reason = _refusal(response, body)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            reason = f"no answer within {self._named('timeout_s')}"
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}"
        except ValueError as error:
            reason = one_line(error, 600)
        # Readers and httpx quote a server's words, and those may repeat the key.
        reason = printable(self._without_key(reason.encode(errors="replace")).decode())
        if wait_s and time.monotonic() + wait_s > self.ends_at:
            again = False
            reason += (
                f"; it asks to wait {wait_s:.4g} s (retry-after), which {self._named('deadline_s')} leaves no time for"
            )
        self.last_failure = f"; the last failure: {reason}"
        raise _Failed(reason, again=again, wait_s=wait_s)

    def _without_key(self, text: bytes) -> bytes:
        # Servers without keys get a short word such as EMPTY, which answers may contain.
        secret = self.key is not None and len(self.key) >= 8
        return text.replace(self.key.encode(), b"(the key)") if self.key and secret else text

    def _named(self, name: str) -> str:
        return f"{self.section}.{name}={getattr(self.options, name):g} s"


async def _exchange(client: httpx.AsyncClient, request: Request, body: bytes | None) -> tuple[httpx.Response, bytes]:
    """A response and its body, which is cut a little beyond ``LARGEST_ANSWER``."""
    method = "GET" if body is None else "POST"
    headers = {} if body is None else {"content-type": request.content_type}
    content = bytearray()
    async with client.stream(method, request.url, content=body, headers=headers) as response:
        # Raw: a packed answer could unpack to any size.
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > LARGEST_ANSWER:
                break
    return response, bytes(content)


def _refusal(response: httpx.Response, body: bytes) -> str:
    """The reason for a response that is not used."""
    if len(body) > LARGEST_ANSWER:
        return f"answers with more than {LARGEST_ANSWER} bytes, which is cut off"
    answer = f"answers {response.status_code}"
    # A redirect could send images and key to another server.
    if response.has_redirect_location:
        return f"{answer}, a redirect to another address, which is not followed; give the address of the server itself"
    words = shortened(printable(body[: 2**16].decode(errors="replace")))
    return f"{answer}: {words}" if words else answer


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds until the next try."""
    failure = state.outcome.exception() if state.outcome else None
    wanted = failure.wait_s if isinstance(failure, _Failed) else 0.0
    pause = min(BACKOFF_S * 2.0 ** min(state.attempt_number - 1, 60), LONGEST_BACKOFF_S) * _random.uniform(0.5, 1)
    # The jitter stays: the server may have named the same moment to many clients.
    return wanted + pause * 0.1 if wanted else pause


def parse_json(body: bytes) -> Any:
    """The value of a JSON text; ``ValueError`` where it is none, holds NaN or infinity, or is nested too deeply."""
    try:
        # Python would read NaN and Infinity, which are not JSON and no scores.
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what was sent is not JSON ({error}): {body[:80].decode(errors='replace')!r}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")
