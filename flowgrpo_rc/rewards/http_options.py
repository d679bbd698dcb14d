"""Settings of requests that rewards behind a server share, and checks of addresses and keys. Loads no client."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import PositiveFloat, PositiveInt, Section, complaints

T = TypeVar("T")


@documented_fields
@dataclass(kw_only=True, slots=True)
class HTTPOptions(Section):
    """How a reward sends requests to its server."""

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
        yield from complaints(check_key_name, "api_key_env", self.api_key_env)


def own_fields_first(cls: type[T]) -> type[T]:
    """Decorator of a dataclass that extends ``HTTPOptions``: its own fields come first in config.yaml."""
    fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    own = {name: field for name, field in fields.items() if name not in HTTPOptions.__dataclass_fields__}
    cls.__dataclass_fields__ = {**own, **fields}  # type: ignore[attr-defined]
    return cls


def read_key(field_name: str, variable: str | None) -> str | None:
    """The key from the environment variable, without white space around it; None where ``variable`` is None.

    Raises:
        ValueError: the variable has no valid name, is not set, or holds characters that no header can. The message
            shows neither its name, which might be a key in the wrong place, nor its value.
    """
    # The command line's option has not been checked as the configuration has.
    check_key_name(field_name, variable)
    if variable is None:
        return None
    where = f"{field_name}: the environment variable that it names"
    # Files of keys end with a line break.
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"{where} is not set or empty; export it, or name none where no key is wanted")
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{where} holds characters that a key cannot have; export it again")
    return key


def check_key_name(field_name: str, name: str | None) -> None:
    """Raise ``ValueError`` unless ``name`` can name an environment variable; the message does not repeat it."""
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"{field_name}: give the name of an environment variable that holds the key, e.g. OPENAI_API_KEY, and not "
            "the key itself"
        )


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_url(field_name: str, url: str) -> None:
    """Raise ``ValueError`` unless ``url`` is the address of a server and holds nothing that must stay secret."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
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
