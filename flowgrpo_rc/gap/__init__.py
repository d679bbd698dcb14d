"""The off-policy gap between rollout engine and actor: measured, judged, and acted on."""
