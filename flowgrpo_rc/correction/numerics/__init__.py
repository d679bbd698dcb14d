"""Importance weights, rejection, diagnostics, and metrics that merge over micro-batches and ranks, in plain torch."""
