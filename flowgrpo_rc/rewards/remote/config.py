"""The sections ``reward.remote.<name>`` of a configuration: reward servers of a run. Loads no client."""

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
class RemoteConfig(HTTPOptions):
    """One reward server. Its section's name is a name of your choice, which ``reward.functions`` gives a weight."""

    url: str | None = None
    """Address that batches of images are posted to, e.g. ``http://127.0.0.1:18080``."""

    protocol: str = "json"
    """Protocol of the server: ``json`` (``flowgrpo-rc serve-reward``), ``verl_omni`` (a service of verl-omni's
    ``http_scorer_client``) or ``flow_grpo`` (its servers for GenEval, DeQA and UnifiedReward). The last two answer with
    pickles, which are read as plain data: nothing that one names is loaded."""

    batch_size: int = 64
    """Largest number of images in one request."""

    max_concurrent: int = 2
    """Most requests that are under way at once. For a server that scores one at a time two are enough: the second is
    sent and decoded meanwhile."""

    timeout_s: float = 120.0
    """Longest time in seconds of one try, with the time in the server's queue."""

    deadline_s: float = 1800.0
    """Longest time in seconds of all requests for a batch together, with every pause."""

    image_format: str | None = None
    """File format of the images: ``png``, which keeps every pixel, or ``jpeg``, which is smaller. null is the format of
    the protocol's own clients: ``png`` for ``json``, ``jpeg`` for the others."""

    streams: bool = False
    """Send images while the next ones are drawn, and with ``rollout.ahead`` while the actor learns, one micro-batch of
    the rollout at a time (see ``reward.overlap``). The server must then score each image by itself, whichever others
    come with it; false sends all images of a process together."""

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
        self.check_requests(where)


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
