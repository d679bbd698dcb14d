"""Rollout engines on a Ray cluster: ``placement=ray``, with the extra ``ray``.

``handle`` is the trainer's side and ``actor`` runs on the cluster's nodes. The trainer is an ordinary driver of the
cluster.
"""
