"""What is computed: importance weights, rejection, diagnostics, and metrics that merge over micro-batches and ranks."""
