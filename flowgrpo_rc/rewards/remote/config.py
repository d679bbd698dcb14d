"""The sections ``reward.remote.<name>`` of a configuration: reward servers that a run asks. Loads no client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.checks import choice, fit_fields, positive, section, show
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.http_options import HTTPOptions, check_url
from flowgrpo_rc.rewards.remote.images import FORMATS
from flowgrpo_rc.rewards.remote.protocols import PROTOCOLS

SECTION = "reward.remote"


@documented_fields
@dataclass(kw_only=True, slots=True)
class RemoteConfig:
    """One reward server. Its section's name is a name of your choice, which ``reward.functions`` gives a weight."""

    url: str | None = None
    """Address that batches of images are posted to, e.g. ``http://127.0.0.1:18080``."""

    protocol: str = "json"
    """What the server speaks: ``json`` (``flowgrpo-rc serve-reward``), ``verl_omni`` (a service of verl-omni's
    ``http_scorer_client``) or ``flow_grpo`` (its servers for GenEval, DeQA and UnifiedReward). The last two answer with
    pickles, which are read as plain data: nothing that one names is loaded."""

    batch_size: int = 64
    """Largest number of images in one request."""

    max_concurrent: int = 2
    """Requests that are under way at once. For a server that scores one at a time two are enough: the second is sent
    and decoded meanwhile."""

    tries: int = 4
    """How often a request is sent at most: where there is no connection or it breaks off, after the answers 408, 409,
    429 and 5xx, and where the answer cannot be read."""

    timeout_s: float = 120.0
    """Longest time in seconds that one try may take, waiting in the server's queue included."""

    deadline_s: float = 1800.0
    """Longest time in seconds that all requests for a batch may take together, with every pause."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key; null for a server that wants none. The key is sent
    as ``Authorization: Bearer KEY``, and neither stored nor shown."""

    image_format: str | None = None
    """How images are sent: ``png`` as they are, ``jpeg`` smaller and changed a little. null stands for what the
    protocol's own clients send: ``png`` for ``json``, ``jpeg`` for the others."""

    streams: bool = False
    """Whether images are sent while the next ones are drawn, and with ``rollout.ahead`` while the actor learns, a
    micro-batch of the rollout at a time (see ``reward.overlap``). The server must then score each image by itself,
    whichever others come with it; false sends all images of a process together."""

    columns: list[str] | None = None
    """Names of the prompt file's columns that are sent beside the prompts; null for all, which the server's protocol
    must be able to carry."""

    def check(self, name: str) -> None:
        """Raise ``ValueError`` for the first value that cannot be used; ``name`` is that of the section."""
        where = f"{SECTION}.{name}"
        fit_fields(where, self)
        if self.url is None:
            raise ValueError(f"{where}.url: is not given; give the server's address, e.g. http://127.0.0.1:18080")
        check_url(f"{where}.url", self.url)
        choice(f"{where}.protocol", self.protocol, tuple(PROTOCOLS))
        positive(f"{where}.batch_size", self.batch_size)
        if self.image_format is not None:
            choice(f"{where}.image_format", self.image_format, FORMATS)
        self.http_options(name)

    def http_options(self, name: str) -> HTTPOptions:
        """How the server of the section ``name`` is asked."""
        return HTTPOptions(
            section=f"{SECTION}.{name}",
            max_concurrent=self.max_concurrent,
            tries=self.tries,
            timeout_s=self.timeout_s,
            deadline_s=self.deadline_s,
            api_key_env=self.api_key_env,
        )


def remote_scorers(value: Any) -> dict[str, RemoteConfig]:
    """The servers by name that the section ``reward.remote`` holds, as mappings or as ``RemoteConfig``.

    Raises:
        ValueError: it is no mapping, or a server's section cannot be used; names the field, its value and what to do.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{SECTION}: got {show(value)}; give servers by name, e.g. {SECTION}.geneval.url=http://...")
    scorers = {str(name): section(f"{SECTION}.{name}", RemoteConfig, entry) for name, entry in value.items()}
    for name, scorer in scorers.items():
        scorer.check(name)
    return scorers
