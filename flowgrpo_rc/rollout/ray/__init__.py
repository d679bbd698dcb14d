"""Engines on a Ray cluster, ``placement=ray``: ``handle`` is the trainer's side, ``actor`` runs on the nodes."""
