"""Rollout engines on a Ray cluster: ``placement=ray``, with the extra ``ray``.

``handle`` is what a ``RolloutPool`` has, ``driver`` a process beside the trainer that speaks to Ray, ``actor`` what
runs on the cluster's nodes. ``driver`` alone imports Ray.
"""

from importlib.util import find_spec

_HERE = "actor_rollout_ref.rollout"


def check_ray() -> None:
    """Make sure that Ray is installed; imports nothing of it.

    Raises:
        ImportError: it is not; names the extra.
    """
    if find_spec("ray") is None:
        raise ImportError(
            f"{_HERE}.placement=ray needs Ray, which is not installed: pip install 'flowgrpo_rc[ray]' on every node, "
            f"or set {_HERE}.placement=process"
        )
