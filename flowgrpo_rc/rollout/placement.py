"""Places of rollout engines: beside the actor, in processes of this machine, or on a Ray cluster. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import Check, NonNegativeFloat, PositiveFloat, Section

IN_TRAINER = "trainer"
"""The placement of an engine beside the actor."""
PLACEMENTS = (IN_TRAINER, "process", "ray")
"""Values of ``rollout.placement``."""
SHORTEST_SILENCE = 3.0
"""Seconds. A working process may give no sign of life for a second or two."""
Silence = Annotated[
    PositiveFloat,
    Check(
        lambda seconds: seconds >= SHORTEST_SILENCE,
        f"a process at work may be silent for a second or two, so give at least {SHORTEST_SILENCE:g}",
    ),
]
_HERE = "actor_rollout_ref.rollout"
_DEVICE = re.compile(r"cpu|[a-z]+:\d+")
JOINED = "+"
"""Joins the devices of one engine in an entry of ``rollout.devices``."""


@dataclass(frozen=True)
class Share:
    """Position among the trainer processes of a machine, which divide its engines among themselves."""

    index: int
    """From 0."""
    count: int
    """Number of trainer processes."""


ALONE = Share(0, 1)
"""One trainer process on its machine."""


@dataclass(kw_only=True, slots=True)
class EngineTimeouts(Section):
    """Time limits after which an engine's process is ended and started again."""

    start_timeout_s: PositiveFloat = 900.0
    """Seconds from the start of the process until the model is loaded."""

    request_timeout_s: PositiveFloat = 3600.0
    """Seconds for one request: a rollout with all its images, or with ``placement`` one micro-batch of it."""

    sync_timeout_s: PositiveFloat = 600.0
    """Seconds for taking over one adapter."""

    silence_timeout_s: Silence = 60.0
    """Seconds without a sign of life; a process gives two a second. At least ``SHORTEST_SILENCE``."""

    close_timeout_s: PositiveFloat = 20.0
    """Seconds for a clean end, after which the process is killed."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class ProcessConfig(EngineTimeouts):
    """The section ``rollout.process``: time limits after which an engine elsewhere is ended and started again."""

    section = f"{_HERE}.process"


@documented_fields
@dataclass(kw_only=True, slots=True)
class RayConfig(Section):
    """The section ``rollout.ray``: the cluster of engines with ``placement=ray``."""

    section = f"{_HERE}.ray"

    address: str | None = None
    """Address of a running cluster that this machine belongs to, ``host:port``; ``auto`` finds it. Null joins the
    cluster of the variable ``RAY_ADDRESS``, and without one starts Ray on this machine for the run."""

    num_gpus: NonNegativeFloat = 1.0
    """GPUs that Ray reserves for each engine; 0 for engines on the CPU."""

    num_cpus: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for each engine."""

    def problems(self) -> Iterator[str]:
        """An address that needs Ray's client, and shares of several GPUs."""
        if self.address is not None and self.address.startswith("ray://"):
            yield (
                f"address: got {self.address!r}, Ray's way in from outside; engines are asked from a machine of the "
                "cluster, so run `ray start --address=HEAD:6379` on this one and set it to auto"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            yield (
                f"num_gpus: got {self.num_gpus:g}; Ray gives a share of one GPU or whole GPUs, so give a number up to "
                "1 or a whole one"
            )


def device_groups(devices: list[str]) -> list[tuple[str, ...]]:
    """``rollout.devices`` as the devices of each engine.

    Raises:
        ValueError: an entry names no device, or one is named twice.
    """
    field = f"{_HERE}.devices"
    if not devices:
        raise ValueError(f"{field}: got []; name a device for each engine, e.g. [cuda:2,cuda:3], or set it to null")
    # Two engines on one device would each plan with all of its memory; on the CPU they only share time.
    groups = [tuple(entry.split(JOINED)) for entry in devices]
    named = [device for group in groups for device in group]
    for device in named:
        if not _DEVICE.fullmatch(device):
            raise ValueError(
                f"{field}: got {device!r}; a device is cpu or a kind and a number, e.g. cuda:2, and an engine on "
                f"several of them is cuda:2{JOINED}cuda:3"
            )
        if device != "cpu" and named.count(device) > 1:
            raise ValueError(f"{field}: names {device} twice; two engines would share its memory, so give each its own")
    return groups
