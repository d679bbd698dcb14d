"""Rollout engines on a Ray cluster: ``placement=ray``, with the extra ``ray``.

``handle`` is what a ``RolloutPool`` has, ``driver`` a process beside the trainer that speaks to Ray, ``actor`` what
runs on the cluster's nodes. ``driver`` alone imports Ray.
"""

import os
from importlib.util import find_spec

from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.placement import Share

_HERE = "actor_rollout_ref.rollout"


def check_ray(rollout: RolloutConfig, share: Share) -> None:
    """As ``PlacementEntry.check``; imports nothing of Ray.

    Raises:
        ImportError: Ray is not installed.
        ValueError: no cluster is named, and several trainer processes would each start a Ray of their own.
    """
    if find_spec("ray") is None:
        raise ImportError(
            f"{_HERE}.placement=ray needs Ray, which is not installed: pip install 'flowgrpo_rc[ray]' on every node, "
            f"or set {_HERE}.placement=process"
        )
    if address_of(rollout) is None and share.count > 1:
        raise ValueError(
            f"{_HERE}.ray.address: got null with {share.count} trainer processes on this machine, each of which would "
            f"start a Ray of its own; start one with `ray start --head` and set {_HERE}.ray.address=auto"
        )


def address_of(rollout: RolloutConfig) -> str | None:
    """Where the cluster is; ``None``: Ray is started for the run."""
    return rollout.ray.address or os.environ.get("RAY_ADDRESS") or None
