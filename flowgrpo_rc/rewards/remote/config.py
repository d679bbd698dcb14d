"""The sections ``reward.remote.<name>`` of a configuration: reward servers of a run. Loads no client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.http_client import HTTPOptions, check_url, own_fields_first
from flowgrpo_rc.rewards.remote.images import FORMATS
from flowgrpo_rc.rewards.remote.protocols import PROTOCOLS
from flowgrpo_rc.section import PositiveFloat, PositiveInt, Problems, complaints, convert, one_of

SECTION = "reward.remote"


@documented_fields
@own_fields_first
@dataclass(kw_only=True, slots=True)
class RemoteConfig(HTTPOptions):
    """One reward server. Its section's name is a name of your choice, which ``reward.functions`` gives a weight."""

    url: str | None = None
    """Address that batches of images are posted to, e.g. ``http://127.0.0.1:18080``."""
    protocol: Annotated[str, one_of(PROTOCOLS)] = "json"
    """Protocol of the server: ``json`` (``flowgrpo-rc serve-reward``), ``verl_omni`` (a service of verl-omni's
    ``http_scorer_client``) or ``flow_grpo`` (its servers for GenEval, DeQA and UnifiedReward). The last two answer with
    pickles, which are read as plain data: nothing that one names is loaded."""
    batch_size: PositiveInt = 64
    """Largest number of images in one request."""
    max_concurrent: PositiveInt = 2
    """Most requests that are under way at once. For a server that scores one at a time two are enough: the second is
    sent and decoded meanwhile."""
    timeout_s: PositiveFloat = 120.0
    """Longest time in seconds of one try, with the time in the server's queue."""
    deadline_s: PositiveFloat = 1800.0
    """Longest time in seconds of all requests for a batch together, with every pause."""
    image_format: Annotated[str, one_of(FORMATS)] | None = None
    """File format of the images: ``png``, which keeps every pixel, or ``jpeg``, which is smaller. null is the format of
    the protocol's own clients: ``png`` for ``json``, ``jpeg`` for the others."""
    streams: bool = False
    """Send images while the next ones are drawn, and with ``rollout.ahead`` while the actor learns, one micro-batch of
    the rollout at a time (see ``reward.overlap``). The server must then score each image by itself, whichever others
    come with it; false sends all images of a process together."""
    columns: list[str] | None = None
    """Names of the prompt file's columns that are sent beside the prompts; null for all, which the server's protocol
    must be able to carry."""

    def problems(self) -> Iterator[str]:
        """An address or a key's name that cannot be used."""
        if self.url is None:
            yield "url: is not given; give the server's address, e.g. http://127.0.0.1:18080"
        else:
            yield from complaints(check_url, "url", self.url)
        yield from HTTPOptions.problems(self)


def remote_scorers(value: Any) -> dict[str, RemoteConfig]:
    """The servers by name that the section ``reward.remote`` holds, as mappings or as ``RemoteConfig``.

    Raises:
        Problems: servers' sections cannot be used; messages begin with a server's name.
        ValueError: ``value`` is no mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"got {show(value)}; give servers by name, e.g. {SECTION}.geneval.url=http://...")
    servers: dict[str, RemoteConfig] = {}
    found: list[str] = []
    for name, entry in (value or {}).items():
        try:
            servers[str(name)] = convert(RemoteConfig, entry)
        except Problems as error:
            found += [f"{name}.{message}" for message in error.found]
        except ValueError as error:
            found.append(f"{name}: {error}")
    if found:
        raise Problems(found)
    return servers
