"""The off-policy gap between rollout engine and actor: measured, judged (``safety``), and acted on (bands, guard)."""
