"""Rollout engines on a Ray cluster: ``placement=ray``, with the extra ``ray``.

``handle`` is what a ``RolloutPool`` has, ``driver`` a process beside the trainer that speaks to Ray, ``actor`` what
runs on the cluster's nodes. ``driver`` alone imports Ray.
"""
