"""How a reward asks the server that scores for it, as its section of the configuration says, and what addresses and
keys may be. Loads no client."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from flowgrpo_rc.checks import positive

QUOTED = 300
"""Characters of an address that a message repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPOptions:
    """How ``send_all`` asks.

    Raises:
        ValueError: a value cannot be used; names ``section`` and field.
    """

    section: str
    """The section of the configuration that these come from, e.g. ``reward.judge``; for messages."""
    max_concurrent: int = 32
    """Requests that are under way at once."""
    tries: int = 4
    """How often one request is sent at most."""
    timeout_s: float = 60.0
    """Longest time in seconds that one try may take."""
    deadline_s: float = 600.0
    """Longest time in seconds that all requests may take together, with every pause."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None for a server that wants none."""
    max_answer_bytes: int = 16 * 2**20
    """Size at which an answer is cut off and refused."""
    backoff_s: float = 0.5
    """Pause in seconds before the second try; it doubles with every further one, and each is drawn from its upper
    half."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "tries", "timeout_s", "deadline_s", "max_answer_bytes", "backoff_s"):
            positive(f"{self.section}.{name}", getattr(self, name))
        check_key_name(f"{self.section}.api_key_env", self.api_key_env)

    def api_key(self) -> str | None:
        """See ``read_key``."""
        return read_key(f"{self.section}.api_key_env", self.api_key_env)


def read_key(field_name: str, variable: str | None) -> str | None:
    """The key from the environment variable, without white space around it; None where none is named.

    Raises:
        ValueError: ``variable`` can name none, it is not set, or holds what no header can; the message shows neither
            its name, which might be a key put into the wrong place, nor its value.
    """
    check_key_name(field_name, variable)
    if variable is None:
        return None
    where = f"{field_name}: the environment variable that it names"
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
    """Whether a host is this machine, reached by itself alone."""
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
    # A password or a query may be a secret, and would be logged: it is not repeated.
    if parts is not None and (parts.username is not None or parts.query or parts.fragment):
        raise ValueError(
            f"{field_name}: the address holds a user name, a query or a fragment; give scheme, host, port and path "
            "alone, and a key through api_key_env"
        )
    if not known or not re.fullmatch(r"[!-~]+", url):
        raise ValueError(f"{field_name}: got {url[:QUOTED]!r}; give an address as http://127.0.0.1:8000/v1")
